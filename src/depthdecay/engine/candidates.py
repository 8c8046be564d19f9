"""Sampling from a row's likeliest tokens, without sorting or drawing noise for a whole vocabulary.

With top-k set, which it is by default, no other token can be drawn. The rules are transformers', except that top-p
keeps or drops tokens of equal probability together: there the sort decides, whose order depends on the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SPARE = 32  # candidates beyond top-k, at least: tokens that tie with the k-th are kept too
PIECES = 64  # at most, in which a vocabulary is searched


@dataclass(frozen=True)
class Cut:
    """What the last processors keep, after `before` have changed scores one by one."""

    before: tuple[Any, ...]
    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: Sequence[Any]) -> Cut | None:
        """For processors that end in top-k, perhaps followed by top-p and min-p; None for any others."""
        from depthdecay.cuda.kernels.candidate_pick import MOST_CANDIDATES

        names = [type(processor).__name__ for processor in processors]
        if "TopKLogitsWarper" not in names:
            return None
        start = names.index("TopKLogitsWarper")
        after = dict(zip(names[start + 1 :], processors[start + 1 :], strict=True))
        known = ["TopPLogitsWarper", "MinPLogitsWarper"]
        if [*after] != [name for name in known if name in after] or len(after) < len(names) - start - 1:
            return None
        if any(one.min_tokens_to_keep != 1 or one.filter_value != -float("inf") for one in processors[start:]):
            return None
        if set(names[:start]) & {"TopPLogitsWarper", "MinPLogitsWarper"}:
            return None
        top_k = processors[start].top_k
        if top_k + SPARE > MOST_CANDIDATES:
            return None
        top_p = after["TopPLogitsWarper"].top_p if "TopPLogitsWarper" in after else 1.0
        min_p = after["MinPLogitsWarper"].min_p if "MinPLogitsWarper" in after else 0.0
        return cls(tuple(processors[:start]), top_k, top_p, min_p)

    def pick(self, scores: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The place of each row's draw; `scores` (rows, vocabulary) are those that `before` has processed.

        `tokens`: which tokens the scores are for, if not the whole vocabulary.
        """
        from depthdecay.cuda.kernels.candidate_pick import pick_candidate

        count = min(64 * -(-(self.top_k + SPARE) // 64), scores.shape[1])
        values, places = highest(scores, count)
        named = places if tokens is None else tokens[places]
        picked: torch.Tensor = pick_candidate(
            values, places, named, keys, self.top_k, self.top_p, self.min_p, count < scores.shape[1]
        )
        return picked


def highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest scores of each row, sorted, and their places; of equal scores any, if not all of them fit.

    In pieces first, as rows of their own: torch's top-k takes several kernels for a long row.
    """
    pieces = PIECES
    while scores.shape[1] % pieces:
        pieces -= 1
    size = scores.shape[1] // pieces
    if pieces == 1 or size < 2 * count:
        return scores.topk(count)
    values, places = scores.unflatten(1, (pieces, size)).topk(count, sorted=False)
    starts = torch.arange(0, scores.shape[1], size, device=scores.device)
    values, chosen = values.flatten(1).topk(count)
    return values, (places + starts.unsqueeze(1)).flatten(1).gather(1, chosen)


def are_on_gpu(scores: torch.Tensor) -> bool:
    """Whether rows are sampled this way. On a CPU, transformers' processors are as fast."""
    return scores.is_cuda
