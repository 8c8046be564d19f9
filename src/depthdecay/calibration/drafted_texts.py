"""Recorded texts as lossless mode drafts them: each token in a shallow pass, on top of the full model's KV cache.

A verification has filled all layers before a draft begins. So the first draft of a window attends to the full model's
keys and values, and only its own come from the shallow pass. Here that is simulated for all tokens of a text in one
pass: each query attends to the full model's keys, except at its own position, where it uses its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from depthdecay.calibration.recording import RecordedBatch, Recording
from depthdecay.library_internals import attention_name
from depthdecay.model.grouped_attention import replaced_attention, scaling_of
from depthdecay.model.kv_cache import PlannedCache
from depthdecay.model.layers import LayerStack
from depthdecay.patches import replaced

Own = list[tuple[torch.Tensor, torch.Tensor]]


def can_simulate_drafts(stack: LayerStack) -> bool:
    """Whether attention can be replaced: in models that call torch's attention, with no special features."""
    config = _config(stack)
    plain = getattr(config, "attn_logit_softcapping", None) is None
    return plain and attention_name(config) == "sdpa"


def _config(stack: LayerStack) -> Any:
    return stack.config


class Drafts(Recording):
    """The same texts and full-model states; layers run as they do in drafts."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.stack, recording.batches, recording.columns)

    def run_layer(self, batch: RecordedBatch, index: int, state: torch.Tensor) -> torch.Tensor:
        super().run_layer(batch, index, batch.states[index])  # other runs may have overwritten the full model's keys
        args, kwargs = batch.calls[index]
        cache = next(value for value in (*args, *kwargs.values()) if isinstance(value, PlannedCache))
        layer = cache.planned[index]
        own: Own = []

        def seen(key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            own.append((key, value))
            assert layer.keys is not None
            assert layer.values is not None
            part = slice(layer._first_visible(), layer.clock.filled + key.shape[2])
            return layer.keys[part].permute(1, 2, 0, 3), layer.values[part].permute(1, 2, 0, 3)

        attention = replaced_attention(self.stack, lambda _original, _window: _attention_to(own))
        with replaced(layer, "update", seen), attention:
            return super().run_layer(batch, index, state)


def _attention_to(own: Own) -> Callable[..., Any]:
    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        return own_in_place(query, key, value, *own.pop(), mask, scaling_of(query, kwargs)), None

    return forward


def own_in_place(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of queries (batch, heads, tokens, dim), each with its own key and value at its own position.

    Returns (batch, tokens, heads, dim), as transformers' attention functions do.
    """
    batch, heads, tokens, dim = query.shape
    groups, positions = key.shape[1:3]
    grouped = query.float().reshape(batch, groups, heads // groups, tokens, dim)
    scores = torch.einsum("bghtd,bgpd->bghtp", grouped, key.float()) * scaling
    place = positions - tokens  # position of the first query's own key
    scores.diagonal(place, -2, -1).copy_(torch.einsum("bghtd,bgtd->bght", grouped, own_key.float()) * scaling)
    if mask is None:
        mask = torch.ones((tokens, positions), dtype=torch.bool, device=query.device).tril(place).expand(1, 1, -1, -1)
    mask = mask[..., :positions].unsqueeze(1)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    mixed = torch.einsum("bghtp,bgpd->bghtd", weights, value.float())
    missing = (own_value - value[:, :, place:]).float()  # its own value minus the one used so far
    mixed = mixed + weights.diagonal(place, -2, -1).unsqueeze(-1) * missing.unsqueeze(2)
    return mixed.reshape(batch, heads, tokens, -1).transpose(1, 2).to(query.dtype)
