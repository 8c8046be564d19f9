"""The shallow model as a model of its own, sharing the full model's weights: a drafter for assisted generation.

transformers gets tokens from an assistant model and verifies them itself. The assistant has its own KV cache, so
lossless mode's drafter cannot be used as it is: it shares the verifier's cache. This is a second model built from the
same weights without the dropped layers. It needs no memory for weights, prefills the prompt once more, and works with
everything that `generate` can do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from depthdecay.argument_checks import whole_number
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs, repairs_for
from depthdecay.plan.compatibility import check_plan
from depthdecay.plan.plan import Plan

Forward = Callable[..., Any]


def draft_model(model: Any, plan: Plan, depth: int | None = None, repairs: Repairs | None = None) -> Any:
    """A model of the plan's layers at one depth (by default its last), with repair maps, that shares all weights.

    `model.generate(..., assistant_model=draft_model(model, plan))` gives the same result as `model.generate(...)`.
    """
    stack = LayerStack.of(model)
    check_plan(plan, stack.model)
    least = plan.ladder.min_layers
    depth = plan.schedule.final_depth if depth is None else whole_number("depth", depth, least)
    if depth > plan.num_layers:
        raise DepthDecayError(f"depth is {depth}, but the model has only {plan.num_layers} layers")
    maps = repairs_for(stack, plan, repairs).at(depth)
    shared = [*stack.model.parameters(), *stack.model.buffers()]
    draft = copy.deepcopy(stack.model, {id(tensor): tensor for tensor in shared})
    part = LayerStack.of(draft)
    kept = list(plan.layers(depth))
    for start, repair in maps.items():
        behind = next((layer for layer in kept if layer >= repair.end), None)
        if behind is not None:
            _put_before(part.layers[behind], repair)
        else:
            _put_behind(part.layers[max(layer for layer in kept if layer < start)], repair)
    _keep(part, kept)
    return draft


def _keep(part: LayerStack, kept: list[int]) -> None:
    """Remove the other layers. Each remaining one gets its new index, which caches and masks use."""
    name = next(name for name, child in part.owner.named_children() if tuple(child.children()) == part.layers)
    for place, index in enumerate(kept):
        for module in part.layers[index].modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = place  # type: ignore[assignment]
    setattr(part.owner, name, torch.nn.ModuleList(part.layers[index] for index in kept))
    config = part.model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = [types[index] for index in kept]
    config.num_hidden_layers = len(kept)


def _put_before(layer: torch.nn.Module, repair: Forward) -> None:
    forward = layer.forward

    def repaired_forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(repair(hidden_states), *args, **kwargs)

    layer.__dict__["forward"] = repaired_forward


def _put_behind(layer: torch.nn.Module, repair: Forward) -> None:
    forward = layer.forward

    def forward_repaired(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (repair(output[0]), *output[1:])
        return repair(output)

    layer.__dict__["forward"] = forward_repaired
