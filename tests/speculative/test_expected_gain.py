"""How much to draft and at which depth: what is expected, what is learned, and the cost where it does not pay."""

from __future__ import annotations

import random

import pytest
import torch

import depthdecay as dd
from depthdecay.speculative.drafter_choice import Drafting, draft_depths
from depthdecay.speculative.expected_gain import LEARNED, RECENT, Pace, StepCosts, TrackRecord, expected_tokens


def test_the_expected_gain() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(1.0, 4) == 5
    costs = StepCosts(0.5, lambda tokens: 1.0 + 0.1 * (tokens - 1))
    assert costs.rate(0.9, 0) == 1
    assert costs.rate(0.9, 3) == pytest.approx(expected_tokens(0.9, 3) / (1.5 + 1.3))
    simulated = torch.rand((20000, 3), generator=torch.Generator().manual_seed(0)) < 0.9
    assert float(simulated.long().cumprod(1).sum(1).double().mean()) + 1 == pytest.approx(
        expected_tokens(0.9, 3), rel=0.01
    )


def test_a_drafter_learns_and_stops() -> None:
    good = TrackRecord(StepCosts(0.3))
    for _ in range(50):
        count = good.window()
        good.saw(count, count)
    assert good.window() >= 8
    bad = TrackRecord(StepCosts(0.6))
    drafted = 0
    for _ in range(400):
        count = bad.window()
        drafted += count
        bad.saw(count, 0)
    assert drafted <= 12  # of 400 tokens: the cost of finding out stays under 3%
    # Text that becomes easier is noticed.
    for _ in range(1200):
        count = bad.window()
        bad.saw(count, count)
    assert bad.window() > 4


def test_costs_come_from_what_was_timed() -> None:
    pace = Pace()
    assert pace.costs(0.7, 6).draft == 0.7
    assert 1.0 <= pace.costs(0.7).verify(4) < 1.1
    for cold in (9.0, 1.0):  # the first pass of each kind is not timed
        pace.saw_verification(1, cold * 0.010)
        pace.saw_draft(6, cold * 0.006)
        pace.saw_verification(5, cold * 0.014)
    costs = pace.costs(0.7, 6)
    assert costs.draft == pytest.approx(0.6)
    assert pace.costs(0.7, 5).draft == 0.7
    assert costs.verify(5) == pytest.approx(1.4)
    assert costs.verify(3) == pytest.approx(1.2)
    assert costs.verify(1) == 1.0


def test_passes_that_took_unusually_long_change_little() -> None:
    pace = Pace()
    for seconds in (0.080, 0.012, 0.010, 0.011):  # of the first ones the shortest counts
        pace.saw_verification(1, 0.010)
        pace.saw_verification(2, seconds)
    assert pace.costs(0.1).verify(2) == pytest.approx(1.0)
    for seconds in (0.011, 0.090, 0.011):
        pace.saw_verification(1, 0.010)
        pace.saw_verification(2, seconds)
    assert 1.0 < pace.costs(0.1).verify(2) < 1.1
    drafter = TrackRecord(StepCosts(0.1))
    drafter.saw(1, 0, cost=20.0)
    assert 1 < drafter.drag < 1.05


@pytest.mark.parametrize(("draft", "tries"), [(0.07, 4), (0.5, 1)])
def test_cheap_drafters_are_tried_in_several_windows(draft: float, tries: int) -> None:
    drafter = TrackRecord(StepCosts(draft, lambda tokens: 1.0 if tokens == 1 else 2.0), prior=0.2)
    windows = []
    for _ in range(2 * tries + 48):
        windows.append(drafter.window())
        drafter.saw(windows[-1], 0)
    assert windows == [*[1] * tries, *[0] * 16, *[1] * tries, *[0] * 32]


def learn(drafting: Drafting, right: dict[int, float], tokens: int = 4000, seed: int = 0) -> dict[int, int]:
    """Windows on synthetic text with this acceptance rate at each depth; returns how often each depth drafted."""
    chance = torch.Generator().manual_seed(seed)
    used = dict.fromkeys(right, 0)
    position = 0
    while position < tokens:
        drafter = drafting.choose(position)
        count = drafter.window()
        draws = torch.rand(count, generator=chance) < right[drafter.depth]
        accepted = int(draws.long().cumprod(0).sum()) if count else 0
        drafter.saw(count, accepted)
        used[drafter.depth] += count > 0
        position += accepted + 1
    return used


def test_the_depth_with_the_best_rate_is_found() -> None:
    shares = {12: 0.4, 16: 0.55, 20: 0.7}
    for best, right in {
        12: {12: 0.95, 16: 0.96, 20: 0.97},
        16: {12: 0.5, 16: 0.95, 20: 0.96},
        20: {12: 0.3, 16: 0.5, 20: 0.98},
    }.items():
        used = learn(Drafting(28, shares), right)
        assert used[best] > 0.8 * sum(used.values())
    hopeless = learn(Drafting(28, shares), {12: 0.05, 16: 0.1, 20: 0.1})
    assert sum(hopeless.values()) < 40  # of 4000 tokens


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("draft", [0.3, 0.5, 0.77])
def test_drafting_that_does_not_pay_costs_at_most_three_percent(draft: float, noise: float) -> None:
    """On synthetic text and a machine with noisy timings: learning from times and acceptance, as in an engine."""

    def speed(right: float, seed: int) -> float:
        chance = random.Random(seed)
        drafting = Drafting(30, {23: draft})
        pace, told, cost = drafting.pace, 0, 0.0

        def timed(seconds: float) -> float:
            return seconds * max(0.8, chance.gauss(1, noise) + (0.5 if chance.random() < 0.3 * noise else 0))

        while told < 3000:
            drafter = drafting.choose(told % 200)
            count = drafter.window()
            drafts = [timed(draft) for _ in range(count)]
            seconds = timed(1.0 if count == 0 else 1.15 + 0.02 * count)
            if drafts:
                pace.saw_draft(23, sum(drafts) / count)
            pace.saw_verification(count + 1, seconds)
            seconds += sum(drafts)
            accepted = next((place for place in range(count) if chance.random() > right), count)
            step = pace.step
            drafter.saw(count, accepted, cost=None if step is None else seconds / step)
            told, cost = told + accepted + 1, cost + seconds
        return told / cost * (1 + 0.15 * noise)  # average duration of a plain step

    for right in (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        assert sum(speed(right, seed) for seed in range(4)) / 4 > 0.97
    assert speed(0.97, 0) > {0.3: 1.8, 0.5: 1.3, 0.77: 0.97}[draft]


def test_a_drafter_knows_where_it_is_and_how_sure() -> None:
    drafter = TrackRecord(StepCosts(0.4))
    for _ in range(60):
        drafter.position = 10
        drafter.saw(4, 1, [0.99, 0.4, 0.4, 0.4])
    drafter.position = 300
    assert drafter.acceptance < 0.7  # initial guess from the preceding positions
    for _ in range(60):
        drafter.saw(4, 4, [0.9] * 4)
    assert drafter.acceptance > 0.95
    assert drafter.likelihood(0.99) > 0.95
    assert drafter.likelihood(0.4) < 0.2
    drafter.position = 10
    assert drafter.acceptance < 0.6


def test_depths_to_draft_at() -> None:
    from depthdecay.model.repairs import Repairs

    plan = dd.Plan.constant(28, 17)
    assert draft_depths(plan, Repairs()) == [17]
    assert draft_depths(plan, Repairs(dict.fromkeys(range(14, 28), ()))) == [14, 17, 20, 23]
    assert draft_depths(plan, Repairs({17: ()})) == [17]


def test_costs_in_steps_do_not_follow_the_load_of_the_machine() -> None:
    pace = Pace()
    for _ in range(4):
        pace.saw_verification(1, 1.0)
        pace.saw_verification(2, 1.2)
        pace.saw_draft(LEARNED, 0.1)
    for _ in range(60):  # drafting pauses, and other processes slow every pass down
        pace.saw_verification(1, 2.5)
    assert pace.step == pytest.approx(2.5, rel=0.01)
    assert pace.verify(2) == pytest.approx(1.2)
    assert pace.costs(0.5, LEARNED).draft == pytest.approx(0.1)


def test_passes_long_after_a_plain_step_are_not_compared_with_it() -> None:
    pace = Pace()
    for _ in range(RECENT):
        pace.saw_verification(1, 1.0)
        pace.saw_verification(2, 1.2)
        pace.saw_draft(LEARNED, 0.1)
    for _ in range(RECENT):
        pace.saw_verification(2, 1.2)
    for _ in range(60):  # all steps draft, and other processes slow every pass down
        pace.saw_verification(2, 3.0)
        pace.saw_draft(LEARNED, 0.25)
    assert pace.in_steps(3.0) is None
    assert pace.verify(2) == pytest.approx(1.2)
    assert pace.costs(0.5, LEARNED).draft == pytest.approx(0.1)
    pace.saw_verification(1, 1.0)
    assert pace.in_steps(3.0) == pytest.approx(3.0)
