"""Plans: a schedule and a ladder, perhaps for one model. This is what a user saves, ships and serves."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdecay.argument_checks import Number, whole_number
from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.plan.ladder import Ladder
from depthdecay.plan.schedule import (
    ConstantSchedule,
    FullSchedule,
    LinearSchedule,
    PowerSchedule,
    Schedule,
    exact_alpha,
    schedule_from_dict,
    solve_alpha,
)

if TYPE_CHECKING:
    from depthdecay.plan.identity import ModelIdentity

PLAN_FORMAT = "depthdecay-plan"
PLAN_VERSION = 1
_FIELDS = ("rule", "schedule", "ladder", "model", "repairs", "notes")


@dataclass(frozen=True)
class Plan:
    """How many layers each generated token runs through, and which."""

    ladder: Ladder
    schedule: Schedule
    rule: str
    model: ModelIdentity | None = None
    repairs: str | None = None
    draft_head: str | None = None
    notes: dict[str, Any] = field(default_factory=dict, hash=False)
    folder: Path | None = field(default=None, compare=False, repr=False)  # with a loaded plan's files

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or not self.rule:
            raise DepthDecayError(f"the plan's rule is {self.rule!r}; expected a name")
        if not isinstance(self.notes, dict):
            raise DepthDecayError(f"the plan's notes are {self.notes!r}; expected a mapping")
        # Only a bare name: a plan from someone else must not refer to files outside its own folder.
        for what, name in (("repairs are", self.repairs), ("draft head is", self.draft_head)):
            if name is not None and not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name)):
                raise DepthDecayError(f"the plan's {what} {name!r}; expected a file name beside the plan")
        if self.schedule.num_layers != self.ladder.num_layers:
            raise DepthDecayError(
                f"the schedule is for {self.schedule.num_layers} layers and the ladder for {self.ladder.num_layers}"
            )
        if self.schedule.final_depth < self.ladder.min_layers:
            raise DepthDecayError(
                f"the schedule goes down to {self.schedule.final_depth} layers, but the ladder always runs "
                f"{self.ladder.min_layers} core layers of {self.num_layers}"
            )
        if self.model is not None and self.model.num_layers != self.num_layers:
            raise PlanMismatchError(f"the plan is for {self.num_layers} layers, but its model is {self.model}")

    @property
    def num_layers(self) -> int:
        return self.ladder.num_layers

    def depth(self, i: int) -> int:
        """How many layers produce generated token i."""
        return self.schedule.depth(i)

    def depths(self, n: int) -> tuple[int, ...]:
        return self.schedule.table(n)

    def segments(self, n: int) -> Iterator[tuple[int, int]]:
        """(depth, how many of the first n tokens have it), from the first to the last."""
        return self.schedule.segments(n)

    def layers(self, depth: int) -> tuple[int, ...]:
        return self.ladder.layers(depth)

    def dropped(self, depth: int) -> tuple[int, ...]:
        return self.ladder.dropped(depth)

    def visited_depths(self, n: int) -> tuple[int, ...]:
        return self.schedule.visited_depths(n)

    def layers_executed(self, n: int) -> int:
        return self.schedule.layers_executed(n)

    def layer_speedup(self, n: int) -> float:
        """Layers at full depth divided by layers executed, over the first n tokens."""
        return self.num_layers * whole_number("number of tokens", n, 1) / self.layers_executed(n)

    def last_token_of_layer(self, layer: int, n: int) -> int:
        """How many of the first n generated tokens run this layer. They come first, since depth never rises."""
        return self.schedule.tokens_at_least(self.ladder.least_depth(layer), n)

    @property
    def only_drafts(self) -> bool:
        """Whether it is a learned drafter alone: it drops no layers, so that only lossless mode has a use for it."""
        return self.draft_head is not None and self.schedule.final_depth == self.num_layers

    def describe(self) -> str:
        """One line for people."""
        settings = {
            k: v for k, v in self.schedule.to_dict().items() if k not in ("kind", "num_layers") and v is not None
        }
        words = [f"{name.replace('_', ' ')} {value}" for name, value in settings.items()]
        words.append(f"{self.num_layers} layers down to {self.schedule.final_depth}")
        if self.schedule.final_depth < self.num_layers:
            dropped = self.dropped(self.schedule.final_depth)
            words.append(f"drops {', '.join(map(str, dropped[:6]))}{', …' if len(dropped) > 6 else ''}")
        if self.repairs:
            words.append("repaired")
        if self.draft_head:
            words.append("with a learned drafter")
        return f"{self.rule}: {', '.join(words)}"

    def with_model(self, identity: ModelIdentity) -> Plan:
        return replace(self, model=identity)

    def check_model(self, identity: ModelIdentity, allow_other_weights: bool = False) -> str | None:
        """Reject a model of another shape; return a warning if the shape fits but the weights differ."""
        if self.model is None:
            if identity.num_layers != self.num_layers:
                raise PlanMismatchError(f"the plan is for {self.num_layers} layers, but the model is {identity}")
            return None
        differences = self.model.shape_differences(identity)
        if differences:
            raise PlanMismatchError(
                f"the plan was made for {self.model}, but the model is {identity}: {'; '.join(differences)}"
            )
        same = self.model.same_weights(identity)
        if same is False and self.repairs and not allow_other_weights:
            raise PlanMismatchError(
                f"the plan's repairs were fitted to {self.model}, but {identity} has other weights; make a plan for "
                "this model, or allow other weights"
            )
        if same is False:
            return f"the plan was made for {self.model}, but {identity} has other weights: expect lower quality"
        if same is None and self.repairs:
            return f"the plan's repairs were fitted to {self.model}; whether {identity} has its weights is unknown"
        return None

    @classmethod
    def decay(
        cls,
        model: Any,
        alpha: Number,
        *,
        warmup_tokens: int = 0,
        min_layers: int | None = None,
        core_head: int = 2,
        core_tail: int = 2,
        drop_order: Sequence[int] | None = None,
        horizon: int | None = None,
    ) -> Plan:
        """The paper's rule, for a model or a number of layers. Without a measured drop order, it is a guess.

        A drop order defines the flex layers itself; `core_head` and `core_tail` are then ignored.
        """
        num_layers = layer_count(model)
        ladder = _ladder(num_layers, core_head, core_tail, drop_order)
        floor = max(1, ladder.min_layers) if min_layers is None else min_layers
        return cls(ladder, PowerSchedule(num_layers, exact_alpha(alpha), warmup_tokens, floor, horizon), "decay")

    @classmethod
    def for_speedup(
        cls,
        model: Any,
        speedup: Number,
        *,
        over_tokens: int = 256,
        warmup_tokens: int = 0,
        min_layers: int | None = None,
        core_head: int = 2,
        core_tail: int = 2,
        drop_order: Sequence[int] | None = None,
    ) -> Plan:
        """The slowest decay with at least this layer speed-up over `over_tokens`; then the last depth is held.

        For a model or a number of layers. Without a measured drop order, it is a guess. `Engine.from_pretrained(name,
        speedup=…)` uses a calibrated plan where there is one.
        """
        num_layers = layer_count(model)
        ladder = _ladder(num_layers, core_head, core_tail, drop_order)
        floor = max(1, ladder.min_layers) if min_layers is None else min_layers
        alpha = solve_alpha(num_layers, speedup, over_tokens, warmup_tokens, floor)
        return cls(ladder, PowerSchedule(num_layers, alpha, warmup_tokens, floor, over_tokens), "decay")

    @classmethod
    def full(cls, num_layers: int) -> Plan:
        return cls(Ladder(num_layers, ()), FullSchedule(num_layers), "full")

    @classmethod
    def constant(
        cls,
        num_layers: int,
        depth: int,
        *,
        core_head: int = 2,
        core_tail: int = 2,
        drop_order: Sequence[int] | None = None,
    ) -> Plan:
        """One depth for every token; layers are dropped from the middle outwards or in the given order."""
        ladder = _ladder(num_layers, core_head, core_tail, drop_order)
        return cls(ladder, ConstantSchedule(num_layers, depth), "constant")

    @classmethod
    def unified(cls, num_layers: int, depth: int) -> Plan:
        """Unified skipping: one depth for every token, with evenly spaced layers."""
        return cls(Ladder.evenly(num_layers, depth), ConstantSchedule(num_layers, depth), "unified")

    @classmethod
    def early_exit(cls, num_layers: int, depth: int, *, core_head: int = 1) -> Plan:
        """Early exit at one depth: the layers near the output are dropped."""
        return cls(Ladder.from_top(num_layers, core_head), ConstantSchedule(num_layers, depth), "early-exit")

    @classmethod
    def skipdecode(
        cls,
        num_layers: int,
        end_depth: int,
        over_tokens: int,
        *,
        start_depth: int | None = None,
        core_head: int = 1,
        core_tail: int = 1,
    ) -> Plan:
        """SkipDecode: linear decay that drops from the bottom upwards, after `core_head` warm-up layers."""
        ladder = Ladder.from_bottom(num_layers, core_head, core_tail)
        start = num_layers if start_depth is None else start_depth
        return cls(ladder, LinearSchedule(num_layers, start, end_depth, over_tokens), "skipdecode")

    @classmethod
    def shortgpt(cls, scores: Sequence[float], depth: int) -> Plan:
        """ShortGPT: one depth for every token, without the least influential blocks."""
        ladder = Ladder.from_scores(scores)
        return cls(ladder, ConstantSchedule(ladder.num_layers, depth), "shortgpt")

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            "rule": self.rule,
            "schedule": self.schedule.to_dict(),
            "ladder": self.ladder.to_dict(),
            "model": None if self.model is None else self.model.to_dict(),
            "repairs": self.repairs,
            **({} if self.draft_head is None else {"draft_head": self.draft_head}),
            "notes": self.notes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        if not isinstance(values, Mapping) or values.get("format") != PLAN_FORMAT:
            raise DepthDecayError(f'expected an object with "format": "{PLAN_FORMAT}"')
        version = values.get("version")
        if isinstance(version, bool) or version != PLAN_VERSION:
            raise DepthDecayError(f"the plan's version is {version!r}; this release reads version {PLAN_VERSION}")
        missing = [name for name in _FIELDS if name not in values]
        if missing:
            raise DepthDecayError(f"the plan lacks {', '.join(missing)}; expected {', '.join(_FIELDS)}")
        return cls(
            ladder=Ladder.from_dict(values["ladder"]),
            schedule=schedule_from_dict(values["schedule"]),
            rule=values["rule"],
            model=_identity(values["model"]),
            repairs=values["repairs"],
            draft_head=values.get("draft_head"),
            notes=values["notes"],
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan to a .json file, or as plan.json into a folder; returns the file."""
        from depthdecay.plan.file import save_plan_file

        return save_plan_file(self.to_dict(), Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a .json file, a folder that holds plan.json, a Hugging Face repository id, or `default`.

        `default` is the embedded model's calibrated plan, unless there is a file or folder of that name.
        """
        from depthdecay.plan.file import fetch_beside, read_plan_file

        file, values = read_plan_file(os.fspath(path))
        try:
            plan = replace(cls.from_dict(values), folder=file.parent)
        except DepthDecayError as error:
            raise DepthDecayError(f"{file} is not a usable plan: {error}") from None
        for name in (plan.repairs, plan.draft_head):
            if name is not None:
                fetch_beside(os.fspath(path), file, name)
        return plan


def layer_count(model: Any) -> int:
    """How many decoder layers a model, engine or loaded model has; a number is returned unchanged."""
    model = getattr(model, "stack", model)  # of an engine
    if hasattr(model, "num_layers"):
        return int(model.num_layers)
    network = model if hasattr(model, "config") else getattr(model, "model", None)  # of a loaded model
    if network is None:
        return model  # type: ignore[no-any-return]  # checked by the ladder, which names it
    return int(network.config.get_text_config(decoder=True).num_hidden_layers)


def _identity(values: Mapping[str, Any] | None) -> ModelIdentity | None:
    from depthdecay.plan.identity import ModelIdentity  # only calibrated plans have one

    return None if values is None else ModelIdentity.from_dict(values)


def _ladder(num_layers: int, core_head: int, core_tail: int, drop_order: Sequence[int] | None) -> Ladder:
    if drop_order is None:
        return Ladder.middle_out(num_layers, core_head, core_tail)
    return Ladder(num_layers, tuple(drop_order) if isinstance(drop_order, Sequence) else drop_order)
