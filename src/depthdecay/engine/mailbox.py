"""Asynchronous copies of tokens from device to host; the host never waits within a step and lags a few steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

# How many steps the host may start before it has seen a token. Each step past the end of a text is wasted work;
# with too few, the device may run idle while the host detokenizes.
LAG_STEPS = 4


class Mailbox:
    """Asynchronous copies of each step's tokens, and of which rows end there, collected in order."""

    def __init__(self, device: torch.device, batch: int) -> None:
        self.is_cuda = device.type == "cuda"
        self.collected = 0
        self._underway: deque[tuple[torch.Tensor, torch.Tensor | None, torch.cuda.Event | None]] = deque()
        shape = (LAG_STEPS + 2, 2, batch)
        self._slots = torch.zeros(shape, dtype=torch.long, pin_memory=True) if self.is_cuda else None
        self._posted = 0

    def post(self, tokens: torch.Tensor, stopped: torch.Tensor | None = None) -> None:
        """Start copying a step's tokens, one per row, and whether each row ends there, if stopping criteria say so."""
        if self._slots is None:
            copies = (None if given is None else given.to("cpu", copy=True) for given in (tokens, stopped))
            self._underway.append((*copies, None))  # type: ignore[arg-type]
            return
        slot, flags = self._slots[self._posted % len(self._slots)]
        slot.copy_(tokens, non_blocking=True)
        if stopped is not None:
            flags.copy_(stopped.long(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._underway.append((slot, None if stopped is None else flags, event))
        self._posted += 1

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
