"""Check that a plan fits a model, once, before any layer is dropped."""

from __future__ import annotations

import warnings
from typing import Any

from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.plan.plan import Plan


def check_plan(plan: Plan, model: Any, *, allow_other_weights: bool = False) -> None:
    """Reject a plan for another shape. For other weights warn, or reject those too if the plan has repairs."""
    if not isinstance(plan, Plan):
        raise DepthDecayError(f"expected a depthdecay.Plan, got {type(plan).__name__}; Plan.load(path) reads one")
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if plan.num_layers != layers:
        raise PlanMismatchError(f"the plan is for {plan.num_layers} layers, but {type(model).__name__} has {layers}")
    if plan.model is not None:  # otherwise it was written by hand, not calibrated on a model
        from depthdecay.plan.identity import identity

        warning = plan.check_model(identity(model), allow_other_weights=allow_other_weights)
        if warning:
            warnings.warn(warning, stacklevel=3)
