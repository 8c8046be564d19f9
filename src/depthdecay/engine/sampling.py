"""Sampling: transformers' own logits processors, and noise keyed by (seed, sequence, token index).

Rows may be at different positions, and drafts are sampled like the tokens they predict. Since noise is keyed by a
token's index, a draft, its verification and plain decoding draw the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from depthdecay.cpu.threads import one_torch_thread
from depthdecay.cuda.kernels.keyed_pick import Seen
from depthdecay.engine.keyed_draw import Draw, are_on_gpu
from depthdecay.library_internals import logits_processors
from depthdecay.runners.keyed_noise import gumbel_noise, step_keys

_FEW_SCORES = 2**20  # that one thread picks from


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The greedy choice of each row. Uses numpy on a CPU, since torch would wake threads that then get in the way."""
    if scores.device.type == "cpu" and not scores.requires_grad:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def few_threads(scores: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """On a CPU, pick from the scores of a few rows with one thread of torch."""
    is_small = scores.device.type == "cpu" and scores.numel() <= _FEW_SCORES
    return one_torch_thread() if is_small else contextlib.nullcontext()


class LogitBias(LogitsProcessor):  # type: ignore[misc]
    """Adds a bias to the scores of some tokens."""

    def __init__(self, biases: Mapping[int, float], device: torch.device) -> None:
        self.biases = tuple(sorted(biases.items()))
        self.tokens = torch.tensor([token for token, _ in self.biases], device=device)
        self.values = torch.tensor([bias for _, bias in self.biases], device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(1, self.tokens, self.values.expand(len(scores), -1).contiguous())


class AnswerPenalties(LogitsProcessor):  # type: ignore[misc]
    """Lowers the scores of tokens in the answer, once and per occurrence; the prompt does not count."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self.prompt_length = prompt_length
        self.frequency = frequency
        self.presence = presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[:, self.prompt_length :]
        if answer.shape[1] == 0:
            return scores
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class ScoreChanges:
    """Settings of OpenAI's API that transformers lacks, with OpenAI's meaning."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def processors(self, prompt_length: int, device: torch.device) -> list[LogitsProcessor]:
        """The processors for answers after prompts of this length; empty if nothing is set."""
        made: list[LogitsProcessor] = []
        if self.logit_bias:
            made.append(LogitBias(self.logit_bias, device))
        if self.frequency_penalty or self.presence_penalty:
            made.append(AnswerPenalties(prompt_length, self.frequency_penalty, self.presence_penalty))
        return made


class Sampler:
    """Turns a step's logits into tokens on the device, without waiting for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: Any,
        prompt_ids: torch.Tensor,
        *,
        logits_processor: Sequence[Any] | None,
        keys: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """`logits_processor`: the caller's own, and `ScoreChanges`."""
        device = prompt_ids.device
        batch, prompt_length = prompt_ids.shape
        own: list[Any] = []
        for given in logits_processor or ():
            own += given.processors(prompt_length, device) if isinstance(given, ScoreChanges) else [given]
        self.processors: LogitsProcessorList = logits_processors(model, generation_config, prompt_ids, own)
        self.is_sampling = bool(generation_config.do_sample)
        self.keys = step_keys(keys, max_new_tokens, device) if self.is_sampling else None
        self.prompt_length = prompt_length
        self.history = torch.zeros((batch, prompt_length + max_new_tokens), dtype=torch.long, device=device)
        self.history[:, :prompt_length] = prompt_ids

    @property
    def is_plain_greedy(self) -> bool:
        """Plain argmax, which a captured graph does by itself."""
        return not self.is_sampling and not self.processors

    @functools.cached_property
    def draw(self) -> Draw | None:
        """How our own kernels draw with these settings, if they can."""
        return Draw.of(self.processors) if self.is_sampling else None

    def pick(self, logits: torch.Tensor, index: int, ahead: Sequence[int] = ()) -> torch.Tensor:
        """The tokens T_index of all rows.

        `ahead`: for a single row, tokens between those on record and T_index, such as drafts.
        """
        with few_threads(logits):
            if self.draw is not None and are_on_gpu(logits):
                return self._drawn(self.draw, logits, self._text(index, ahead), index)[0]
            return self._picked(self.scores(logits, index, ahead), index)

    def pick_scored(self, logits: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same tokens with their processed scores; each processor, which may count its calls, is called once."""
        text = self.text(index)
        if self.draw is None or not are_on_gpu(logits):
            scores = logits.to(torch.float32)
            scores = processed(self.processors, text, scores) if self.processors else scores
            return self._picked(scores, index), scores
        tokens, scores = self._drawn(self.draw, logits, text, index)
        return tokens, processed(self.processors[len(self.draw.before) :], text, scores.to(torch.float32))

    def _drawn(
        self, draw: Draw, logits: torch.Tensor, text: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens after `text` (rows, tokens), and the scores that our kernels drew them from."""
        scores = before_draw(draw, text, logits)
        seen = None
        if draw.penalises:
            has = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            seen = Seen(has.scatter_(1, text, True))
        return draw.pick(scores, self.noise_keys(index), seen=seen), scores

    def _picked(self, scores: torch.Tensor, index: int) -> torch.Tensor:
        if self.keys is None:
            return likeliest(scores)
        return (scores + gumbel_noise(self.noise_keys(index), scores.shape[-1])).argmax(dim=-1)

    def scores(self, logits: torch.Tensor, index: int, ahead: Sequence[int] = ()) -> torch.Tensor:
        """The processed scores of T_index."""
        scores = logits.to(torch.float32)
        return processed(self.processors, self._text(index, ahead), scores) if self.processors else scores

    def _text(self, index: int, ahead: Sequence[int]) -> torch.Tensor:
        text = self.text(index - len(ahead))
        return torch.cat([text, torch.tensor([list(ahead)], device=text.device)], dim=1) if ahead else text

    def noise_keys(self, index: int) -> torch.Tensor:
        """The noise keys of all rows at T_index; positions after the last token are sampled and discarded."""
        assert self.keys is not None
        return self.keys[:, min(index, self.keys.shape[1] - 1)]

    def record(self, tokens: torch.Tensor | int, index: int) -> None:
        """Make the tokens T_index visible to processors and criteria."""
        if index < self.history.shape[1] - self.prompt_length:
            self.history[:, self.prompt_length + index] = tokens

    def text(self, index: int) -> torch.Tensor:
        """Prompt and the tokens before T_index, as processors and stopping criteria expect them."""
        return self.history[:, : self.prompt_length + index]


# Processors that only look at the scores; all others read the row's text.
_BLIND = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "LogitBias": "biases",
}


def alike(sampler: Sampler) -> tuple[Any, ...] | None:
    """What two rows must have in common to be sampled together; None if a processor reads the row's text."""
    settings = settings_alike(sampler.processors)
    return None if settings is None else (sampler.is_sampling, *settings)


def settings_alike(processors: Iterable[Any]) -> tuple[Any, ...] | None:
    """The settings that distinguish processors that only look at the scores; None if one reads the text."""
    settings = []
    for processor in processors:
        name = type(processor).__name__
        if name not in _BLIND:
            return None
        settings.append((name, getattr(processor, _BLIND[name])))
    return tuple(settings)


def processed(
    processors: Sequence[Any], text: torch.Tensor, scores: torch.Tensor, has: torch.Tensor | None = None
) -> torch.Tensor:
    """The processed scores. `has`: per row, which tokens its text contains, for the repetition penalty.

    On CUDA never a single row: torch uses a different kernel to sum along one row than along several, and top-p cuts
    where a sum passes a bound.
    """
    alone = scores.is_cuda and len(scores) == 1
    if alone:
        scores, text = scores.repeat(2, 1), text.repeat(2, 1)
        has = None if has is None else has.repeat(2, 1)
    scores = in_turn(processors, text, scores, has)
    return scores[:1] if alone else scores


def in_turn(
    processors: Sequence[Any], text: torch.Tensor, scores: torch.Tensor, has: torch.Tensor | None = None
) -> torch.Tensor:
    """The same without that care, for processors that change each score by itself."""
    for processor in processors:
        if has is not None and hasattr(processor, "penalty"):
            penalty = processor.penalty
            scores = torch.where(has, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        else:
            scores = processor(text, scores)
    return scores


def before_draw(draw: Draw, text: torch.Tensor, logits: torch.Tensor, has: torch.Tensor | None = None) -> torch.Tensor:
    """The scores that a draw picks from: the logits themselves, if its kernels do everything."""
    return in_turn(draw.before, text, logits.to(torch.float32), has) if draw.before else logits


def pick_tokens(
    samplers: Sequence[Sampler],
    indices: Sequence[int],
    logits: torch.Tensor,
    ahead: Sequence[Sequence[int]] | None = None,
    *,
    together: int | None = None,
) -> list[int]:
    """T_index of each row, as its own sampler would pick it; rows with equal settings are sampled together.

    `ahead`: per row, tokens between those on record and T_index. Nothing is recorded here.
    `together`: always process this many rows at once, since CUDA's sums along a row depend on the number of rows.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        kind = alike(sampler)
        groups[("alone", row) if kind is None else kind].append(row)
    tokens = []
    for rows in groups.values():
        own, first = rows_of(logits, rows), rows[0]
        if len(rows) == 1 and (together is None or alike(samplers[first]) is None):
            tokens.append(samplers[first].pick(own, indices[first], () if ahead is None else ahead[first]))
        else:
            tokens.append(_picked([samplers[row] for row in rows], [indices[row] for row in rows], own, together))
    order = [row for rows in groups.values() for row in rows]
    picked = [0] * len(samplers)
    for row, token in zip(order, torch.cat(tokens).tolist(), strict=True):  # the only wait for the device
        picked[row] = token
    return picked


def _picked(
    samplers: Sequence[Sampler], indices: Sequence[int], logits: torch.Tensor, together: int | None = None
) -> torch.Tensor:
    with few_threads(logits):
        first = samplers[0]
        draw = first.draw if are_on_gpu(logits) else None
        if draw is not None:
            return draw.pick(before_draw(draw, first.history[:0], logits), _keys(samplers, indices))
        scores = logits.to(torch.float32)
        if first.processors:
            scores = _processed_alike(first, scores, together)
        if not first.is_sampling:
            return likeliest(scores)
        keys = _keys(samplers, indices)
        return (scores + gumbel_noise(keys, scores.shape[-1])).argmax(dim=-1)


def _keys(samplers: Sequence[Sampler], indices: Sequence[int]) -> torch.Tensor:
    return torch.cat([sampler.noise_keys(index) for sampler, index in zip(samplers, indices, strict=True)])


def _processed_alike(sampler: Sampler, scores: torch.Tensor, together: int | None) -> torch.Tensor:
    """Scores processed by a sampler that reads no text, in groups of `together` rows if given."""
    text = sampler.history[:0]
    if together is None:
        return processed(sampler.processors, text, scores)
    rows, tokens = scores.shape
    # Every row starts 16-byte aligned; otherwise the order of sums would depend on where it starts.
    filled = functional.pad(scores, (0, -tokens % 16, 0, -rows % together), value=float("-inf"))
    filled[rows:, 0] = 0.0  # dummy rows, which still need a likeliest token
    groups = [processed(sampler.processors, text, group) for group in filled.split(together)]
    return torch.cat(groups)[:rows, :tokens]


def rows_of(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Select rows without waiting for the device: copying an index from pageable memory would synchronize."""
    if len(rows) == len(logits):
        return logits
    index = torch.tensor(rows)
    if logits.is_cuda:
        index = index.pin_memory().to(logits.device, non_blocking=True)
    return logits.index_select(0, index)
