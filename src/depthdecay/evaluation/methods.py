"""The methods to compare: plans at the same layer budgets, and full depth once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthdecay.argument_checks import Number, exact_decimal
from depthdecay.errors import ArgumentError
from depthdecay.plan.baselines import plan_for_budget
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.model.layers import LayerStack

METHODS = (
    "full",
    "lossless",
    "depthdecay",
    "middle-out",
    "skipdecode",
    "unified",
    "shortgpt",
    "early-exit",
    "constant",
)
_WITHOUT_BUDGET = ("full", "lossless")  # they give the full model's answers with any plan


@dataclass(frozen=True)
class MethodPlan:
    """A method at one budget. Full depth has no plan; a plan used as it is, or for drafting, has no speed-up."""

    method: str
    speedup: float | None
    plan: Plan | None

    @property
    def mode(self) -> str | None:
        """The engine's mode, where it does not follow from the plan."""
        return "lossless" if self.method == "lossless" else None

    @property
    def title(self) -> str:
        return self.method if self.speedup is None else f"{self.method} {self.speedup:g}x"


def chosen_methods(methods: Sequence[str] | None, speedups: Sequence[Number], has_plan: bool) -> tuple[str, ...]:
    """The methods to run, checked before a model is loaded. By default: full depth, and ours if there is a plan or a
    budget."""
    if methods is None:
        ours = ("depthdecay",) if has_plan else ("middle-out",) if speedups else ()
        methods = ("full", *ours)
    names = tuple(dict.fromkeys(methods))
    for name in names:
        if name not in METHODS:
            raise ArgumentError(f"there is no method {name!r}; expected some of {','.join(METHODS)}", "methods")
    if not names:
        raise ArgumentError(f"methods is empty; expected some of {','.join(METHODS)}", "methods")
    if "depthdecay" in names and not has_plan:
        raise ArgumentError("the method depthdecay needs a calibrated plan; give it with plan", "plan")
    peers = [name for name in names if name not in (*_WITHOUT_BUDGET, "depthdecay")]
    if peers and not speedups:
        raise ArgumentError(f"the method {peers[0]} needs a layer budget; add speedups, such as 1.25", "speedups")
    return names


def checked_speedups(speedups: Sequence[Number]) -> tuple[float, ...]:
    for given in speedups:
        if exact_decimal("speedups", given) <= 1:
            raise ArgumentError(f"speedups contains {given}; expected numbers above 1", "speedups")
    return tuple(dict.fromkeys(float(given) for given in speedups))


def contenders(
    methods: Sequence[str],
    speedups: Sequence[float],
    stack: LayerStack,
    over_tokens: int,
    plan: Plan | None,
    influence: Callable[[], Sequence[float]],
) -> list[MethodPlan]:
    """All methods with their plans, full depth first. `influence` scores the layers; it is called only for shortgpt."""
    made = [MethodPlan("full", None, None)] if "full" in methods else []
    if "lossless" in methods:
        from depthdecay.plan.stored_plans import drafter_of

        made.append(MethodPlan("lossless", None, plan if plan is None else drafter_of(plan)))
    if "depthdecay" in methods and not speedups:
        made.append(MethodPlan("depthdecay", None, plan))
    scores = influence() if "shortgpt" in methods else None
    for speedup in speedups:
        for method in methods:
            if method in _WITHOUT_BUDGET:
                continue
            if method == "depthdecay":
                from depthdecay.model.speedup import plan_at_speedup
                from depthdecay.plan.stored_plans import stored_plan

                assert plan is not None
                used = plan_at_speedup(stored_plan(plan, speedup), stack, speedup, over_tokens)
            else:
                used = plan_for_budget(method, stack.num_layers, speedup, over_tokens, scores)
            made.append(MethodPlan(method, speedup, used))
    return made
