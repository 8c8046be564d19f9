"""The time of a calibration: how much of it is left, for people to know and for the work to fit into."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# By which share of the time questions of its own, the full model's answers, the search and a drafter's maps should be
# there; the rest is for figures.
QUESTIONS_SHARE, ANSWERS_SHARE, SEARCH_SHARE, MAPS_SHARE = 0.15, 0.3, 0.6, 0.9


class TimeBudget:
    """Minutes for the whole, from now on; None for as long as it takes."""

    def __init__(self, minutes: float | None) -> None:
        self.seconds = math.inf if minutes is None else 60 * minutes
        self._started = time.monotonic()

    @property
    def is_bounded(self) -> bool:
        return self.seconds < math.inf

    @property
    def used(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started

    def left_of(self, share: float = 1.0) -> float:
        """Seconds until so much of the time is used up; never below 0."""
        return max(0.0, share * self.seconds - self.used)

    def part(self, share: float) -> TimeBudget:
        """So much of what is left, from now on."""
        return TimeBudget(share * self.left_of() / 60)

    def affordable(self, count: int, seconds_each: float, by: float = 1.0) -> int:
        """How many of so many there is time for, by a share of it; one at least, since something has to come of it."""
        if not self.is_bounded or seconds_each <= 0:
            return count
        return max(1, min(count, int(self.left_of(by) / seconds_each)))


def counted(say: Callable[[str], None], title: str) -> Callable[[int, int], None]:
    """Tells how many of a number are done, and how long the others will take at this pace."""
    left = time_left()
    say(f"{title} …")
    return lambda done, total: say(f"{title}: {done} of {total}{left(done, total)}")


def time_left() -> Callable[[int, int], str]:
    """Words for the time that is left, from now on, when some of a number are done; none at the end."""
    started = time.monotonic()

    def words(done: int, total: int) -> str:
        if not 0 < done < total:
            return ""
        return f" (about {(time.monotonic() - started) / done * (total - done):.0f} s left)"

    return words
