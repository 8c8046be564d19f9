"""Differences between two methods on the same questions: a paired bootstrap interval and McNemar's exact test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True)
class PairedDifference:
    """Mean of a - b over the questions, with its 95% interval; p is McNemar's, None for scores other than 0 and 1."""

    value: float
    low: float
    high: float
    p: float | None
    only_a: int = 0  # questions that only a got right
    only_b: int = 0


def paired_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> PairedDifference:
    """mean(a) - mean(b), with an interval from resampling the questions, the same ones for both."""
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if first.shape != second.shape or first.ndim != 1 or not first.size:
        raise ValueError(f"expected two equally long lists of scores, got {first.shape} and {second.shape}")
    low, high = bootstrap_interval(first - second, level)
    binary = bool(np.isin(np.concatenate([first, second]), (0.0, 1.0)).all())
    if not binary:
        return PairedDifference(float((first - second).mean()), low, high, None)
    only_a, only_b = int((first > second).sum()), int((second > first).sum())
    return PairedDifference(float((first - second).mean()), low, high, mcnemar(only_a, only_b), only_a, only_b)


def bootstrap_interval(differences: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentiles of the mean over resampled questions.

    The counts of the distinct values are multinomial, so there is no need to draw every question.
    """
    values, counts = np.unique(differences, return_counts=True)
    n = differences.size
    drawn = np.random.default_rng(SEED).multinomial(n, counts / n, size=RESAMPLES)
    means = drawn @ values / n
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value: how likely such an uneven split of the questions that only one got right is by chance."""
    n = only_a + only_b
    tail, ways = 0, 1  # number of splits with up to k on the rarer side, and with k, updated incrementally
    for k in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)
