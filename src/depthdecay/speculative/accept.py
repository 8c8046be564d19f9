"""Which drafts are accepted: those that match the full model's tokens, up to the first mismatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def count_right(drafts: Sequence[int], said: Sequence[int]) -> int:
    """How many drafts are accepted. `said` is the full model's token at each position, given the drafts before it."""
    return next((place for place, draft in enumerate(drafts) if draft != said[place]), len(drafts))


def count_right_on_device(drafts: torch.Tensor, said: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """The same for rows on the device; only the first `drafted` drafts belong to this window."""
    right = (said == drafts).long().cumprod(1).sum(1)
    return torch.minimum(right, drafted)
