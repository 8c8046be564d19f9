"""There is one valid goal, and its bound holds as often as it claims."""

from __future__ import annotations

import numpy as np
import pytest

from depthdecay.calibration.goal import Goal, upper_bound
from depthdecay.errors import DepthDecayError


def test_the_bound_covers_the_mean_over_tokens() -> None:
    losses = np.random.default_rng(1).exponential(0.02, 64)
    bound = upper_bound(losses.tolist(), [10] * 64)
    error = losses.std() / 8
    assert losses.mean() + error < bound < losses.mean() + 3 * error
    # Texts weigh by their tokens: with worse long texts, a mean over prompts would be below the measurement.
    tokens = [100 if loss > 0.04 else 5 for loss in losses]
    mean = float((losses * tokens).sum() / sum(tokens))
    assert losses.mean() < 0.7 * mean
    assert upper_bound(losses.tolist(), tokens) > mean


@pytest.mark.parametrize("prompts", [8, 32])
def test_the_bound_holds_about_as_often_as_it_says(prompts: int) -> None:
    generator = np.random.default_rng(0)
    held = [
        upper_bound(generator.exponential(1.0, prompts).tolist(), [7] * prompts, seed=i, draws=300) >= 1.0
        for i in range(300)
    ]
    assert np.mean(held) > 0.88  # the plain percentile holds in 80 to 88 of 100


@pytest.mark.parametrize("goal", [{}, {"max_kl": 0.1, "speedup": 1.2}, {"max_kl": 0.0}, {"speedup": 1.0}])
def test_goals_must_be_one_and_sensible(goal: dict[str, float]) -> None:
    with pytest.raises(DepthDecayError):
        Goal(**goal)
