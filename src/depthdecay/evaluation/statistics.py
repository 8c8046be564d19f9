"""Differences between two methods on the same questions: a paired bootstrap interval and McNemar's exact test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True)
class PairedDifference:
    """Mean of a - b over the questions, with its 95% interval; p is McNemar's and None where values are no 0 or 1."""

    value: float
    low: float
    high: float
    p: float | None
    only_a: int = 0  # questions that only a got right
    only_b: int = 0


def paired_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> PairedDifference:
    """What resampling the questions, the same for both, says about mean(a) - mean(b)."""
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

    How often each distinct value is drawn is multinomial, so a thousand questions need no thousand draws.
    """
    values, counts = np.unique(differences, return_counts=True)
    n = differences.size
    drawn = np.random.default_rng(SEED).multinomial(n, counts / n, size=RESAMPLES)
    means = drawn @ values / n
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided: how likely so uneven a split of the questions that one alone got right is between equals."""
    n = only_a + only_b
    tail, ways = 0, 1  # splits with up to k on the rarer side, and with k; each from the one before, for speed
    for k in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)
