"""Which waiting requests join the batch, and when: the queue, and the short wait to group requests into cohorts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from depthdecay.batching.row import BatchRow
from depthdecay.runners.kv_blocks import KVBlocks


@dataclass
class CohortPace:
    """Pass times for deciding on cohorts: seconds per step, and per layer with a single row."""

    step: float = 0.0
    lone_layer: float = 0.0

    def saw(self, seconds: float) -> None:
        self.step = seconds if not self.step else 0.9 * self.step + 0.1 * seconds


class Admission:
    """The queue of one batch."""

    def __init__(self, blocks: KVBlocks, max_batch: int, cohort_seconds: float, prefill_tokens: int) -> None:
        """`cohort_seconds`: how long a request waits at most for others to join it."""
        self.blocks = blocks
        self.max_batch = max_batch
        self.cohort_seconds = cohort_seconds
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[BatchRow] = deque()
        self.pace = CohortPace()

    def admit(self, running: Sequence[BatchRow], clock: Callable[[], float]) -> list[BatchRow]:
        """First come, first served, except that a row that fits may overtake an earlier one that does not.

        A row that finishes before the big one could enter does not delay it, so it may always overtake. Other rows
        overtake it at most `max_batch` times in all; after that the big one is next.
        """
        if self._waits_for_cohort(running, clock):
            return []
        entered: list[BatchRow] = []
        for row, delayed in self._that_may_enter(running):
            if not self.blocks.can_hold(row.most_blocks):
                continue  # a row admitted just now took the space
            self.waiting.remove(row)
            row.slot = self.blocks.enter(row.most_blocks)
            entered.append(row)
            for big in delayed:
                big.overtaken += 1
        return entered

    def _that_may_enter(self, running: Sequence[BatchRow]) -> Iterator[tuple[BatchRow, list[BatchRow]]]:
        """Waiting rows that would fit, each taken alone, with the earlier rows that each might delay."""
        too_big: list[tuple[BatchRow, int]] = []  # with the number of steps until each fits
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
        """An upper bound: a prompt gets at least half of each step's budget, and each later step yields a token."""
        return -(-2 * row.unread // self.prefill_tokens) + row.new_tokens - row.index

    def _steps_until_it_fits(self, big: BatchRow, running: Sequence[BatchRow]) -> int:
        """An upper bound if no row is admitted meanwhile: rows finish one by one and free their reserved blocks."""
        free = [store.blocks - store.promised for store in self.blocks.stores]
        for row in sorted(running, key=self._steps_left):
            free = [kind + own for kind, own in zip(free, self.blocks.promises[row.slot], strict=True)]
            if all(need <= kind for need, kind in zip(big.most_blocks, free, strict=True)):
                return self._steps_left(row)
        return 0

    def _waits_for_cohort(self, running: Sequence[BatchRow], clock: Callable[[], float]) -> bool:
        """Whether new rows should wait and enter together with others.

        A new row runs layers that the batch has already dropped. If a second one follows d seconds later, those layers
        run d seconds longer than if both had entered together. So waiting saves each running row the share of its time
        that those layers take, and costs each waiting row all of its time. Rows enter once that no longer pays, or
        once the first has waited `cohort_seconds`.
        """
        if not running or not self.waiting or not self.pace.step:
            return False
        waiting, room = [row for row, _ in self._that_may_enter(running)], self.max_batch - len(running)
        if not waiting or len(waiting) >= room or clock() - waiting[0].submitted >= self.cohort_seconds:
            return False
        idle = self.blocks.layers - max(row.depth for row in running)
        share = min(1.0, idle * self.pace.lone_layer / self.pace.step)
        return share * len(running) > len(waiting)
