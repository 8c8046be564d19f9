"""Writes many texts at once: as many rows as fit in memory, decoded in one batch until most of them have ended."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from depthdecay.engine.engine import Engine
from depthdecay.engine.request import PLAIN_GREEDY
from depthdecay.errors import DepthDecayError
from depthdecay.model.devices import free_bytes
from depthdecay.runners.keyed_noise import gumbel_noise, sequence_keys, step_keys

MOST_ROWS = {"cuda": 1024}
MOST_ROWS_ELSEWHERE = 64
# At this share of ended rows a batch stops, and unfinished answers are kept as they are: further steps would cost as
# much as for all rows.
ENDED_IS_ENOUGH = 0.8
_SHARE_OF_MEMORY = 0.4
_BYTES_A_SCORE = 16  # 32-bit logits and copies of them
_LIKELIEST = 50


@dataclass(frozen=True)
class Written:
    """How many tokens were written, up to the end of each row, and how long it took."""

    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Written) -> Written:
        return Written(self.tokens + other.tokens, self.seconds + other.seconds)

    def __sub__(self, other: Written) -> Written:
        return Written(self.tokens - other.tokens, self.seconds - other.seconds)

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.inf


class TextBatches:
    """Batches of one engine, preferably without a tokenizer, so that text is not decoded in vain."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.vocabulary = engine.stack.model.get_input_embeddings().weight.shape[0]
        self._free = free_bytes(engine.device)  # before the batches themselves take memory
        self.written = Written()

    def rows(self, positions: int) -> int:
        """How many texts of this length fit into one batch: a power of two."""
        kept = sum(shape.nbytes for shape in self.engine.stack.kept_shapes())
        room = _SHARE_OF_MEMORY * self._free / (positions * kept + self.vocabulary * _BYTES_A_SCORE)
        if room < 1:
            raise DepthDecayError(f"the free memory is too small for one text of {positions} tokens")
        most = MOST_ROWS.get(self.engine.device.type, MOST_ROWS_ELSEWHERE)
        return most if room >= most else int(2 ** math.floor(math.log2(room)))

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        ends: Collection[int],
        rows: int,
        temperature: float | None = None,
        seed: int = 0,
        until: float = math.inf,
    ) -> list[list[int]]:
        """The full model's answers to each prompt: greedy, or sampled at a temperature.

        At the time `until` (of `time.monotonic`) all rows stop, with at least one token each.
        """
        started = time.monotonic()
        given = [list(prompt) for prompt in prompts]
        if self.engine.uses_graphs:  # one batch size, so one set of graphs
            given += [given[-1]] * (rows - len(given))
        drawing = [] if temperature is None else [DrawnFromLikeliest(given, new_tokens, temperature, seed, self.engine)]
        results = self.engine.generate(
            given,
            new_tokens,
            mode="full",
            stop=[],
            eos_token_id=sorted(ends) or -1,
            logits_processor=drawing,
            stopping_criteria=[MostHaveEnded(len(given), ends, self.engine.device), TimeIsOver(until)],
            **PLAIN_GREEDY,
        )
        texts = [result.token_ids for result in results[: len(prompts)]]
        self.written += Written(sum(map(len, texts)), time.monotonic() - started)
        return texts


class DrawnFromLikeliest:
    """A logits processor that samples from the top 50 tokens, and leaves greedy decoding only that choice.

    The engine's own sampling generates noise for the whole vocabulary, so that drafts sample the same, and top_p sorts
    it. For 256 rows, either takes longer than the pass itself.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int, engine: Engine
    ) -> None:
        self.keys = step_keys(sequence_keys(seed, prompts), new_tokens, engine.device)
        self.prompt_length = max(map(len, prompts))
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        likeliest = scores.topk(min(_LIKELIEST, scores.shape[-1]))
        noise = gumbel_noise(self.keys[:, input_ids.shape[1] - self.prompt_length], likeliest.values.shape[-1])
        place = (likeliest.values / self.temperature + noise).argmax(-1, keepdim=True)
        return scores.scatter(1, likeliest.indices.gather(1, place), math.inf)


class MostHaveEnded:
    """A stopping criterion for a whole batch. It checks tokens on their device, and copies nothing."""

    def __init__(self, rows: int, ends: Collection[int], device: torch.device) -> None:
        self.ends = torch.tensor(sorted(ends), dtype=torch.long, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.enough = math.ceil(ENDED_IS_ENOUGH * rows)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.ended |= torch.isin(input_ids[:, -1], self.ends)
        return (self.ended.sum() >= self.enough).expand(len(input_ids))


class TimeIsOver:
    """A stopping criterion: at a time of `time.monotonic`, for a whole batch."""

    def __init__(self, until: float) -> None:
        self.until = until

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        is_over = time.monotonic() >= self.until
        return torch.full((len(input_ids),), is_over, device=input_ids.device)
