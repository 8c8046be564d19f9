"""The next token of every row: rows that are picked alike are picked together, the others one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..sampling import Sampler, gumbel_noise

# Processors that look at the scores alone; all others read the row's own text.
_BLIND = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}


@dataclass(frozen=True)
class Logprobs:
    """What the model itself thought, before temperature and cuts: of the token taken, and of the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # token, log-probability


def alike(sampler: Sampler) -> tuple[Any, ...] | None:
    """What two rows must have in common to be picked together; None where a row's text plays a part."""
    settings = []
    for processor in sampler.processors:
        name = type(processor).__name__
        if name not in _BLIND:
            return None
        settings.append((name, getattr(processor, _BLIND[name])))
    return (sampler.is_sampling, *settings)


def pick_tokens(samplers: Sequence[Sampler], indices: Sequence[int], logits: torch.Tensor) -> list[int]:
    """T_index of each row, as its own sampler alone would pick it."""
    tokens = torch.empty(len(samplers), dtype=torch.long, device=logits.device)
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        kind = alike(sampler)
        groups[("alone", row) if kind is None else kind].append(row)
    for rows in groups.values():
        own = logits if len(rows) == len(samplers) else logits[rows]
        tokens[rows] = _picked([samplers[row] for row in rows], [indices[row] for row in rows], own)
    picked = tokens.tolist()  # the step's one wait for the device
    for sampler, index, token in zip(samplers, indices, picked, strict=True):
        if alike(sampler) is None:
            sampler.history[:, sampler.prompt_length + index] = token
    return picked


def _picked(samplers: Sequence[Sampler], indices: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    if len(samplers) == 1:
        return samplers[0].pick(logits, indices[0])[0]
    scores = logits.to(torch.float32)
    if samplers[0].processors:
        scores = samplers[0].processors(samplers[0].history[:0], scores)
    keys = [
        sampler.keys[0, index] for sampler, index in zip(samplers, indices, strict=True) if sampler.keys is not None
    ]
    if keys:
        scores = scores + gumbel_noise(torch.stack(keys), scores.shape[-1])
    return scores.argmax(dim=-1)


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """For one row."""
    logs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    values, tokens = logs.topk(min(count, logs.shape[-1])) if count else (logs[:0], logs[:0].long())
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Logprobs(float(logs[token]), top)
