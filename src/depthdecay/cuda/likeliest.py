"""The greedy choice after a pass, and what else a step leaves behind, in as few kernels as possible.

The vocabulary is searched in pieces, one program each. torch's own argmax takes as long as a small matrix product.
"""

from __future__ import annotations

import torch

PIECES = 64  # at most


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The argmax over the last dimension; of equal logits the first, like `torch.argmax`."""
    size, count = logits.shape[-1], PIECES
    while size % count:
        count -= 1
    highest, place = logits.unflatten(-1, (count, -1)).max(-1)
    piece = highest.argmax(-1, keepdim=True)
    return (piece * (size // count) + place.gather(-1, piece)).squeeze(-1)


def take_step(
    logits: torch.Tensor,
    kept: torch.Tensor,
    tokens: torch.Tensor,
    position: torch.Tensor,
    position_ids: torch.Tensor,
) -> None:
    """Keep a step's logits (batch, vocabulary), feed back its greedy choices, and go to the next position."""
    kept.copy_(logits)
    tokens.copy_(likeliest(logits).unsqueeze(-1))
    position += 1
    position_ids += 1
