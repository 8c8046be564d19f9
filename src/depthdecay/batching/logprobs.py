"""Token log-probabilities, as clients of a server request them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities before temperature and truncation: of the sampled token, and of the most likely ones."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # token, log-probability


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """For one row."""
    logs = torch.log_softmax(logits.to(torch.float32), dim=-1)
    values, tokens = logs.topk(min(count, logs.shape[-1])) if count else (logs[:0], logs[:0].long())
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Logprobs(float(logs[token]), top)
