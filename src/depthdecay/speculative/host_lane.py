"""Runs the windows of one text pass by pass, with any runner: on CPUs, without graphs, and for any sampling."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch

from depthdecay.cpu.threads import one_torch_thread
from depthdecay.engine.sampling import Sampler, pick_tokens
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import PLAIN, Ask, Part, Runner, Said
from depthdecay.speculative.accept import count_right
from depthdecay.speculative.compiled_head import CompiledHead
from depthdecay.speculative.drafters import Done
from depthdecay.speculative.expected_gain import LEARNED, Pace, TrackRecord
from depthdecay.speculative.head_text import PlacedHead
from depthdecay.speculative.short_head import ShortHead


class HostLane:
    """A `Lane` whose passes the host waits for. Drafts and verifications share one KV cache.

    Drafts write keys and values only in the layers that they run. The verification starts at the last verified token
    and writes all layers, so the cache is complete after it.
    """

    at_once = 0
    lag = 0
    runs_ahead = False

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        sampler: Sampler,
        short_head: ShortHead | None,
        draft_head: PlacedHead | None,
        pace: Pace,
        prompt_tokens: int,
    ) -> None:
        """`plan`: its layers draft. `draft_head`: may draft as well.

        `prompt_tokens`: the number of tokens before T_0.
        """
        self.runner = runner
        self.plan = plan
        self.sampler = sampler
        # A shortened LM head serves greedy drafts only: sampling needs the whole vocabulary.
        self.short_head = short_head if sampler.is_plain_greedy else None
        self.draft_head = draft_head
        self.pace = pace
        self.prompt_tokens = prompt_tokens
        self.window_seconds: float | None = None
        self.drafts: list[int] = []
        self.confidences: list[float] = []
        self.said: list[int] = []
        self._begun: float | None = None
        self._drafting = 0.0  # seconds of this window's drafts

    @property
    def cache_bytes(self) -> int:
        return self.runner.cache_bytes + (0 if self.draft_head is None else self.head_text.cache_bytes)

    @property
    def inexact(self) -> str | None:
        return self.runner.inexact

    def read(self, text: Sequence[int]) -> torch.Tensor:
        self.length = len(text)
        said = self._full_pass(Part(0, 0, text, self.plan.num_layers, self.plan))
        self._text = text
        return said.logits

    def begin(self, token: int) -> None:
        self.last = token
        if self.draft_head is not None:
            first = self._first_layers if self.draft_head.head.shape.first_layers else None
            self.head_text = self.draft_head.text(first)
            self.head_text.verified([*self._text[1:], token], self.states)
            self.head_text.read()

    def _full_pass(self, part: Part) -> Said:
        said = self.runner.run([part], PLAIN if self.draft_head is None else Ask(states=self.draft_head.states))
        self.states = said.states
        return said

    def _first_layers(self, token: int, position: int) -> torch.Tensor:
        """The output of the layers that a draft head builds on, for a token after the verified ones."""
        assert self.draft_head is not None
        count = self.draft_head.head.shape.first_layers
        part = Part(0, position, [token], count, self.draft_head.first_layers, wanted=0)
        return self.runner.run([part], Ask(states=(count - 1,), logits=False)).states[count - 1]

    @property
    def _index(self) -> int:
        """Token index of the first token of this window."""
        return self.length + 1 - self.prompt_tokens

    def offer(self, drafts: Sequence[int]) -> None:
        self._begun = time.perf_counter()
        self.drafts = list(drafts)

    def draft(self, depth: int, step: int) -> None:
        with self._between_passes():
            self._draft(depth, step)

    def _between_passes(self) -> contextlib.AbstractContextManager[None]:
        """Where all passes of a window are compiled calls, torch's own threads would only get in their way."""
        return one_torch_thread() if isinstance(self.draft_head, CompiledHead) else contextlib.nullcontext()

    def _draft(self, depth: int, step: int) -> None:
        if depth == LEARNED and step == 0:
            self.head_text.catch_up()  # not timed: after a pause there is much to read, which says nothing about drafts
        started = time.perf_counter()
        if step == 0:
            self._begun = started
        if depth == LEARNED:
            assert self.draft_head is not None
            logits = self.head_text.draft(self.drafts)
            ids: torch.Tensor | None = self.draft_head.head.vocabulary
        else:
            token = self.drafts[-1] if self.drafts else self.last
            part = Part(0, self.length + step, [token], depth, self.plan)
            said = self.runner.run([part], Ask(short=self.short_head))
            logits, ids = said.logits, said.ids
        if ids is None or not self.sampler.is_plain_greedy:
            if ids is not None and self.draft_head is not None:  # the sampler needs logits over the whole vocabulary
                logits = self.draft_head.over_vocabulary(logits)
            picked = draft = pick_tokens([self.sampler], [self._index + step], logits, [self.drafts])[0]
        else:
            picked = int(logits[0].argmax())
            draft = int(ids[picked])
        self.drafts.append(draft)
        self.confidences.append(float(logits[0].float().softmax(-1)[picked]))
        self._drafting += time.perf_counter() - started
        self._depth = depth

    def whole_window(self, record: TrackRecord, limit: int) -> Done | None:
        return None

    def confidence(self, step: int) -> float:
        return self.confidences[step]

    def verify(self, width: int) -> None:
        with self._between_passes():
            self._verify()

    def _verify(self) -> None:
        started = time.perf_counter()
        tokens = [self.last, *self.drafts]
        part = Part(0, self.length, tokens, self.plan.num_layers, self.plan, wanted=len(tokens))
        logits = self._full_pass(part).logits
        indices = [self._index + place for place in range(len(tokens))]
        ahead = [self.drafts[:place] for place in range(len(tokens))]  # correct up to the first rejected draft
        self.said = pick_tokens([self.sampler] * len(tokens), indices, logits, ahead)
        ended = time.perf_counter()
        self.pace.saw_verification(len(tokens), ended - started)
        if self._drafting:
            self.pace.saw_draft(self._depth, self._drafting / len(self.drafts))
        self.window_seconds = ended - (started if self._begun is None else self._begun)

    def collect(self) -> tuple[list[int], list[float]]:
        kept = self.said[: count_right(self.drafts, self.said) + 1]
        confidences = self.confidences
        self.length += len(kept)
        self.last = kept[-1]
        if self.draft_head is not None:
            self.head_text.verified(kept, self.states)
        self.drafts, self.confidences, self._drafting, self._begun = [], [], 0.0, None
        return kept, confidences
