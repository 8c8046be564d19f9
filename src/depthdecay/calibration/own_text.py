"""Self-generated text: the model writes questions and answers them, in large batches, until there is enough.

Drafters and repairs are trained on the model's output, and few users have a million tokens of prompts. Every batch is
kept in the work folder, so that an interrupted run resumes after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from depthdecay.argument_checks import whole_number
from depthdecay.calibration.own_questions import QuestionWriter, Say, end_tokens, writing_inputs
from depthdecay.calibration.text_batches import TextBatches
from depthdecay.calibration.text_filters import NearDuplicates, before_loop
from depthdecay.calibration.work_folder import WorkFolder
from depthdecay.engine.engine import Engine
from depthdecay.errors import ArgumentError, DepthDecayError

ANSWER_TOKENS = 256
LEAST_TOKENS = 20_000  # with fewer, nothing trained on the text would generalise
_LEAST_ANSWER = 8
_QUESTION_TOKENS_ROOM = 256  # assumed length of a self-generated prompt, for the batch size
_ANSWERS_TO_A_PROMPT = 4  # of the user's: one greedy, the others sampled
_TRIES = 4  # batches of questions for one batch of answers
_FRUITLESS = 6  # batches in a row that add nothing, before giving up
_TEMPERATURE = 0.8


@dataclass(frozen=True)
class OwnText:
    """A prompt, with the chat template applied, and the full model's answer, as token ids."""

    prompt: list[int]
    answer: list[int]
    kind: str  # "own": greedy, to a self-generated question; "own sampled"; "given": to a prompt of the user's


def write_own_text(
    engine: Engine,
    tokenizer: Any,
    tokens: int,
    *,
    seed: int = 0,
    prompts: Sequence[Sequence[int]] = (),
    share_given: float = 0.3,
    answer_tokens: int = ANSWER_TOKENS,
    folder: Path | None = None,
    say: Say = lambda message: None,
    until: float = math.inf,
    latest: float | None = None,
) -> list[OwnText]:
    """Texts with `tokens` answer tokens in total, or what there is at the time `until` (of `time.monotonic`).

        engine = dd.Engine(loaded.model)  # without a tokenizer, since the text need not be decoded
        texts = write_own_text(engine, loaded.tokenizer, 2_000_000, folder=Path("plan"), until=time.monotonic() + 180)

    `prompts` are the user's, as token ids: `share_given` of the batches answer them, each a few times at most. Fewer
    than `LEAST_TOKENS`, if as many were requested, is an error. To reach them the model continues until the time
    `latest`, unless it is too slow for that: then the error is raised at once.
    """
    if not 0 <= share_given <= 1:
        raise ArgumentError(f"share_given is {share_given}; expected a number from 0 to 1", "share_given")
    tokens = whole_number("tokens", tokens, 1)
    answer_tokens = whole_number("answer_tokens", answer_tokens, _LEAST_ANSWER)
    given = [list(prompt) for prompt in prompts]
    writing = _Writing(engine, tokenizer, given, share_given, answer_tokens, seed, folder, say)
    texts = writing.kept()
    total = sum(len(text.answer) for text in texts)
    if texts:
        say(f"resuming after {total:,} tokens of an interrupted run")
    pace = _Pace(writing, min(tokens, LEAST_TOKENS), total, until if latest is None else max(until, latest))
    fruitless = 0
    while total < tokens and fruitless < _FRUITLESS and time.monotonic() < (end := pace.end(until)):
        more = writing.next_batch(end, pace.check_questions)
        texts += more
        total += sum(len(text.answer) for text in more)
        fruitless = 0 if more else fruitless + 1
        pace.check_answers(total)
        say(f"the model writes training text: {total:,} of {tokens:,} tokens, {pace.tokens_a_second:,.0f} tokens/s")
    if total < pace.least and fruitless == _FRUITLESS:
        raise DepthDecayError(
            f"the model wrote {total:,} tokens of usable text and then only repeated itself; at least "
            f"{pace.least:,} are needed; give prompts"
        )
    if total < pace.least:
        raise TooLittleTime(
            f"the model wrote {total:,} tokens of usable text in the time given; at least {pace.least:,} are needed"
        )
    return texts


class TooLittleTime(DepthDecayError):
    """The model does not write enough text in the time given."""


class _Pace:
    """Whether the minimum of text will be written in time, at the model's speed."""

    def __init__(self, writing: _Writing, least: int, before: int, latest: float) -> None:
        self.writing, self.least, self.latest = writing, least, latest
        self.before = self.total = before
        self.started = time.monotonic()

    def end(self, until: float) -> float:
        """When writing ends; later while there is less than the minimum."""
        return until if self.total >= self.least else self.latest

    @property
    def tokens_a_second(self) -> float:
        """Usable answer tokens per second, including the time for questions."""
        return (self.total - self.before) / max(time.monotonic() - self.started, 1e-9)

    def check_questions(self) -> None:
        """Before there are answers, check the speed of questions, to fail early if time will not be enough."""
        if self.total == self.before:
            self._check(self.writing.answer_tokens_a_second())

    def check_answers(self, total: int) -> None:
        self.total = total
        if total > self.before:
            self._check(self.tokens_a_second)

    def _check(self, rate: float) -> None:
        # With graphs and compilation, the initial speed says nothing about what follows.
        if self.total >= self.least or self.latest == math.inf or self.writing.batches.engine.uses_graphs:
            return
        needed = (self.least - self.total) / max(rate, 1e-9)
        left = max(0.0, self.latest - time.monotonic())
        if needed > left:
            raise TooLittleTime(
                f"at {rate:,.0f} tokens/s the model needs {_duration(needed)} more to write {self.least:,} tokens, "
                f"the minimum to train on, but has {_duration(left)}"
            )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{math.ceil(seconds / 60)} minutes"


@dataclass
class _Progress:
    """The state after a batch besides its texts, so that another process continues in the same way."""

    number: int = 0  # of batches of answers
    question_batches: int = 0
    given_batches: int = 0
    waiting: list[list[int]] = field(default_factory=list)  # questions not answered yet


class _Writing:
    """The batches of one run, in order."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        given: list[list[int]],
        share_given: float,
        answer_tokens: int,
        seed: int,
        folder: Path | None,
        say: Say,
    ) -> None:
        limit = engine.stack.context_limit()
        self.answer_tokens = answer_tokens if limit is None else min(answer_tokens, limit // 2)
        longest = None if limit is None else limit - self.answer_tokens
        self.batches = TextBatches(engine)
        self.questions = QuestionWriter(self.batches, tokenizer, longest=longest, seed=seed, folder=folder, say=say)
        self.ends = end_tokens(engine, tokenizer)
        self.answers = NearDuplicates(n=5)
        self.seed = seed
        self.share_given = share_given if given else 0.0
        self.rows = self.batches.rows(_QUESTION_TOKENS_ROOM + self.answer_tokens)
        fitting = [prompt for prompt in given if longest is None or len(prompt) <= longest]
        if len(fitting) < len(given):
            say(f"{len(given) - len(fitting)} prompts are longer than {longest} tokens and are left out")
        self.given = self._batches_of(fitting)
        self.progress = _Progress()
        inputs = {
            **writing_inputs(engine, tokenizer, seed),
            **{"given": given, "share": share_given, "answer_tokens": self.answer_tokens},
        }
        self.work = None if folder is None else WorkFolder(folder, inputs)

    def kept(self) -> list[OwnText]:
        """The texts of an interrupted run; new ones follow them."""
        texts: list[OwnText] = []
        while self.work is not None:
            shard = self.work.read(_shard(self.progress.number))
            if shard is None:
                break
            texts += [OwnText(*text) for text in shard["texts"]]
            self.answers.restore(shard["answered"])
            for number in range(self.progress.question_batches, shard["progress"]["question_batches"]):
                self.questions.recall(number, self.rows)
            self.progress = _Progress(**shard["progress"])
        return texts

    def answer_tokens_a_second(self) -> float:
        """An upper estimate from everything written so far, as if every answer were complete and usable."""
        share = self.answer_tokens / (self.answer_tokens + self.questions.new_tokens)
        return share * self.batches.written.tokens_a_second

    def next_batch(self, until: float, asked: Callable[[], None]) -> list[OwnText]:
        """The usable answers to one batch of prompts, greedy and sampled in turn.

        Cut short at the time `until`. `asked` is called after each batch of questions.
        """
        progress = self.progress
        number = progress.number
        prompts, rows, sampled, kind = self._prompts(until, asked)
        written: list[list[int]] = []
        if prompts:
            temperature = _TEMPERATURE if sampled else None
            written = self.batches.write(
                prompts,
                self.answer_tokens,
                ends=self.ends,
                rows=rows,
                temperature=temperature,
                seed=_mixed(self.seed, number),
                until=until,
            )
        texts = [
            OwnText(prompt, answer, kind)
            for prompt, answer in zip(prompts, map(before_loop, written), strict=True)
            if len(answer) >= _LEAST_ANSWER and self.answers.is_new(answer)
        ]
        progress.number += 1
        self._keep(number, texts)
        return texts

    def _prompts(self, until: float, asked: Callable[[], None]) -> tuple[list[list[int]], int, bool, str]:
        """The next batch's prompts, its size, whether it samples, and the kind of its texts."""
        progress = self.progress
        turn = math.floor((progress.number + 1) * self.share_given) > math.floor(progress.number * self.share_given)
        if turn and progress.given_batches < len(self.given):
            prompts, rows, sampled = self.given[progress.given_batches]
            progress.given_batches += 1
            return prompts, rows, sampled, "given"
        for _ in range(_TRIES):
            if len(progress.waiting) >= self.rows:
                break
            progress.waiting += self.questions.batch(progress.question_batches, self.rows, until)
            progress.question_batches += 1
            asked()
        prompts, progress.waiting = progress.waiting[: self.rows], progress.waiting[self.rows :]
        sampled = (progress.number - progress.given_batches) % 2 == 1
        return prompts, self.rows, sampled, "own sampled" if sampled else "own"

    def _batches_of(self, given: list[list[int]]) -> list[tuple[list[list[int]], int, bool]]:
        """The user's prompts, in batches with their sizes: for greedy answers and for sampled ones, in turn.

        Prompts of similar length are together, for little padding; batches are in random order, since there may be time
        for some of them only. A batch is as large as its longest prompt, the last, allows.
        """
        kinds = []
        for sampled, times in ((False, 1), (True, _ANSWERS_TO_A_PROMPT - 1)):
            found: list[tuple[list[list[int]], int, bool]] = []
            left = sorted(given * times, key=lambda prompt: (len(prompt), prompt))
            while left:
                rows = self.rows
                while rows > (fitting := self.batches.rows(len(left[:rows][-1]) + self.answer_tokens)):
                    rows = max(rows // 2, fitting)
                found.append((left[:rows], rows, sampled))
                left = left[rows:]
            Random(self.seed).shuffle(found)
            kinds.append(found)
        turns = [batch for pair in zip_longest(*kinds) for batch in pair]
        return [batch for batch in turns if batch is not None]

    def _keep(self, number: int, texts: list[OwnText]) -> None:
        answered = self.answers.take_added()
        if self.work is None:
            return
        value = {
            "texts": [[text.prompt, text.answer, text.kind] for text in texts],
            **{"answered": answered, "progress": vars(self.progress)},
        }
        self.work.write(_shard(number), value)


def _shard(number: int) -> str:
    return f"own-text-{number:05}"


def _mixed(seed: int, number: int) -> int:
    """A seed per batch, since the same prompt may be in several."""
    return (seed * 1_000_003 + number) % 2**31
