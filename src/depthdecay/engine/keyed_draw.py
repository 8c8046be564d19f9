"""Sampling on a GPU by our own kernels, without sorting a vocabulary or drawing noise operation by operation.

The rules are transformers', except that top-p keeps or drops tokens of equal probability together: there the sort
decides, whose order depends on the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from depthdecay.cuda.kernels.keyed_pick import MOST_KEPT, Rules, Seen, pick

PENALTY = "RepetitionPenaltyLogitsProcessor"
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (f"{name}LogitsWarper" for name in ("Temperature", "TopK", "TopP", "MinP"))


@dataclass(frozen=True)
class Draw:
    """How a row's token is drawn after `before` have changed its scores one by one."""

    before: tuple[Any, ...]
    rules: Rules

    @classmethod
    def of(cls, processors: Sequence[Any]) -> Draw | None:
        """For processors that end in temperature, top-k, top-p and min-p, or some of these; None for any others."""
        rest, last = list(processors), {}
        for name in (_MIN_P, _TOP_P, _TOP_K, _TEMPERATURE):
            if rest and type(rest[-1]).__name__ == name:
                last[name] = rest.pop()
        cuts = [last[name] for name in (_TOP_K, _TOP_P, _MIN_P) if name in last]
        if any(cut.min_tokens_to_keep != 1 or cut.filter_value != -float("inf") for cut in cuts):
            return None
        if cuts and (_TOP_K not in last or last[_TOP_K].top_k > MOST_KEPT):
            return None
        if any(type(processor).__name__.endswith("Warper") for processor in rest):
            return None
        penalty = 1.0
        if rest and type(rest[-1]).__name__ == PENALTY and not rest[-1].prompt_ignore_length:
            penalty = rest.pop().penalty
        rules = Rules(
            temperature=last[_TEMPERATURE].temperature if _TEMPERATURE in last else 1.0,
            penalty=penalty,
            top_k=last[_TOP_K].top_k if _TOP_K in last else 0,
            top_p=last[_TOP_P].top_p if _TOP_P in last else 1.0,
            min_p=last[_MIN_P].min_p if _MIN_P in last else 0.0,
        )
        return cls(tuple(rest), rules)

    @property
    def penalises(self) -> bool:
        """Whether a draw needs to know which tokens have been seen."""
        return self.rules.penalty != 1.0

    def pick(
        self, scores: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None = None, seen: Seen | None = None
    ) -> torch.Tensor:
        """The place of each row's draw; `scores` (rows, vocabulary) are those that `before` has processed.

        `tokens`: which tokens the scores are for, if not the whole vocabulary.
        """
        return pick(scores, keys, self.rules, tokens, seen if self.penalises else None)


def are_on_gpu(scores: torch.Tensor) -> bool:
    """Whether rows are sampled this way. On a CPU, transformers' processors are as fast."""
    return scores.is_cuda
