"""Reschedule a plan for a given speed-up, counting the cost of its repair maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from depthdecay.argument_checks import Number, exact_decimal
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.model.costs import Costs
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import PowerSchedule, solve_alpha


def plan_at_speedup(
    plan: Plan,
    stack: LayerStack,
    speedup: Number,
    over_tokens: int,
    repairs: Repairs | None = None,
    *,
    warmup_tokens: int | None = None,
    min_layers: int | None = None,
) -> Plan:
    """The plan's ladder and repairs with another schedule: the slowest decay that reaches this layer speed-up.

    Repair maps count as layers of equal size, so a repaired plan executes fewer layers than a plain one. The plan's own
    warm-up and minimum depth apply by default; if they prevent the speed-up, the ladder's minimum depth is used.
    """
    own = plan.schedule if isinstance(plan.schedule, PowerSchedule) else None
    if warmup_tokens is None:
        warmup_tokens = own.warmup_tokens if own else 0
    if min_layers is None and own is not None and own.min_layers > plan.ladder.min_layers:
        try:
            settings = {"warmup_tokens": warmup_tokens, "min_layers": own.min_layers}
            return plan_at_speedup(plan, stack, speedup, over_tokens, repairs, **settings)
        except DepthDecayError:
            pass
    costs = Costs(stack, plan, repairs)
    lowest = max(1, plan.ladder.min_layers, min_layers or 0)
    wanted = Fraction(exact_decimal("speedup", speedup))
    if not 1 <= wanted <= plan.num_layers:
        raise ArgumentError(
            f"speedup is {speedup}; expected a number from 1 to {plan.num_layers}, the layers", "speedup"
        )

    def made(asked: Fraction) -> Plan:
        units = -(-asked.numerator * 10**6 // asked.denominator)  # rounded up: never less than requested
        alpha = solve_alpha(plan.num_layers, Decimal(units).scaleb(-6), over_tokens, warmup_tokens, lowest)
        return replace(
            plan, schedule=PowerSchedule(plan.num_layers, alpha, warmup_tokens, lowest, over_tokens), rule="decay"
        )

    def reached(candidate: Plan) -> Fraction:
        return costs.layer_speedup(candidate, over_tokens)

    candidate = made(wanted)
    if reached(candidate) >= wanted:
        return candidate
    # Maps cost something, so request more decay, up to the ladder's maximum, until the total fits.
    low, high = wanted, Fraction(plan.num_layers * over_tokens, plan.num_layers + lowest * (over_tokens - 1))
    high = max(low, Fraction(int(high * 10**6), 10**6))
    try:
        best = made(high)
    except DepthDecayError:  # a warm-up leaves less
        best, high = _most(made, low, high)
    if reached(best) < wanted:
        raise DepthDecayError(
            f"a speed-up of {float(wanted):g} over {over_tokens} tokens cannot be reached with this plan's ladder, "
            f"which goes down to {lowest} layers and whose repairs add to the cost"
        )
    for _ in range(24):
        middle = (low + high) / 2
        candidate = made(middle)
        if reached(candidate) >= wanted:
            best, high = candidate, middle
        else:
            low = middle
    return best


def _most(made: Callable[[Fraction], Plan], low: Fraction, high: Fraction) -> tuple[Plan, Fraction]:
    """The largest decay between `low`, which is feasible, and `high` that is feasible."""
    best = made(low)
    for _ in range(30):
        middle = (low + high) / 2
        try:
            best, low = made(middle), middle
        except DepthDecayError:
            high = middle
    return best, low
