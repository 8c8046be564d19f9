"""Who enters the batch, and when: the line of those that wait, and the wait for others of the same age."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from depthdecay.batching.row import BatchRow
from depthdecay.runners.kv_blocks import KVBlocks


@dataclass
class CohortPace:
    """How long passes take, for the choice of cohorts: seconds of a step, and of one layer with one row."""

    step: float = 0.0
    lone_layer: float = 0.0

    def saw(self, seconds: float) -> None:
        self.step = seconds if not self.step else 0.9 * self.step + 0.1 * seconds


class Admission:
    """The waiting line of one batch."""

    def __init__(self, blocks: KVBlocks, max_batch: int, cohort_seconds: float) -> None:
        """`cohort_seconds`: the longest that a request waits for others of its age."""
        self.blocks = blocks
        self.max_batch = max_batch
        self.cohort_seconds = cohort_seconds
        self.waiting: deque[BatchRow] = deque()
        self.pace = CohortPace()

    def admit(self, running: Sequence[BatchRow], clock: Callable[[], float]) -> list[BatchRow]:
        """First come, first served, but for those that fit while one before them does not.

        One that is too big for now is overtaken by as many as a batch has rows. Then it is next, whatever comes: nobody
        enters until enough rows have left for it.
        """
        if self._waits_for_cohort(running, clock):
            return []
        entered: list[BatchRow] = []
        too_big: list[BatchRow] = []
        for row in list(self.waiting):
            if not self._may_overtake(too_big):
                break
            if not self.blocks.can_hold(row.most_blocks):
                too_big.append(row)
                continue
            self.waiting.remove(row)
            row.slot = self.blocks.enter(row.most_blocks)
            entered.append(row)
            for other in too_big:
                other.overtaken += 1
        return entered

    def _may_overtake(self, too_big: Sequence[BatchRow]) -> bool:
        return bool(self.blocks.free_slots) and all(row.overtaken < self.max_batch for row in too_big)

    def _could_enter(self) -> list[BatchRow]:
        """Those that wait and would fit, each by itself."""
        found: list[BatchRow] = []
        too_big: list[BatchRow] = []
        for row in self.waiting:
            if not self._may_overtake(too_big):
                break
            (found if self.blocks.can_hold(row.most_blocks) else too_big).append(row)
        return found

    def _waits_for_cohort(self, running: Sequence[BatchRow], clock: Callable[[], float]) -> bool:
        """Whether new rows should wait for others of their age.

        A new row makes layers run that the batch has dropped. One that comes d seconds later keeps them running
        for d longer; both together would not. So waiting saves every row the share of its time that those layers take,
        and costs each waiting row all of it. Once more wait than that, or the first has waited long enough, all enter.
        """
        if not running or not self.waiting or not self.pace.step:
            return False
        waiting, room = self._could_enter(), self.max_batch - len(running)
        if not waiting or len(waiting) >= room or clock() - waiting[0].submitted >= self.cohort_seconds:
            return False
        idle = self.blocks.layers - max(row.depth for row in running)
        share = min(1.0, idle * self.pace.lone_layer / self.pace.step)
        return share * len(running) > len(waiting)
