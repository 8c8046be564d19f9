"""Baseline rules by name, each built at the same layer budget so that they can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from depthdecay.argument_checks import Number, exact_decimal, whole_number
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import MAX_LAYERS


@dataclass(frozen=True)
class Budget:
    """How many layers a rule may execute: full depth's over `over_tokens` tokens, divided by the speed-up."""

    num_layers: int
    speedup: Number
    over_tokens: int
    scores: Sequence[float] | None = None

    def __post_init__(self) -> None:
        whole_number("num_layers", self.num_layers, 1, MAX_LAYERS)
        whole_number("over_tokens", self.over_tokens, 1)
        if exact_decimal("speedup", self.speedup) < 1:
            raise ArgumentError(f"speedup is {self.speedup}; expected a number of at least 1", "speedup")

    @property
    def layers(self) -> Fraction:
        return self.num_layers * self.over_tokens / Fraction(exact_decimal("speedup", self.speedup))


def _closest(budget: Budget, lowest: int, plan_at: Callable[[int], Plan]) -> Plan:
    """The plan with the whole-number depth closest to the budget; on a tie, the deeper one."""
    executed = {
        depth: plan_at(depth).layers_executed(budget.over_tokens) for depth in range(budget.num_layers, lowest - 1, -1)
    }
    if not executed or executed[lowest] > budget.layers:
        fewest = executed.get(lowest, budget.num_layers * budget.over_tokens)
        reachable = budget.num_layers * budget.over_tokens * 1000 // fewest / 1000
        raise DepthDecayError(
            f"a speed-up of {budget.speedup} over {budget.over_tokens} tokens cannot be reached by the "
            f"{plan_at(budget.num_layers).rule} rule with {budget.num_layers} layers; the largest is {reachable}"
        )
    return plan_at(min(executed, key=lambda depth: abs(executed[depth] - budget.layers)))


def _decay(budget: Budget) -> Plan:
    return Plan.for_speedup(budget.num_layers, budget.speedup, over_tokens=budget.over_tokens)


def _constant(budget: Budget) -> Plan:
    lowest = Plan.constant(budget.num_layers, budget.num_layers).ladder.min_layers
    return _closest(budget, lowest, lambda depth: Plan.constant(budget.num_layers, depth))


def _shortgpt(budget: Budget) -> Plan:
    scores = budget.scores
    if scores is None or len(scores) != budget.num_layers:
        given = "none" if scores is None else len(scores)
        raise DepthDecayError(f"the shortgpt rule needs {budget.num_layers} scores, one per layer; given: {given}")
    return _closest(budget, 1, lambda depth: Plan.shortgpt(scores, depth))


PEER_RULES: dict[str, Callable[[Budget], Plan]] = {
    "full": lambda budget: Plan.full(budget.num_layers),
    "decay": _decay,
    "middle-out": _decay,
    "skipdecode": lambda b: _closest(b, 2, lambda depth: Plan.skipdecode(b.num_layers, depth, b.over_tokens)),
    "constant": _constant,
    "unified": lambda b: _closest(b, 2, lambda depth: Plan.unified(b.num_layers, depth)),
    "early-exit": lambda b: _closest(b, 1, lambda depth: Plan.early_exit(b.num_layers, depth)),
    "shortgpt": _shortgpt,
}


def plan_for_budget(
    rule: str, num_layers: int, speedup: Number, over_tokens: int, scores: Sequence[float] | None = None
) -> Plan:
    """The named rule at a layer speed-up over `over_tokens`; its notes record the requested and the actual speed-up.

    Rules that use whole depths come as close as they can, on either side; `full` stays at full depth.
    """
    if rule not in PEER_RULES:
        raise DepthDecayError(f"there is no rule {rule!r}; expected one of {', '.join(PEER_RULES)}")
    plan = PEER_RULES[rule](Budget(num_layers, speedup, over_tokens, scores))
    asked = {"asked_layer_speedup": float(speedup), "over_tokens": int(over_tokens)}
    return replace(plan, notes=asked | {"layer_speedup": plan.layer_speedup(over_tokens)})
