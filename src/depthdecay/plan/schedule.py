"""Schedules: how many layers produce generated token i, computed exactly in pure Python."""

from __future__ import annotations

import decimal
import reprlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from depthdecay.argument_checks import Number, exact_decimal, whole_number
from depthdecay.errors import ArgumentError, DepthDecayError

# Far above any real model; it keeps a damaged plan file from requesting a table that fills the memory.
MAX_LAYERS = 10_000


def exact_alpha(value: object) -> Decimal:
    alpha = exact_decimal("alpha", value)
    if not 0 < alpha <= 1:
        raise DepthDecayError(f"alpha is {reprlib.repr(value)}; expected a number above 0 and at most 1")
    return alpha


@dataclass(frozen=True)
class Schedule:
    """Maps a token index to a depth. Token 0 comes from the prompt's full-depth pass, and depth never rises."""

    kind: ClassVar[str] = ""
    num_layers: int

    def __post_init__(self) -> None:
        self._set("num_layers", whole_number("num_layers", self.num_layers, 1, MAX_LAYERS))
        self._check()
        starts, depths = [0], [self.num_layers]
        for start, depth in self._falls():
            if depth < depths[-1]:
                if start == starts[-1]:
                    depths[-1] = depth
                else:
                    starts.append(start)
                    depths.append(depth)
        self._set("_starts", tuple(starts))
        self._set("_depths", tuple(depths))

    _starts: ClassVar[tuple[int, ...]]
    _depths: ClassVar[tuple[int, ...]]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        """Reject bad values; num_layers is already checked."""

    def _falls(self) -> Iterator[tuple[int, int]]:
        """(first token index, depth) for each drop in depth, in order, from token 1 on."""
        return iter(())

    @property
    def final_depth(self) -> int:
        """The last depth, held from there on."""
        return self._depths[-1]

    def depth(self, i: int) -> int:
        """How many layers produce generated token i."""
        return self._depths[bisect_right(self._starts, whole_number("token index", i, 0)) - 1]

    def segments(self, n: int) -> Iterator[tuple[int, int]]:
        """(depth, how many tokens have it) over the first n tokens."""
        whole_number("number of tokens", n, 0)
        for start, end, depth in zip(self._starts, (*self._starts[1:], n), self._depths, strict=True):
            if start < n:
                yield depth, min(end, n) - start

    def table(self, n: int) -> tuple[int, ...]:
        """The depths of tokens 0 to n-1."""
        return tuple(depth for depth, count in self.segments(n) for _ in range(count))

    def visited_depths(self, n: int) -> tuple[int, ...]:
        """The distinct depths of the first n tokens, deepest first."""
        return tuple(depth for depth, _ in self.segments(n))

    def layers_executed(self, n: int) -> int:
        return sum(depth * count for depth, count in self.segments(n))

    def tokens_at_least(self, depth: int, n: int) -> int:
        """How many of the first n tokens run at this depth or deeper."""
        return sum(count for reached, count in self.segments(n) if reached >= depth)

    def mean_depth(self, n: int) -> float:
        return self.layers_executed(whole_number("number of tokens", n, 1)) / n

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # A string keeps every digit of a Decimal; a JSON number would be read back as a float.
        return {"kind": self.kind} | {k: format(v, "f") if isinstance(v, Decimal) else v for k, v in values.items()}


@lru_cache(maxsize=4096)
def _ln(number: Decimal, digits: int) -> Decimal:
    return decimal.Context(prec=digits).ln(number)


def _first_exponent_below(num_layers: int, alpha: Decimal, bound: int) -> int:
    """The smallest e with num_layers * alpha**e < bound <= num_layers, for alpha < 1, in closed form."""
    places = -int(alpha.as_tuple().exponent)
    # The crossing is at most about 10**places * ln(num_layers) tokens away, so `crossing` needs digits on both sides
    # of the point. Precision doubles in the rare case that this is not enough to decide.
    digits = 40 + 2 * places
    while True:
        context = decimal.Context(prec=digits)
        distance = context.subtract(_ln(Decimal(num_layers), digits), _ln(Decimal(bound), digits))
        crossing = context.divide(distance, context.minus(_ln(alpha, digits)))
        nearest = crossing.to_integral_value()
        gap = context.subtract(crossing, nearest)
        if gap and gap.adjusted() > 20 + places - digits:
            return int(crossing) + 1
        # num_layers * (p/q)**e is whole only if q**e divides num_layers. So a crossing that is exactly whole is small,
        # and exact arithmetic decides it; any other crossing is not whole, and more digits decide it.
        if nearest <= num_layers.bit_length():
            exponent = int(nearest)
            return exponent if num_layers * Fraction(alpha) ** exponent < bound else exponent + 1
        digits *= 2


@dataclass(frozen=True)
class PowerSchedule(Schedule):
    """The paper's rule: floor(L * alpha**max(0, i - warmup_tokens)), held after token `horizon` - 1."""

    kind: ClassVar[str] = "power"
    alpha: Decimal
    warmup_tokens: int = 0
    min_layers: int = 1
    horizon: int | None = None

    def _check(self) -> None:
        self._set("alpha", exact_alpha(self.alpha))
        self._set("warmup_tokens", whole_number("warmup_tokens", self.warmup_tokens, 0))
        self._set("min_layers", whole_number("min_layers", self.min_layers, 1, self.num_layers))
        if self.horizon is not None:
            self._set("horizon", whole_number("horizon", self.horizon, 1))

    def _falls(self) -> Iterator[tuple[int, int]]:
        if self.alpha == 1:
            return
        for depth in range(self.num_layers - 1, self.min_layers - 1, -1):
            start = self.warmup_tokens + _first_exponent_below(self.num_layers, self.alpha, depth + 1)
            if self.horizon is not None and start >= self.horizon:
                return
            yield start, depth


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """SkipDecode's rule: a straight line from `start_depth` to `end_depth`, reached at token `over_tokens` - 1."""

    kind: ClassVar[str] = "linear"
    start_depth: int
    end_depth: int
    over_tokens: int

    def _check(self) -> None:
        self._set("start_depth", whole_number("start_depth", self.start_depth, 1, self.num_layers))
        self._set("end_depth", whole_number("end_depth", self.end_depth, 1, self.start_depth))
        self._set("over_tokens", whole_number("over_tokens", self.over_tokens, 1))

    def _falls(self) -> Iterator[tuple[int, int]]:
        yield 1, self.start_depth
        drop, steps = self.start_depth - self.end_depth, self.over_tokens - 1
        for fallen in range(drop):
            # Rounded down, as in the power rule: a depth ends as soon as the line falls below it.
            yield max(1, fallen * steps // drop + 1), self.start_depth - fallen - 1


@dataclass(frozen=True)
class ConstantSchedule(Schedule):
    """Every token after the first at one depth."""

    kind: ClassVar[str] = "constant"
    constant_depth: int

    def _check(self) -> None:
        self._set("constant_depth", whole_number("depth", self.constant_depth, 1, self.num_layers))

    def _falls(self) -> Iterator[tuple[int, int]]:
        yield 1, self.constant_depth


@dataclass(frozen=True)
class FullSchedule(Schedule):
    """Every token at full depth."""

    kind: ClassVar[str] = "full"


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.kind: schedule for schedule in (PowerSchedule, LinearSchedule, ConstantSchedule, FullSchedule)
}


def schedule_from_dict(values: Mapping[str, Any]) -> Schedule:
    """The inverse of `to_dict`."""
    if not isinstance(values, Mapping):
        raise DepthDecayError(f"a schedule is a mapping with a kind, not {reprlib.repr(values)}")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in SCHEDULES:
        raise DepthDecayError(f"schedule kind is {reprlib.repr(kind)}; expected one of {', '.join(SCHEDULES)}")
    known = fields(SCHEDULES[kind])
    given = {name: value for name, value in values.items() if name != "kind"}
    unknown = given.keys() - {field.name for field in known}
    missing = [field.name for field in known if field.default is MISSING and field.name not in given]
    if unknown or missing:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown fields {', '.join(sorted(unknown))}"
        raise DepthDecayError(f"the {kind} schedule {problem}")
    return SCHEDULES[kind](**given)


def solve_alpha(num_layers: int, speedup: Number, over_tokens: int, warmup_tokens: int, min_layers: int) -> Decimal:
    """The slowest decay that reaches the layer speed-up over `over_tokens`, in the fewest digits with those depths."""
    wanted = exact_decimal("speedup", speedup)
    if wanted < 1:
        raise ArgumentError(f"speedup is {speedup}; expected a number of at least 1", "speedup")
    num_layers = whole_number("num_layers", num_layers, 1, MAX_LAYERS)
    over_tokens = whole_number("over_tokens", over_tokens, 1)
    full = num_layers * over_tokens
    budget = full / Fraction(wanted)
    # Eight decimal places resolve every drop in a text of some hundred thousand tokens; longer texts need more.
    places = max(8, len(str(over_tokens)) + 3)

    def executed(units: int, places: int) -> int:
        alpha = Decimal(units).scaleb(-places)
        return PowerSchedule(num_layers, alpha, warmup_tokens, min_layers, over_tokens).layers_executed(over_tokens)

    fewest = executed(1, places)
    if fewest > budget:
        # Rounded down, so that the figure in the message can itself be requested.
        reachable = full * 1000 // fewest / 1000
        raise DepthDecayError(
            f"a speed-up of {speedup} over {over_tokens} tokens cannot be reached where {min_layers} of {num_layers} "
            f"layers always run and {warmup_tokens} tokens are warm-up; the largest reachable is {reachable}"
        )
    # Depths never decrease as alpha grows, so neither does their sum, and equal sums mean equal tables.
    low, high = 1, 10**places + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if executed(middle, places) <= budget else (low, middle)
    closest = executed(low, places)
    for short in range(places):
        units = low // 10 ** (places - short)
        if units and executed(units, short) == closest:
            return exact_alpha(Decimal(units).scaleb(-short))
    return exact_alpha(Decimal(low).scaleb(-places))
