"""Asynchronous copies of tokens from device to host; the host never waits within a step and lags a few steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from depthdecay.runners.contract import LAG_STEPS, SLOTS


class Mailbox:
    """Asynchronous copies of each step's tokens, and of which rows end there, collected in order."""

    def __init__(self, device: torch.device, batch: int) -> None:
        self.is_cuda = device.type == "cuda"
        self.collected = 0
        self._underway: deque[tuple[torch.Tensor, torch.Tensor | None, torch.cuda.Event | None]] = deque()
        shape = (SLOTS, 2, batch)
        self._slots = torch.zeros(shape, dtype=torch.long, pin_memory=True) if self.is_cuda else None
        self._posted = 0

    def post(
        self, tokens: torch.Tensor, stopped: torch.Tensor | None = None, arriving: torch.Tensor | None = None
    ) -> None:
        """Start copying a step's tokens, one per row, and whether each row ends there, if stopping criteria say so.

        `arriving`: host memory that the pass itself copies these tokens to, so that nothing is left to copy here.
        """
        if arriving is None:
            arriving, stopped = self._copied(tokens, stopped)
        else:
            assert stopped is None  # with criteria, the sampler picks
        self._underway.append((arriving, stopped, self._now()))

    def _copied(self, tokens: torch.Tensor, stopped: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._slots is None:
            return tokens.to("cpu", copy=True), None if stopped is None else stopped.to("cpu", copy=True)
        slot, flags = self._slots[self._posted % SLOTS]
        self._posted += 1
        slot.copy_(tokens, non_blocking=True)
        if stopped is None:
            return slot, None
        flags.copy_(stopped.long(), non_blocking=True)
        return slot, flags

    def _now(self) -> torch.cuda.Event | None:
        if not self.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self) -> None:
        """Wait until everything posted has arrived."""
        event = self._underway[-1][-1] if self._underway else None
        if event is not None:
            event.synchronize()

    def collect(self, everything: bool = False) -> Iterator[tuple[int, list[int], list[bool]]]:
        """Steps that have arrived, as (number, tokens, which rows end there).

        Waits only if lagging too far, or for everything.
        """
        while self._underway:
            tokens, stopped, event = self._underway[0]
            must_wait = everything or len(self._underway) > LAG_STEPS
            if event is not None and not event.query():
                if not must_wait:
                    return
                event.synchronize()
            self._underway.popleft()
            self.collected += 1
            ends = [False] * len(tokens) if stopped is None else stopped.bool().tolist()
            yield self.collected - 1, tokens.tolist(), ends
