"""The plan that a bench runs: as given, made for the model once it is loaded, or a usual one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from depthdecay.model.layers import LayerStack
from depthdecay.model.load import LoadedModel
from depthdecay.model.speedup import plan_at_speedup
from depthdecay.plan.plan import Plan
from depthdecay.plan.shelf import stored_plan

USUAL_SPEEDUP = "1.25"
PlanChoice = Plan | Callable[[LoadedModel], Plan] | None


def plan_of(choice: PlanChoice, loaded: LoadedModel, new_tokens: int) -> Plan:
    """Where none is given, a layer speed-up of 1.25: by the plan that comes with the embedded model, else by rule."""
    if isinstance(choice, Plan):
        return choice
    if choice is not None:
        return choice(loaded)
    stack, own = LayerStack.of(loaded.model), embedded_plan(loaded)
    if own is None:
        return Plan.for_speedup(stack.num_layers, USUAL_SPEEDUP, over_tokens=new_tokens)
    return plan_at_speedup(stored_plan(own, float(USUAL_SPEEDUP)), stack, USUAL_SPEEDUP, new_tokens)


def embedded_plan(loaded: LoadedModel) -> Plan | None:
    """The calibrated plan that the package carries for the embedded model; none for another."""
    if loaded.source != "embedded":
        return None
    return Plan.load(Path(str(resources.files("depthdecay"))) / "data" / loaded.name)
