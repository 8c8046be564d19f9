"""The goal of a plan, and the confidence bound that a measurement gives for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from depthdecay.calibration.fidelity import Fidelity
from depthdecay.errors import ArgumentError, DepthDecayError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Goal:
    """What the user wants: a bound on quality loss, a speed-up, or a drafter for lossless mode."""

    max_kl: float | None = None
    max_agreement_loss: float | None = None
    speedup: float | None = None
    lossless: bool = False

    def __post_init__(self) -> None:
        given = [value for value in (self.max_kl, self.max_agreement_loss, self.speedup) if value is not None]
        if len(given) + self.lossless != 1:
            names = ("max_kl", "max_agreement_loss", "speedup")
            raise ArgumentError(f"give one of {', '.join(names[:2])} and {names[2]}", *names)
        if self.lossless:
            return
        if not (1 if self.speedup is not None else 0) < given[0] < math.inf:
            raise DepthDecayError(f"the goal is {given[0]:g}; expected a budget above 0, or a speed-up above 1")

    @property
    def measure(self) -> str:
        if self.max_agreement_loss is not None:
            return "share of tokens on which plan and full model differ"
        return "mean KL to the full model, in nats per token"

    @property
    def budget(self) -> float | None:
        return self.max_kl if self.max_kl is not None else self.max_agreement_loss

    def losses(self, fidelity: Fidelity) -> list[float]:
        """The loss that the budget limits, as the mean over each prompt's tokens."""
        if self.max_agreement_loss is not None:
            return [1 - agreement for agreement in fidelity.agreement_by_prompt]
        return fidelity.kl_by_prompt

    def loss(self, fidelity: Fidelity) -> float:
        return 1 - fidelity.agreement if self.max_agreement_loss is not None else fidelity.kl


def upper_bound(losses: Sequence[float], tokens: Sequence[int], seed: int = 0, draws: int = 4000) -> float:
    """A one-sided 95% bound on the mean over tokens, resampling prompts: tokens of one text are not independent.

    A bootstrap-t: losses are skewed, and with few prompts the plain percentile is too low. Never below the measurement.
    """
    weights = np.asarray(tokens, dtype=float)
    sums = np.asarray(losses) * weights
    picks = np.random.default_rng(seed).integers(0, len(sums), (draws, len(sums)))

    def mean_and_error(sums: Any, weights: Any) -> tuple[Any, Any]:
        mean = sums.sum(-1) / weights.sum(-1)
        left = (sums - mean[..., None] * weights) if np.ndim(mean) else sums - mean * weights
        count = sums.shape[-1]
        error = np.sqrt((left**2).sum(-1) * count / max(count - 1, 1)) / weights.sum(-1)
        return mean, error

    mean, error = mean_and_error(sums, weights)
    means, errors = mean_and_error(sums[picks], weights[picks])
    spread = (means - mean) / np.maximum(errors, 1e-12 + 0.05 * error)
    by_t = mean - np.quantile(spread, 1 - CONFIDENCE) * error
    return float(max(by_t, np.quantile(means, CONFIDENCE), mean))
