"""Windows of one text pass by pass, by any way to run them: on CPUs, without graphs, and for every kind of sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from depthdecay.engine.sampling import Sampler, pick_tokens
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import PLAIN, Ask, Part, Runner, Said
from depthdecay.speculative.accept import count_right
from depthdecay.speculative.expected_gain import LEARNED, Pace
from depthdecay.speculative.head_text import PlacedHead
from depthdecay.speculative.short_head import ShortHead


class HostLane:
    """A `Lane` whose passes the host waits for. Draft and verifier share one cache.

    Drafts write keys and values only in the layers that they run; the verification starts at the last token that is
    certain and writes all layers, so the cache is whole behind it.
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
        """`plan`: by whose layers drafts are made. `draft_head`: what may make them, too.

        `prompt_tokens`: what comes before T_0.
        """
        self.runner = runner
        self.plan = plan
        self.sampler = sampler
        # Other choices than the likeliest token look at all of them.
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
        """What the layers that a draft head builds on make of a token behind the verified ones."""
        assert self.draft_head is not None
        count = self.draft_head.head.shape.first_layers
        part = Part(0, position, [token], count, self.draft_head.first_layers, wanted=0)
        return self.runner.run([part], Ask(states=(count - 1,), logits=False)).states[count - 1]

    @property
    def _index(self) -> int:
        """Of the first token that this window is to say."""
        return self.length + 1 - self.prompt_tokens

    def offer(self, drafts: Sequence[int]) -> None:
        self._begun = time.perf_counter()
        self.drafts = list(drafts)

    def draft(self, depth: int, step: int) -> None:
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
            if ids is not None and self.draft_head is not None:  # a short output matrix serves greedy drafts alone
                logits = self.draft_head.over_vocabulary(logits)
            picked = draft = pick_tokens([self.sampler], [self._index + step], logits, [self.drafts])[0]
        else:
            picked = int(logits[0].argmax())
            draft = int(ids[picked])
        self.drafts.append(draft)
        self.confidences.append(float(logits[0].float().softmax(-1)[picked]))
        self._drafting += time.perf_counter() - started
        self._depth = depth

    def confidence(self, step: int) -> float:
        return self.confidences[step]

    def verify(self, width: int) -> None:
        started = time.perf_counter()
        tokens = [self.last, *self.drafts]
        part = Part(0, self.length, tokens, self.plan.num_layers, self.plan, wanted=len(tokens))
        logits = self._full_pass(part).logits
        indices = [self._index + place for place in range(len(tokens))]
        ahead = [self.drafts[:place] for place in range(len(tokens))]  # right as long as they are of use
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
