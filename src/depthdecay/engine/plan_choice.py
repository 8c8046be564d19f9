"""Which plan an engine uses: stored, stored and rescheduled, shipped with the package, or built by rule."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from depthdecay.argument_checks import Number, at_most_one, exact_decimal, whole_number
from depthdecay.errors import ArgumentError, DepthDecayError, GuessedPlanWarning
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import exact_alpha
from depthdecay.plan.stored_plans import shipped_plan, stored_plan

if TYPE_CHECKING:
    from depthdecay.model.layers import LayerStack

MODES = ("full", "decay", "lossless")
DEFAULT_OVER = 256  # tokens, if neither the plan nor the caller says how long answers are

_SHAPE = {"warmup_tokens": 0, "core_head": 0, "core_tail": 0, "min_layers": 1}  # each with its minimum
_MADE_BY_RULE = ("core_head", "core_tail", "min_layers")  # fixed by a stored plan


def require_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}; expected one of {', '.join(MODES)}", "mode")


def warn_of_guess(plan: Plan, why: str = "", stacklevel: int = 2) -> None:
    """Warn that an uncalibrated plan costs quality."""
    measured = "calibration" in plan.notes or not plan.ladder.is_guess
    if measured or plan.schedule.final_depth == plan.num_layers:
        return
    warnings.warn(
        f"{why}layers are dropped from the middle outwards, by guess: expect much lower quality; depthdecay calibrate "
        "measures which layers a model can do without",
        GuessedPlanWarning,
        stacklevel=stacklevel + 1,
    )


@contextlib.contextmanager
def guess_is_meant() -> Iterator[None]:
    """Silence the warning, for code that compares such plans or has already warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GuessedPlanWarning)
        yield


@dataclass(frozen=True)
class DepthSettings:
    """The requested depth settings, checked before a model is loaded; building a plan needs the model's layers."""

    plan: Plan | str | os.PathLike[str] | None = None
    alpha: Number | None = None
    speedup: Number | None = None
    over_tokens: int | None = None
    warmup_tokens: int | None = None
    core_head: int | None = None
    core_tail: int | None = None
    min_layers: int | None = None
    new_tokens: int | None = None  # the length of answers, if known: the horizon of a plan built by rule

    def __post_init__(self) -> None:
        if self.alpha is not None:
            at_most_one(plan=self.plan, alpha=self.alpha, speedup=self.speedup)
        for name, value in self._shape().items():
            if self.plan is not None and name in _MADE_BY_RULE:
                raise ArgumentError(
                    f"{name} was given with plan, which already defines the layers to drop", name, "plan"
                )
            if self.alpha is None and self.speedup is None:
                raise ArgumentError(
                    f"{name} was given without a decay to shape; add alpha or speedup", name, "alpha", "speedup"
                )
            whole_number(name, value, _SHAPE[name])
        if self.over_tokens is not None:
            if self.speedup is None:
                raise ArgumentError(
                    "over_tokens is what speedup is averaged over, but was given without it", "over_tokens", "speedup"
                )
            whole_number("over_tokens", self.over_tokens, 1)
        if self.alpha is not None:
            exact_alpha(self.alpha)
        if self.speedup is not None and exact_decimal("speedup", self.speedup) < 1:
            raise ArgumentError(f"speedup is {self.speedup}; expected a number of at least 1", "speedup")

    @classmethod
    def of(cls, asked: DepthSettings | Plan | str | os.PathLike[str] | None) -> DepthSettings:
        """Settings from a plan or the path of one; settings are returned unchanged."""
        return asked if isinstance(asked, DepthSettings) else cls(asked)

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.plan, self.alpha, self.speedup))

    def stored(self) -> Plan | None:
        """The given plan, loaded if it is a path."""
        return self.plan if self.plan is None or isinstance(self.plan, Plan) else Plan.load(self.plan)

    def read(self) -> DepthSettings:
        """The same with the plan's file read, so that a bad one is rejected before a model is loaded."""
        return replace(self, plan=self.stored())

    def choose(self, stack: LayerStack, name: str | None, *, drafts_only: bool = False) -> Plan | None:
        """The plan for a model's layers; None if nothing was requested.

        By default, a stored plan's speed-up is averaged over the tokens that it was calibrated for. A plan that drops
        layers by guess causes a warning, unless it only drafts.
        """
        plan, why = self._chosen(stack, name)
        fits = plan is not None and plan.num_layers == stack.num_layers  # otherwise it is rejected soon
        if plan is not None and fits and not drafts_only:
            warn_of_guess(plan, why)
        return plan

    def _chosen(self, stack: LayerStack, name: str | None) -> tuple[Plan | None, str]:
        """The plan, and why it is not the model's calibrated one if a speed-up was requested."""
        stored = self.stored()
        if stored is not None:
            return (stored if self.speedup is None else self._rescheduled(stored, stack)), ""
        made_by_rule = self.alpha is not None or any(part in self._shape() for part in _MADE_BY_RULE)
        shipped = None if self.speedup is None or made_by_rule or name is None else shipped_plan(name)
        too_fast = ""
        if shipped is not None:
            try:
                return self._rescheduled(shipped, stack), ""
            except DepthDecayError:
                too_fast = f"the calibrated plan of {name} does not reach {self.speedup}x; "
        return self.by_rule(stack.num_layers), too_fast

    def by_rule(self, num_layers: int) -> Plan | None:
        """The plan that alpha or speedup describes, on a guessed ladder."""
        if self.alpha is not None:
            return Plan.decay(num_layers, self.alpha, **self._shape())
        if self.speedup is not None:
            over = self.over_tokens or self.new_tokens or DEFAULT_OVER
            return Plan.for_speedup(num_layers, self.speedup, over_tokens=over, **self._shape())
        return None

    def _shape(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}

    def _rescheduled(self, stored: Plan, stack: LayerStack) -> Plan:
        from depthdecay.model.speedup import plan_at_speedup

        assert self.speedup is not None
        base = stored_plan(stored, float(exact_decimal("speedup", self.speedup)))
        over = self.over_tokens or base.notes.get("over_tokens") or DEFAULT_OVER
        return plan_at_speedup(base, stack, self.speedup, over, warmup_tokens=self.warmup_tokens)
