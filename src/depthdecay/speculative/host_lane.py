"""Windows of one text pass by pass, by any way to run them: on CPUs, without graphs, and for every kind of sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from depthdecay.engine.sampling import Sampler, pick_tokens
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import Ask, Part, Runner
from depthdecay.speculative.accept import count_right
from depthdecay.speculative.expected_gain import Pace
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
        self, runner: Runner, plan: Plan, sampler: Sampler, short_head: ShortHead | None, pace: Pace, prompt_tokens: int
    ) -> None:
        """`plan`: by whose layers drafts are made. `prompt_tokens`: what comes before T_0."""
        self.runner = runner
        self.plan = plan
        self.sampler = sampler
        # Other choices than the likeliest token look at all of them.
        self.short_head = short_head if sampler.is_plain_greedy else None
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
        return self.runner.cache_bytes

    @property
    def inexact(self) -> str | None:
        return self.runner.inexact

    def read(self, text: Sequence[int]) -> torch.Tensor:
        self.length = len(text)
        return self.runner.run([Part(0, 0, text, self.plan.num_layers, self.plan)]).logits

    def begin(self, token: int) -> None:
        self.last = token

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
        token = self.drafts[-1] if self.drafts else self.last
        part = Part(0, self.length + step, [token], depth, self.plan)
        said = self.runner.run([part], Ask(short=self.short_head))
        if said.ids is None:
            picked = draft = pick_tokens([self.sampler], [self._index + step], said.logits, [self.drafts])[0]
        else:
            picked = int(said.logits[0].argmax())
            draft = int(said.ids[picked])
        self.drafts.append(draft)
        self.confidences.append(float(said.logits[0].float().softmax(-1)[picked]))
        self._drafting += time.perf_counter() - started
        self._depth = depth

    def confidence(self, step: int) -> float:
        return self.confidences[step]

    def verify(self, width: int) -> None:
        started = time.perf_counter()
        tokens = [self.last, *self.drafts]
        part = Part(0, self.length, tokens, self.plan.num_layers, self.plan, wanted=len(tokens))
        logits = self.runner.run([part]).logits
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
        self.drafts, self.confidences, self._drafting, self._begun = [], [], 0.0, None
        return kept, confidences
