"""Asynchronous copies of tokens from device to host; the host never waits within a step and lags a few steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

# How many steps the host may start before it has seen a token. Each step past the end of a text is wasted work;
# with too few, the device may run idle while the host detokenizes.
LAG_STEPS = 4


class Mailbox:
    """Asynchronous copies of each step's tokens, collected in order."""

    def __init__(self, device: torch.device, batch: int) -> None:
        self.is_cuda = device.type == "cuda"
        self.collected = 0
        self._underway: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        shape = (LAG_STEPS + 2, batch)
        self._slots = torch.zeros(shape, dtype=torch.long, pin_memory=True) if self.is_cuda else None
        self._posted = 0

    def post(self, tokens: torch.Tensor) -> None:
        """Start copying a step's tokens, one per row."""
        if self._slots is None:
            self._underway.append((tokens.to("cpu", copy=True), None))
            return
        slot = self._slots[self._posted % len(self._slots)]
        slot.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._underway.append((slot, event))
        self._posted += 1

    def wait(self) -> None:
        """Wait until everything posted has arrived."""
        if self._underway and self._underway[-1][1] is not None:
            self._underway[-1][1].synchronize()

    def collect(self, everything: bool = False) -> Iterator[tuple[int, list[int]]]:
        """Steps that have arrived, as (number, tokens); waits only if lagging too far, or for everything."""
        while self._underway:
            tokens, event = self._underway[0]
            must_wait = everything or len(self._underway) > LAG_STEPS
            if event is not None and not event.query():
                if not must_wait:
                    return
                event.synchronize()
            self._underway.popleft()
            self.collected += 1
            yield self.collected - 1, tokens.tolist()
