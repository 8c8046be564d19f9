"""The greedy choice after a pass, and what else a step leaves behind, in as few kernels as possible.

The vocabulary is searched in pieces, one program each. torch's own argmax takes as long as a small matrix product.
"""

from __future__ import annotations

import torch

PIECES = 64


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The argmax over the last dimension; of equal logits the first, like `torch.argmax`."""
    size = logits.shape[-1]
    pieces = logits.unflatten(-1, (PIECES if size % PIECES == 0 else 1, -1))
    highest, place = pieces.max(-1)
    piece = highest.argmax(-1, keepdim=True)
    return (piece * pieces.shape[-1] + place.gather(-1, piece)).squeeze(-1)


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
