"""Attention of passes over a few tokens, in place of transformers' own: our kernels where they are cheaper.

Passes in lock-step say which positions a token sees by its *span*: the columns of its text's first token and of its
own. A layer's window counts back from there. Spans travel through a model in the place of its mask.
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
    """(batch, 1, tokens, 2): of texts that begin at columns `first` (batch), tokens at `columns` (tokens)."""
    begun = first[:, None].expand(-1, columns.shape[0])
    return torch.stack((begun, columns.expand_as(begun)), dim=-1).unsqueeze(1)


@functools.cache
def stepwise(original: Attention, window: int | None, capped: bool = False) -> Attention:
    """A model's attention, with passes over a few new tokens taken over where that is the same and cheaper.

    Made once for all layers of a window, since compiled layers know it by its identity. `capped`: the original caps
    scores where it is asked to.
    """
    # Asked here, since a compiled layer would trace the question.
    overlap, capable = overlaps_kernels(), cuda_generation() >= 8  # tensor cores that know bf16

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Any, **kwargs: Any
    ) -> Any:
        # Where heads share keys, transformers copies these for every head: for 400 rows that is most of a step. Batches
        # of other models keep torch's kernels, which then have enough to do.
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
    """While open, the model takes our CUDA kernels where it pays, and spans where it takes whole masks."""
    if stack.takes_whole_masks and attention_name(stack.config) == "eager":
        return replaced_eager_attention(stack, functools.partial(stepwise, capped=True))
    return replaced_attention(stack, stepwise)
