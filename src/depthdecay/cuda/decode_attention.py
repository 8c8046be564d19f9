"""Attention of passes over a few tokens, in place of transformers' own: our kernels where they are cheaper."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from depthdecay.cuda.kernels.split_attention import attend, can_attend
from depthdecay.model.devices import cuda_generation, overlaps_kernels
from depthdecay.model.grouped_attention import Attention, is_plain, replaced_attention, scaling_of
from depthdecay.model.layers import LayerStack


@functools.cache
def stepwise(original: Attention) -> Attention:
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
        if not (capable and is_plain(kwargs) and pays and can_attend(query, key, value, mask)):
            return original(module, query, key, value, mask, **kwargs)
        return attend(query, key, value, mask, scaling_of(query, kwargs), overlap), None

    return forward


def attention_in_steps(stack: LayerStack) -> contextlib.AbstractContextManager[None]:
    """While open, models that use torch's attention take our CUDA kernels where it pays."""
    return replaced_attention(stack, stepwise)
