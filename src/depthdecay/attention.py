"""Attention while decoding on CUDA, in place of transformers' own: our kernels where they can do it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from .attend import attend, can_attend
from .devices import cuda_generation, overlaps_kernels


@functools.cache
def stepwise(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' sdpa function, with passes over a few new tokens taken over where that is the same and cheaper.

    Made once for all, since compiled layers know it by its identity.
    """
    # Asked here, since a compiled layer would trace the question.
    overlap, capable = overlaps_kernels(), cuda_generation() >= 8  # tensor cores that know bf16

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        special = ("position_bias", "softcap", "s_aux")
        plain = not kwargs.get("dropout") and all(kwargs.get(name) is None for name in special)
        # Where heads share keys, transformers copies these for every head: for 400 rows that is most of a step. Batches
        # of other models keep torch's kernels, which then have enough to do.
        pays = query.shape[0] == 1 or query.shape[1] > key.shape[1]
        if not (capable and plain and pays and can_attend(query, key, value, mask)):
            return original(module, query, key, value, mask, **kwargs)
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, mask, scaling, overlap), None

    return forward


@contextlib.contextmanager
def attention_in_steps(config: Any) -> Iterator[None]:
    """While open, models that use torch's attention take ours where it pays."""
    mapping = AttentionInterface._global_mapping
    original = mapping.get("sdpa")
    if getattr(config, "_attn_implementation", None) != "sdpa" or original is None:
        yield
        return
    mapping["sdpa"] = stepwise(original)
    try:
        yield
    finally:
        mapping["sdpa"] = original
