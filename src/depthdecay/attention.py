"""Attention of one new token a row over a shared cache, for batches of models with grouped heads.

transformers copies keys and values once per query head before it calls torch's attention with a mask: for 400 rows of a
model with 6 heads to a group that copy is most of a step. Here each group's queries meet its keys as they lie.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """One query a row (batch, heads, 1, dim) over keys and values (batch, groups, positions, dim).

    The answer is (batch, 1, heads, dim), as transformers' functions return it.
    """
    batch, heads, _, dim = query.shape
    groups, positions = key.shape[1:3]
    # The cache lies as (position, batch, group, dim), so that joining batch and group is no copy.
    keys = key.reshape(batch * groups, positions, dim)
    values = value.reshape(batch * groups, positions, value.shape[-1])
    scores = _product(query.reshape(batch * groups, heads // groups, dim), keys.transpose(1, 2)) * scaling
    scores = scores.view(batch, groups, heads // groups, positions)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1).to(values.dtype).view(batch * groups, heads // groups, positions)
    return torch.bmm(weights, values).reshape(batch, 1, heads, value.shape[-1])


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """In 32 bits: a score rounded to 16 would shift the weights."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def grouped_or(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' sdpa function, with steps of batches taken over where that is the same and cheaper."""

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        plain = not kwargs.get("dropout") and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
        fitting = query.shape[0] > 1 and query.shape[2] == 1 and query.shape[1] > key.shape[1] and plain
        if not fitting or (mask is not None and mask.dim() != 4):
            return original(module, query, key, value, mask, **kwargs)
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return grouped_attention(query, key, value, mask, scaling), None

    return forward


@contextlib.contextmanager
def grouped_steps(config: Any) -> Iterator[None]:
    """While open, models that use torch's attention take `grouped_attention` for steps of batches."""
    mapping = AttentionInterface._global_mapping
    original = mapping.get("sdpa")
    if getattr(config, "_attn_implementation", None) != "sdpa" or original is None:
        yield
        return
    mapping["sdpa"] = grouped_or(original)
    try:
        yield
    finally:
        mapping["sdpa"] = original
