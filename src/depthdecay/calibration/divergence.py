"""How far what is learned is from the full model, a few positions at a time: logits over a vocabulary are large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Logits = Callable[[torch.Tensor], torch.Tensor]  # what an output matrix, which learns nothing, says about states

ROWS_AT_ONCE = 1024  # positions whose logits over the whole vocabulary are held at a time


def weighted_kl(
    states: torch.Tensor,
    weights: torch.Tensor,
    said: Logits,
    targets: torch.Tensor,
    wanted: Logits,
    rows_at_once: int | None = None,
) -> torch.Tensor:
    """The sum of `weights` times the KL of what `said` makes of states from what `wanted` makes of their targets.

    `states`: (kinds, positions, hidden), `weights`: (kinds, positions), `targets`: (positions, hidden), so that several
    guesses about a position share what is wanted there. The gradient of a few positions is taken as soon as their
    logits are there: those of all positions are never held, nor computed again on the way back.
    """
    rows = rows_at_once or ROWS_AT_ONCE
    value: torch.Tensor = _WeightedKL.apply(states, weights, said, targets, wanted, rows)  # type: ignore[no-untyped-call]
    return value


def mean_kl(
    states: torch.Tensor, said: Logits, targets: torch.Tensor, wanted: Logits, rows_at_once: int | None = None
) -> torch.Tensor:
    """The mean KL of what is said about states (positions, hidden) from what is wanted of their targets."""
    weights = torch.full((1, len(states)), 1 / max(1, len(states)), device=states.device)
    return weighted_kl(states.unsqueeze(0), weights, said, targets, wanted, rows_at_once)


def rows_within(free: float, vocabulary: int) -> int:
    """How many positions a GPU with so many free bytes takes at a time: few large products keep the host from waiting.

    Ten numbers of 32 bits for each token of the vocabulary: both logits, what is made of them, and gradients.
    """
    return min(8192, max(ROWS_AT_ONCE, int(0.2 * free / (40 * vocabulary))))


class _WeightedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weights: torch.Tensor,
        said: Logits,
        targets: torch.Tensor,
        wanted: Logits,
        rows_at_once: int,
    ) -> torch.Tensor:
        needs_gradient = ctx.needs_input_grad[0]
        total = torch.zeros((), device=states.device)
        gradient = torch.empty_like(states) if needs_gradient else states.new_empty(0)
        for start in range(0, states.shape[1], rows_at_once):
            part = slice(start, start + rows_at_once)
            full = wanted(targets[part]).float().log_softmax(-1)
            chances = full.exp()
            for kind in range(len(states)):
                with torch.set_grad_enabled(needs_gradient):
                    own = states[kind, part].detach().requires_grad_(needs_gradient)
                    by_position = (chances * (full - said(own).float().log_softmax(-1))).sum(-1)
                    kl = (weights[kind, part] * by_position).sum()
                if needs_gradient:
                    (gradient[kind, part],) = torch.autograd.grad(kl, own)
                total += kl.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return outer[0] * gradient, None, None, None, None, None
