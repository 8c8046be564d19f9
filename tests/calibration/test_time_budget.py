"""The time budget of a calibration: what is left, and what fits into it."""

from __future__ import annotations

import pytest

from depthdecay.calibration import time_budget
from depthdecay.calibration.time_budget import TimeBudget, counted, time_left


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time_budget.time, "monotonic", lambda: now[0])
    return now


def test_the_rest_of_the_time_decides_how_much_is_done(clock: list[float]) -> None:
    budget = TimeBudget(1)
    assert budget.left_of(0.5) == 30
    assert budget.affordable(10, 7.5) == 8
    assert budget.affordable(4, 7.5) == 4
    assert budget.affordable(10, 7.5, by=0.5) == 4
    clock[0] += 45
    assert budget.left_of(0.5) == 0
    assert budget.is_over(by=0.5)
    assert not budget.is_over()
    assert budget.affordable(10, 7.5) == 2
    clock[0] += 1000
    assert budget.affordable(10, 7.5) == 1  # at least one, to have a result


def test_a_part_is_of_what_is_left_and_starts_now(clock: list[float]) -> None:
    budget = TimeBudget(1)
    clock[0] += 20
    part = budget.part(0.5)
    assert part.seconds == 20
    clock[0] += 5
    assert (part.used, part.left_of()) == (5, 15)
    assert not TimeBudget(None).part(0.5).is_bounded


def test_without_a_bound_all_is_done(clock: list[float]) -> None:
    budget = TimeBudget(None)
    clock[0] += 1e9
    assert not budget.is_bounded
    assert not budget.is_over()
    assert budget.affordable(10, 7.5) == 10


def test_progress_says_how_long_it_will_take(clock: list[float]) -> None:
    said: list[str] = []
    tell = counted(said.append, "reading")
    clock[0] += 6
    tell(2, 8)
    tell(8, 8)
    assert said == ["reading …", "reading: 2 of 8 (about 18 s left)", "reading: 8 of 8"]


def test_the_estimate_ends_where_the_work_is_cut_short(clock: list[float]) -> None:
    budget = TimeBudget(1)
    left = time_left(budget.left_of)
    clock[0] += 10
    assert left(1, 100) == " (about 50 s left)"  # not 990
    assert left(5, 10) == " (about 10 s left)"
