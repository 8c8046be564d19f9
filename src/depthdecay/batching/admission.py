"""Who enters the batch, and when: the line of those that wait, and the wait for others of the same age."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

    def __init__(self, blocks: KVBlocks, max_batch: int, cohort_seconds: float, prefill_tokens: int) -> None:
        """`cohort_seconds`: the longest that a request waits for others of its age."""
        self.blocks = blocks
        self.max_batch = max_batch
        self.cohort_seconds = cohort_seconds
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[BatchRow] = deque()
        self.pace = CohortPace()

    def admit(self, running: Sequence[BatchRow], clock: Callable[[], float]) -> list[BatchRow]:
        """First come, first served, but for those that fit while one before them does not.

        Whoever will have left by the time that the big one could enter does not delay it, and may always pass. Others
        pass it at most as often as a batch has rows: then it is next, whatever comes.
        """
        if self._waits_for_cohort(running, clock):
            return []
        entered: list[BatchRow] = []
        for row, delayed in self._that_may_enter(running):
            if not self.blocks.can_hold(row.most_blocks):
                continue  # one before it has taken the room
            self.waiting.remove(row)
            row.slot = self.blocks.enter(row.most_blocks)
            entered.append(row)
            for big in delayed:
                big.overtaken += 1
        return entered

    def _that_may_enter(self, running: Sequence[BatchRow]) -> Iterator[tuple[BatchRow, list[BatchRow]]]:
        """Those that wait and would fit, each by itself, with those before them that it might delay."""
        too_big: list[tuple[BatchRow, int]] = []  # with the steps until it fits
        for row in list(self.waiting):
            if not self.blocks.free_slots:
                return
            if not self.blocks.can_hold(row.most_blocks):
                too_big.append((row, self._steps_until_it_fits(row, running)))
                continue
            delayed = [big for big, steps in too_big if self._steps_left(row) > steps]
            if all(big.overtaken < self.max_batch for big in delayed):
                yield row, delayed

    def _steps_left(self, row: BatchRow) -> int:
        """At most: a prompt is read at half a step's budget or faster, and every other step gives a token or more."""
        return -(-2 * row.unread // self.prefill_tokens) + row.new_tokens - row.index

    def _steps_until_it_fits(self, big: BatchRow, running: Sequence[BatchRow]) -> int:
        """At most, if nobody enters: rows leave one after the other, and what was promised to them is free."""
        free = [store.blocks - store.promised for store in self.blocks.stores]
        for row in sorted(running, key=self._steps_left):
            free = [kind + own for kind, own in zip(free, self.blocks.promises[row.slot], strict=True)]
            if all(need <= kind for need, kind in zip(big.most_blocks, free, strict=True)):
                return self._steps_left(row)
        return 0

    def _waits_for_cohort(self, running: Sequence[BatchRow], clock: Callable[[], float]) -> bool:
        """Whether new rows should wait for others of their age.

        A new row makes layers run that the batch has dropped. One that comes d seconds later keeps them running
        for d longer; both together would not. So waiting saves every row the share of its time that those layers take,
        and costs each waiting row all of it. Once more wait than that, or the first has waited long enough, all enter.
        """
        if not running or not self.waiting or not self.pace.step:
            return False
        waiting, room = [row for row, _ in self._that_may_enter(running)], self.max_batch - len(running)
        if not waiting or len(waiting) >= room or clock() - waiting[0].submitted >= self.cohort_seconds:
            return False
        idle = self.blocks.layers - max(row.depth for row in running)
        share = min(1.0, idle * self.pace.lone_layer / self.pace.step)
        return share * len(running) > len(waiting)
