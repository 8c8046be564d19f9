"""Attention for passes over a few tokens: replaces transformers' attention with our kernels where they are faster.

In lock-step passes, a token's *span* defines which positions it sees: the column of its text's first token and its own
column. A sliding window counts back from the latter. Spans are passed through the model as its attention mask.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from depthdecay.cuda.kernels.split_attention import attend, can_attend, mask_of
from depthdecay.library_internals import attention_name
from depthdecay.model.devices import cuda_generation, overlaps_kernels
from depthdecay.model.grouped_attention import (
    Attention,
    is_plain,
    replaced_attention,
    replaced_eager_attention,
    scaling_of,
)
from depthdecay.model.layers import LayerStack


def spans_of(first: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Spans (batch, 1, tokens, 2) for texts that start at columns `first` (batch) and tokens at `columns` (tokens)."""
    begun = first[:, None].expand(-1, columns.shape[0])
    return torch.stack((begun, columns.expand_as(begun)), dim=-1).unsqueeze(1)


@functools.cache
def stepwise(original: Attention, window: int | None, capped: bool = False) -> Attention:
    """A model's attention function that hands passes over a few new tokens to our kernel, where equivalent and faster.

    Cached, one per window, because compiled layers guard on the function's identity. `capped`: the original applies
    a softcap when given one.
    """
    # Queried out here: inside `forward` a compiled layer would trace the call.
    overlap, capable = overlaps_kernels(), cuda_generation() >= 8  # tensor cores with bf16

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Any, **kwargs: Any
    ) -> Any:
        # With grouped queries transformers repeats keys and values for every head: at 400 rows that is most of a step.
        # Batches without GQA stay with torch's kernels, which are well occupied there.
        pays = query.shape[0] == 1 or query.shape[1] > key.shape[1]
        softcap = kwargs.get("softcap")
        plain = is_plain({**kwargs, "softcap": None} if capped else kwargs)
        if capable and plain and pays and can_attend(query, key, value, seen):
            return attend(query, key, value, seen, scaling_of(query, kwargs), window, softcap, overlap), None
        if seen is not None and seen.dtype == torch.int64:
            seen = mask_of(seen, key.shape[2], window)
        return original(module, query, key, value, seen, **kwargs)

    return forward


def attention_in_steps(stack: LayerStack) -> contextlib.AbstractContextManager[None]:
    """While open, the model uses our CUDA kernels where that pays, and spans instead of masks if it takes 4D masks."""
    if stack.takes_whole_masks and attention_name(stack.config) == "eager":
        return replaced_eager_attention(stack, functools.partial(stepwise, capped=True))
    return replaced_attention(stack, stepwise)
