"""Sources of drafts: some layers of the model, a learned head, or the preceding text. A new one needs two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from depthdecay.speculative.expected_gain import LOOKUP, TrackRecord
from depthdecay.speculative.prompt_lookup import Lookup


class Lane(Protocol):
    """Where the windows of one text run: passes are started, and their results collected."""

    at_once: int  # drafts to start before waiting for anything
    lag: int  # a draft's confidence is read while this many later drafts run
    runs_ahead: bool  # whether the next window may start before the last one's tokens are returned

    def read(self, text: Sequence[int]) -> torch.Tensor:
        """Prefill a text; returns the logits after it, (1, vocabulary)."""

    def begin(self, token: int) -> None:
        """Continue the prefilled text with this token."""

    def offer(self, drafts: Sequence[int]) -> None:
        """Set drafts that come without a pass."""

    def draft(self, depth: int, step: int) -> None:
        """Start the pass for draft number `step` of this window."""

    def confidence(self, step: int) -> float:
        """The confidence of that draft; waits for it."""

    def whole_window(self, record: TrackRecord, limit: int) -> Done | None:
        """Draft up to so many tokens and verify them in one go; None if this lane cannot."""

    def verify(self, width: int) -> None:
        """Start the verification of so many drafts. The next window may be started right after it."""

    def collect(self) -> tuple[list[int], list[float]]:
        """Wait for the verification; returns the tokens that the window yields, and its drafts' confidences."""

    @property
    def inexact(self) -> str | None:
        """Why a token's result may depend on how many run with it; None if it does not."""

    @property
    def window_seconds(self) -> float | None:
        """The duration of the last window, if it did not overlap with another."""

    @property
    def cache_bytes(self) -> int:
        """Size of the text's KV cache."""


@dataclass(frozen=True)
class Done:
    """What a lane has drafted by itself."""

    drafted: int
    left_out: int = 0  # of these, not verified, since that would not have paid
    missed: int = 0  # of those, right all the same


@dataclass
class Window:
    """Drafts that are verified together."""

    drafter: Drafter | None = None  # None: a plain step
    drafted: int = 0
    limit: int = 0  # the most drafts it may have
    grows: bool = False  # more may be drafted than at its start
    launched: bool = False  # its verification has been started
    left_out: int = 0  # drafts that are not verified, since that would not pay
    missed: int = 0  # of those, right all the same


class Drafter(Protocol):
    """A source of drafts, in two steps, so that the device works while the host waits."""

    record: TrackRecord
    depth: int  # of its passes; or LOOKUP or LEARNED

    def start(self, lane: Lane, most: int) -> Window | None:
        """Start a window of at most so many drafts without waiting for anything; None if nothing is drafted."""

    def finish(self, lane: Lane, window: Window) -> None:
        """Keep drafting while it pays."""


class StepDrafter:
    """One draft per pass: with the layers that the plan keeps at one depth, or with a learned head."""

    def __init__(self, record: TrackRecord) -> None:
        self.record = record
        self.depth = record.depth
        self.begun = 0  # drafts of the next window that are already running

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
        """Let the drafts' confidence end the window earlier or later than the average acceptance would.

        If the lane lags, a confidence is read while the next draft runs, so the device never waits for the host. Such
        a window has one draft too many, which is verified all the same.
        """
        done = lane.whole_window(self.record, window.limit) if window.drafted == 0 else None
        if done is not None:
            window.drafted, window.left_out, window.missed = done.drafted, done.left_out, done.missed
            window.launched = True
            return
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
    """Drafts from prompt lookup, which cost no pass."""

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
