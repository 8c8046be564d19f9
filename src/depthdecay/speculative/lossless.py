"""Lossless decoding: drafts are cheap, and the full model verifies several at once and keeps those that match.

One text, window by window: begin, draft, verify, accept. A `Drafter` decides what to draft, a `Lane` where passes run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from depthdecay.engine.result import Result
from depthdecay.engine.sampling import Sampler, pick_tokens
from depthdecay.errors import NotCapturable
from depthdecay.speculative.drafter_choice import Drafting
from depthdecay.speculative.drafters import Lane, LookupDrafter, StepDrafter, Window
from depthdecay.speculative.expected_gain import LOOKUP
from depthdecay.speculative.prompt_lookup import Lookup
from depthdecay.speculative.short_head import ShortHead

# If lookup finds something in at most this share of windows, the next draft is started before its result is known.
# Such a draft is wasted if lookup finds something. Without it the device would wait for the host: for a 1.5B model on
# an H200, about 0.4 of the time of a draft.
MOST_FINDS = 0.3


class LosslessRun:
    """One answer, from its prompt to its end. Its costs are added to `result`."""

    def __init__(
        self,
        lane: Lane,
        prompt: Sequence[int],
        sampler: Sampler,
        drafting: Drafting,
        result: Result,
        *,
        new_tokens: int,
        window: int,
        lookup: int,
        short_head: ShortHead | None,
        other_lane: Callable[[], Lane],
    ) -> None:
        """`window`: the most drafts. `lookup`: see `Lookup`; 0 is off. `other_lane`: the fallback without graphs."""
        self.lane = lane
        self.text = list(prompt)
        self.sampler = sampler
        self.drafting = drafting
        self.result = result
        self.new_tokens = new_tokens
        self.longest = window
        self.short_head = short_head
        self.other_lane = other_lane
        self.before = LookupDrafter(drafting.lookup, Lookup(prompt, lookup)) if lookup else None
        self.answered = 0
        self.is_active = True  # until it is ended from outside
        self.sources: list[int | None] = []  # of the last window's tokens, as in Result.draft_depths
        self._ahead: Window | None = None  # a plain step that is already running, after the one being waited for
        self._begun: StepDrafter | None = None  # its first draft is already running, after a verification

    @property
    def goes_on(self) -> bool:
        return self.is_active and self.answered < self.new_tokens

    def windows(self) -> Iterator[list[int]]:
        """The tokens of each window. The first window is the token from the prefill."""
        with torch.no_grad():
            tokens = self._read()
            window = self._begun_ahead()
        yield tokens
        while self.goes_on:
            with torch.no_grad():
                try:
                    window = self.begin() if window is None else window
                    self.draft(window)
                    self.verify(window)
                    tokens = self.accept(window)
                except NotCapturable:
                    tokens = self._change_lane()
                window = self._begun_ahead()
            yield tokens
        self._drop_begun()

    def begin(self) -> Window:
        """Choose a drafter, and start what can run without waiting."""
        if self._ahead is not None:
            window, self._ahead = self._ahead, None
            self.drafting.choose(self.answered).window()
        else:
            window = self._looked_up() or self._step_by_step() or Window()
            if self.lane.runs_ahead and not window.grows:
                self._launch(window)
        if window.drafter is None and self.lane.runs_ahead:
            self._go_ahead()
        return window

    def draft(self, window: Window) -> None:
        if window.drafter is not None and window.grows:
            window.drafter.finish(self.lane, window)

    def verify(self, window: Window) -> None:
        if not window.launched:
            self._launch(window)
            if self.lane.runs_ahead:
                self._begin_next(window)

    def accept(self, window: Window) -> list[int]:
        """Wait for the verification and take its tokens; its drafter's record is updated."""
        tokens, confidences = self.lane.collect()
        self._learn(window, len(tokens) - 1, confidences)
        return self._take(tokens)

    def _read(self) -> list[int]:
        if self.short_head is not None:
            self.short_head.start(self.text)
        logits = self.lane.read(self.text)
        self.result.layer_passes += self.result.num_layers  # the first token comes from the prefill
        self.sources = [None]
        (token,) = pick_tokens([self.sampler], [0], logits)
        self.lane.begin(token)
        return self._take([token])

    def _take(self, tokens: list[int]) -> list[int]:
        tokens = tokens[: self.new_tokens - self.answered]
        if self.sampler.processors:  # otherwise nothing reads the history, and writing it would synchronize
            for place, token in enumerate(tokens):
                self.sampler.record(token, self.answered + place)
        self.text += tokens
        self.answered += len(tokens)
        if self.before is not None:
            self.before.text.add(tokens)
        if self.short_head is not None:
            self.short_head.add(tokens)
        return tokens

    @property
    def _most(self) -> int:
        """The number of drafts that could still be used."""
        return min(self.new_tokens - self.answered - 1, self.longest)

    def _looked_up(self) -> Window | None:
        if self.before is None:
            return None
        self.drafting.found(self.answered)
        window = self.before.start(self.lane, self._most)
        self.drafting.finds.saw(1, int(window is not None))
        if window is not None:
            self._drop_begun()
        return window

    def _step_by_step(self) -> Window | None:
        if self._most < 1 and self._begun is None:
            return None
        drafter = StepDrafter(self.drafting.choose(self.answered)) if self._begun is None else self._begun
        window = drafter.start(self.lane, self._most)
        if window is None:
            self._drop_begun()
        self._begun = None
        return window

    def _launch(self, window: Window) -> None:
        self.lane.verify(window.drafted)
        window.launched = True

    def _begun_ahead(self) -> Window | None:
        """Start the next window before this one's tokens are returned, to keep the device busy."""
        try:
            return self.begin() if self.lane.runs_ahead and self.goes_on else None
        except NotCapturable:
            self._change_lane()
            return None

    def _begin_next(self, window: Window) -> None:
        """Start the next window's first draft right after a verification, so the device does not wait for the host.

        The draft follows whatever the verification accepts. It is wasted if lookup finds something, or if the answer
        ends.
        """
        if self._most <= window.drafted + 1 or (self.before and self.drafting.finds.value > MOST_FINDS):
            return
        record = self.drafting.choose(self.answered)
        if record.pays:
            self._begun = StepDrafter(record)
            self.lane.draft(record.depth, 0)
            self._begun.begun = 1

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self.result.layer_passes += self._begun.record.layers
            self._begun = None

    def _go_ahead(self) -> None:
        """While drafting pauses, start one more plain step before this one's token is known, unless lookup matches."""
        finds = self.before is not None and self.before.text.after(1)
        if not finds and self._most >= 1 and self.drafting.pauses:
            self._ahead = Window()
            self._launch(self._ahead)

    def _learn(self, window: Window, accepted: int, confidences: Sequence[float]) -> None:
        """Account for a window, and update its drafter's record."""
        result, drafter = self.result, window.drafter
        result.verifications += 1
        result.layer_passes += result.num_layers
        self.sources = [None if drafter is None else drafter.depth] * accepted + [None]
        if drafter is None:
            return
        result.layer_passes += window.drafted * drafter.record.layers
        result.drafted += window.drafted - window.left_out
        result.accepted += accepted
        cost = self.drafting.pace.in_steps(self.lane.window_seconds)
        judged = confidences[: window.drafted] if drafter.depth != LOOKUP else ()
        drafter.record.saw(window.drafted, accepted + window.missed, judged, cost, window.missed)

    def _change_lane(self) -> list[int]:
        """A graph could not be captured: prefill the text so far again, and continue without graphs."""
        self.lane = self.other_lane()
        self._ahead = self._begun = None
        self.lane.read(self.text[:-1])
        self.lane.begin(self.text[-1])
        return []
