"""Intervals and tests against values worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from depthdecay.evaluation.statistics import bootstrap_interval, mcnemar, paired_difference


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 32),
        (1, 7, 2 * (1 + 8) / 2**8),
        (3, 3, 1.0),
        (2, 8, 2 * (1 + 10 + 45) / 2**10),
    ],
)
def test_mcnemar_is_a_two_sided_binomial_test(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar(only_a, only_b) == pytest.approx(p)
    assert mcnemar(only_b, only_a) == pytest.approx(p)


def test_mcnemar_takes_thousands_of_questions() -> None:
    assert 0 < mcnemar(1900, 2100) < 0.01


def test_mcnemar_is_exact_for_many_questions_too() -> None:
    """Checked with ratios of neighbouring terms, downwards from the largest, instead of integers."""
    n, least = 20_000, 9_800
    term = math.exp(math.lgamma(n + 1) - math.lgamma(least + 1) - math.lgamma(n - least + 1) - n * math.log(2))
    tail, k = 0.0, least
    while k >= 0 and term > 0:
        tail += term
        term *= k / (n - k + 1)
        k -= 1
    assert mcnemar(least, n - least) == pytest.approx(2 * tail, rel=1e-9)
    assert mcnemar(10_000, 10_000) == 1.0


def test_mcnemar_adds_up_without_starting_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing each binomial from scratch took half a minute for 20,000 questions."""

    def refuse(*_: int) -> int:
        raise AssertionError("a binomial from scratch")

    monkeypatch.setattr(math, "comb", refuse)
    assert mcnemar(2, 8) == pytest.approx(2 * 56 / 2**10)


def test_a_difference_is_paired() -> None:
    found = paired_difference([1, 1, 1, 0, 0], [1, 0, 0, 0, 1])
    assert found.value == pytest.approx(0.2)
    assert (found.only_a, found.only_b) == (2, 1)
    assert found.p == 1.0
    assert found.low <= found.value <= found.high


def test_equal_answers_differ_by_nothing() -> None:
    found = paired_difference([1, 0, 1, 1], [1, 0, 1, 1])
    assert (found.value, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_the_interval_is_that_of_all_resamples() -> None:
    """Four differences have 4^4 resamples, few enough to enumerate."""
    differences = np.array([1.0, 1.0, 0.0, -1.0])
    means = [np.mean(chosen) for chosen in itertools.product(differences, repeat=4)]
    assert bootstrap_interval(differences) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.26)
    low, high = bootstrap_interval(differences, level=0.5)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.25, 0.75])))


def test_the_interval_is_as_wide_as_the_normal_one_for_many_questions() -> None:
    differences = np.array([1.0] * 60 + [-1.0] * 40 + [0.0] * 900)
    low, high = bootstrap_interval(differences)
    half = 1.96 * differences.std() / math.sqrt(differences.size)
    assert (low, high) == pytest.approx((0.02 - half, 0.02 + half), abs=0.0015)


def test_measures_between_0_and_1_have_an_interval_and_no_test() -> None:
    found = paired_difference([0.5, 1.0, 0.25], [0.5, 0.5, 0.0])
    assert found.value == pytest.approx(0.25)
    assert found.p is None


def test_unequal_lists_are_a_fault() -> None:
    with pytest.raises(ValueError, match="equally long"):
        paired_difference([1, 0], [1])
