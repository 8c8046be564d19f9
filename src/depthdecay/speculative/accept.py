"""Which drafts are kept: those that the full model would have said, up to the first that it would not."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def count_right(drafts: Sequence[int], said: Sequence[int]) -> int:
    """How many drafts stay; `said` is what the full model says in the place of each, given those before it."""
    return next((place for place, draft in enumerate(drafts) if draft != said[place]), len(drafts))


def count_right_on_device(drafts: torch.Tensor, said: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """The same for rows on the device, of which only the first `drafted` drafts are this window's."""
    right = (said == drafts).long().cumprod(1).sum(1)
    return torch.minimum(right, drafted)
