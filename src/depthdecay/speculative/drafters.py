"""Where drafts come from: some layers of the model, a learned head, or the text before. Another needs two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from depthdecay.speculative.expected_gain import LOOKUP, TrackRecord
from depthdecay.speculative.prompt_lookup import Lookup


class Lane(Protocol):
    """Where the windows of one text run: passes are started, and what they said is collected."""

    at_once: int  # drafts that may be started before anything is waited for
    lag: int  # a draft's confidence is read while so many later ones run
    runs_ahead: bool  # whether the next window may be begun before the last one has been handed out

    def read(self, text: Sequence[int]) -> torch.Tensor:
        """Start from a text; the logits behind it, (1, vocabulary)."""

    def begin(self, token: int) -> None:
        """This token follows the text that was read."""

    def offer(self, drafts: Sequence[int]) -> None:
        """Drafts that no pass made."""

    def draft(self, depth: int, step: int) -> None:
        """Start the pass that makes draft number `step` of this window."""

    def confidence(self, step: int) -> float:
        """How sure that draft is; waits for it."""

    def verify(self, width: int) -> None:
        """Start the verification of so many drafts. The next window may be begun behind it."""

    def collect(self) -> tuple[list[int], list[float]]:
        """Wait for the verification: the tokens that the window yields, and how sure its drafts were."""

    @property
    def inexact(self) -> str | None:
        """Why a token's bits may depend on how many run with it; None where they do not."""

    @property
    def window_seconds(self) -> float | None:
        """What the last window took, where it had the machine for itself."""

    @property
    def cache_bytes(self) -> int:
        """Keys and values of the text."""


@dataclass
class Window:
    """Drafts that one verification judges."""

    drafter: Drafter | None = None  # None: a plain step
    drafted: int = 0
    limit: int = 0  # drafts that there may be
    grows: bool = False  # more may be drafted than were when it was begun
    launched: bool = False  # its verification is on the way


class Drafter(Protocol):
    """One source of drafts, in the two steps that let a device work while the host waits."""

    record: TrackRecord
    depth: int  # of the passes that it costs, or what drafts in their place

    def start(self, lane: Lane, most: int) -> Window | None:
        """Begin a window of at most so many drafts, without waiting for anything; None where nothing is drafted."""

    def finish(self, lane: Lane, window: Window) -> None:
        """Draft on while it pays."""


class StepDrafter:
    """A draft a step: by those layers of the model that its plan keeps at one depth, or by a learned head."""

    def __init__(self, record: TrackRecord) -> None:
        self.record = record
        self.depth = record.depth
        self.begun = 0  # drafts of the next window that are on the way already

    def start(self, lane: Lane, most: int) -> Window | None:
        count = min(self.record.window(), most)
        if count == 0:
            return None
        window = Window(self, self.begun, limit=most if count > 1 else 1, grows=True)
        self.begun = 0
        while window.drafted < min(count, lane.at_once):
            self._draft(lane, window)
        return window

    def finish(self, lane: Lane, window: Window) -> None:
        """The draft's own confidence ends a window earlier or later than the average would.

        It is read while the next draft runs where the lane lags, so that the device never waits for the host; such a
        window has one draft more than it wanted, which is verified all the same.
        """
        sure = 1.0
        for step in range(window.limit):
            if step >= window.drafted:
                self._draft(lane, window)
            known = step - lane.lag
            if known >= 0 and step + 1 < window.limit:
                sure *= self.record.likelihood(lane.confidence(known))
                if not self.record.goes_on(sure * self.record.acceptance**lane.lag):
                    break

    def _draft(self, lane: Lane, window: Window) -> None:
        lane.draft(self.depth, window.drafted)
        window.drafted += 1


class LookupDrafter:
    """What followed the same words before: it costs no pass."""

    depth = LOOKUP

    def __init__(self, record: TrackRecord, text: Lookup) -> None:
        self.record = record
        self.text = text

    def start(self, lane: Lane, most: int) -> Window | None:
        found = self.text.after(most) if most > 0 else []
        drafts = found[: self.record.window()] if found else []
        if not drafts:
            return None
        lane.offer(drafts)
        return Window(self, len(drafts), limit=len(drafts))

    def finish(self, lane: Lane, window: Window) -> None:
        pass
