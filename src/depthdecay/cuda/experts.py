"""Mixture-of-experts layers for passes over a few tokens: replaces transformers' implementation with our kernel.

transformers gathers the weights of the selected experts per token, or sorts tokens by expert. Either way a token's
rounding depends on what the other tokens selected. Our kernel keeps tokens independent.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from depthdecay.library_internals import are_gated_experts, experts_named, gated, register_experts
from depthdecay.model.devices import overlaps_kernels
from depthdecay.model.layers import LayerStack

_NAME = "depthdecay"  # in transformers' registry of expert implementations


def are_plain(module: Any) -> bool:
    """Whether a module holds Mixtral-style experts in shapes that our kernel supports."""
    from depthdecay.cuda.kernels.expert_products import takes_experts

    return are_gated_experts(module) and all(map(takes_experts, module.parameters(recurse=False)))


@functools.cache
def _apart() -> Callable[..., torch.Tensor]:
    """Cached, because compiled layers guard on the function's identity."""
    overlap = overlaps_kernels()  # queried out here: a compiled layer would trace the call

    def forward(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def times(x: torch.Tensor, weights: torch.Tensor, each: bool) -> torch.Tensor:
            parts = torch.ops.depthdecay.expert_products(x, top_k_index, weights, each, overlap)
            return parts.sum(0).to(x.dtype)

        inner = gated(module, times(hidden_states, module.gate_up_proj, False))
        outputs = times(inner, module.down_proj, True).view(*top_k_index.shape, hidden_states.shape[-1])
        return (outputs * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    return forward


@contextlib.contextmanager
def experts_apart(stack: LayerStack) -> Iterator[None]:
    """While open, this model's experts run with our kernel, if it has any and the kernel supports all of them."""
    modules = [module for layer in stack.layers for module in layer.modules() if hasattr(module, "has_gate")]
    if not modules or not all(map(are_plain, modules)):
        yield
        return
    register_experts(_NAME, _apart())
    with contextlib.ExitStack() as undo:
        for config in {id(module.config): module.config for module in modules}.values():
            undo.enter_context(experts_named(config, _NAME))
        yield
