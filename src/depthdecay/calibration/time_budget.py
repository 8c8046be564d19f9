"""The time budget of a calibration: how much is left, for progress messages and for planning the work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# The share of the time by which self-generated questions, the full model's answers, their recording, the search and a
# drafter's maps should be done; the rest is for measurements.
QUESTIONS_SHARE, ANSWERS_SHARE, RECORDING_SHARE, SEARCH_SHARE, MAPS_SHARE = 0.15, 0.3, 0.45, 0.6, 0.9


class TimeBudget:
    """Minutes for everything, starting now; None for no limit."""

    def __init__(self, minutes: float | None) -> None:
        self.seconds = math.inf if minutes is None else 60 * minutes
        self._started = time.monotonic()

    @property
    def is_bounded(self) -> bool:
        return self.seconds < math.inf

    @property
    def used(self) -> float:
        """Seconds used so far."""
        return time.monotonic() - self._started

    def left_of(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is used up; never below 0."""
        return max(0.0, share * self.seconds - self.used)

    def is_over(self, by: float = 1.0) -> bool:
        """Whether this share of the time is used up, so that only what a plan cannot do without is still done."""
        return self.left_of(by) == 0

    def part(self, share: float) -> TimeBudget:
        """A budget with this share of the time left, starting now."""
        return TimeBudget(share * self.left_of() / 60)

    def affordable(self, count: int, seconds_each: float, by: float = 1.0) -> int:
        """How many of `count` there is time for until the share `by` is used; at least one, to have a result."""
        if not self.is_bounded or seconds_each <= 0:
            return count
        return max(1, min(count, int(self.left_of(by) / seconds_each)))


def counted(say: Callable[[str], None], title: str) -> Callable[[int, int], None]:
    """Reports how many are done, and the estimated time for the rest."""
    left = time_left()
    say(f"{title} …")
    return lambda done, total: say(f"{title}: {done} of {total}{left(done, total)}")


def time_left(most: Callable[[], float] = lambda: float("inf")) -> Callable[[int, int], str]:
    """A function that words the estimated time left, starting now; empty at the end.

    `most` is how many seconds remain, where the work is cut short after them.
    """
    started = time.monotonic()

    def words(done: int, total: int) -> str:
        if not 0 < done < total:
            return ""
        seconds = min(most(), (time.monotonic() - started) / done * (total - done))
        return f" (about {seconds:.0f} s left)"

    return words
