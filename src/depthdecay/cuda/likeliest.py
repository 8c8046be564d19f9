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
    latest: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Keep a step's logits (batch, vocabulary), feed back its greedy choices, and go to the next position.

    `latest`: a ring buffer (slots, batch) of the last steps' choices; `turn` is this step's slot.
    """
    kept.copy_(logits)
    chosen = likeliest(logits)
    tokens.copy_(chosen.unsqueeze(-1))
    latest.index_copy_(0, turn, chosen.unsqueeze(0))
    turn.copy_((turn + 1) % latest.shape[0])
    position += 1
    position_ids += 1
