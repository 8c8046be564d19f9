"""Attention while decoding, in place of transformers' own: our kernels on CUDA, heads that share keys on CPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from .attend import attend, can_attend
from .devices import cuda_generation, overlaps_kernels


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for nothing beyond a softmax over the keys."""
    special = ("position_bias", "softcap", "s_aux")
    return not kwargs.get("dropout") and all(kwargs.get(name) is None for name in special)


def scaling_of(query: torch.Tensor, kwargs: dict[str, Any]) -> float:
    """What a call multiplies scores by; where it does not say, as torch does."""
    scaling = kwargs.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


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
        # Where heads share keys, transformers copies these for every head: for 400 rows that is most of a step. Batches
        # of other models keep torch's kernels, which then have enough to do.
        pays = query.shape[0] == 1 or query.shape[1] > key.shape[1]
        if not (capable and _is_plain(kwargs) and pays and can_attend(query, key, value, mask)):
            return original(module, query, key, value, mask, **kwargs)
        return attend(query, key, value, mask, scaling_of(query, kwargs), overlap), None

    return forward


@functools.cache
def grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' sdpa function, with the heads that share keys asked as if they were tokens.

    transformers copies keys and values for every head, which for a batch takes longer than the layer's matrices do.
    """

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        shares = query.shape[1] > key.shape[1] and query.shape[2] == 1
        if not (_is_plain(kwargs) and shares and (mask is None or mask.shape[1] == 1)):
            return original(module, query, key, value, mask, **kwargs)
        batch, heads, _, size = query.shape
        folded = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
        found = functional.scaled_dot_product_attention(folded, key, value, mask, scale=kwargs.get("scaling"))
        return found.reshape(batch, 1, heads, value.shape[-1]), None

    return forward


def attention_in_steps(config: Any) -> contextlib.AbstractContextManager[None]:
    """While open, models that use torch's attention take our CUDA kernels where it pays."""
    return replaced_attention(config, stepwise)


def grouped_attention(config: Any) -> contextlib.AbstractContextManager[None]:
    """While open, models that use torch's attention copy no keys for heads that share them."""
    return replaced_attention(config, grouped)


@contextlib.contextmanager
def replaced_attention(config: Any, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While open, models that use torch's attention take what is made of transformers' function for it."""
    mapping = AttentionInterface._global_mapping
    original = mapping.get("sdpa")
    if getattr(config, "_attn_implementation", None) != "sdpa" or original is None:
        yield
        return
    mapping["sdpa"] = made(original)
    try:
        yield
    finally:
        mapping["sdpa"] = original
