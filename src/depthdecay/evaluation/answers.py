"""Answers in batches: prompts sorted by length, one engine per plan, decoded to text only after generation.

The first batch is the longest, so on CUDA the graphs captured for it serve all later ones.
"""

from __future__ import annotations

import gc
import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import guess_is_meant
from depthdecay.engine.request import PLAIN_GREEDY
from depthdecay.engine.result import Result
from depthdecay.engine.text_stream import whole_characters
from depthdecay.errors import ArgumentError
from depthdecay.evaluation.work_file import WorkFile, digest
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.plan.plan import Plan

TELL_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class TaskAnswer:
    """One answer's text and its cost; anything after a stop string is not counted."""

    text: str
    tokens: int
    layers: int
    drafted: int = 0  # in lossless mode
    accepted: int = 0
    verifications: int = 0


@dataclass(frozen=True)
class PromptBatch:
    """The answers of one lock-step batch, and its times; a cold batch includes graph capture."""

    answers: list[TaskAnswer]
    steps: int  # decode steps after prefill
    decode_seconds: float
    prefill_seconds: float
    is_cold: bool

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PromptBatch:
        return cls(**{**values, "answers": [TaskAnswer(**answer) for answer in values["answers"]]})


@dataclass(frozen=True)
class Answers:
    """All answers of one method, in question order."""

    answers: list[TaskAnswer]
    batches: list[PromptBatch] = field(repr=False)


@dataclass(frozen=True)
class Questions:
    """Prompts as token ids, in batches of one size; the same for all methods."""

    prompts: list[list[int]]
    max_new_tokens: int
    batch: int
    stop: tuple[str, ...] = ()

    @property
    def order(self) -> list[int]:
        return sorted(range(len(self.prompts)), key=lambda i: (-len(self.prompts[i]), i))

    def batches(self) -> Iterator[list[int]]:
        """The indices of the questions in each batch."""
        order = self.order
        for start in range(0, len(order), self.batch):
            yield order[start : start + self.batch]


class Answerer:
    """Asks one model the questions, method by method."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        questions: Questions,
        work: WorkFile,
        run_key: str,
        quantize: str | None = None,
        origin: WeightsOrigin | None = None,
    ) -> None:
        self.model = model
        self.quantize, self.origin = quantize, origin
        self.tokenizer = tokenizer
        self.questions = questions
        self.work = work
        self.run_key = run_key
        self.end_tokens = end_tokens(model, tokenizer, questions.stop)

    def ask(
        self,
        plan: Plan | None,
        allow_other_weights: bool = False,
        progress: Callable[[str], None] = lambda _: None,
        mode: str | None = None,
    ) -> Answers:
        """All answers with this plan. The engine and the memory of its graphs are freed afterwards."""
        key = digest([self.run_key, _plan_key(plan), *([] if mode is None else [mode])])
        found: dict[int, TaskAnswer] = {}
        done: list[PromptBatch] = []
        engine: Engine | None = None
        rows = list(self.questions.batches())
        for number, indices in enumerate(rows):
            kept = self.work.get(key, number)
            if kept is not None:
                batch = PromptBatch.from_dict(kept)
            else:
                progress(f"batch {number + 1} of {len(rows)}")
                is_cold = engine is None
                if engine is None:
                    engine = self._engine(plan, allow_other_weights)
                told = _now_and_then(progress, f"batch {number + 1} of {len(rows)}", self.questions.max_new_tokens)
                batch = self._answer(engine, indices, is_cold, mode, told)
                self.work.add(key, number, asdict(batch))
            done.append(batch)
            found |= dict(zip(indices, batch.answers, strict=True))
        if engine is not None:
            del engine
            free_memory()
        return Answers([found[i] for i in range(len(found))], done)

    def _engine(self, plan: Plan | None, allow_other_weights: bool) -> Engine:
        """No tokenizer: decoding text after every step would take the host longer than the step takes the device."""
        with guess_is_meant():  # some methods are uncalibrated on purpose
            return Engine(
                self.model,
                None,
                plan,
                compile=False,  # batches have many shapes
                allow_other_weights=allow_other_weights,
                quantize=self.quantize,
                origin=self.origin,
            )

    def _answer(
        self, engine: Engine, indices: Sequence[int], is_cold: bool, mode: str | None, progress: Callable[[int], None]
    ) -> PromptBatch:
        questions = self.questions
        prompts = [questions.prompts[i] for i in indices]
        # A short last batch is padded: another batch size would need its own graphs.
        missing = min(questions.batch, len(questions.prompts)) - len(prompts)
        try:
            results = engine.generate(
                prompts + [prompts[-1]] * missing,
                questions.max_new_tokens,
                mode=mode or engine.step_mode,
                eos_token_id=self.end_tokens,
                stop=[],
                progress=progress,
                **PLAIN_GREEDY,
            )
        except torch.OutOfMemoryError:
            raise ArgumentError(
                f"the device is out of memory with a batch of {questions.batch}; choose a smaller batch", "batch"
            ) from None
        return PromptBatch(
            [self._cut(result) for result in results[: len(indices)]],
            max(len(result.token_ids) for result in results) - 1,
            results[0].decode_seconds,
            results[0].prefill_seconds,
            is_cold,
        )

    def _cut(self, result: Result) -> TaskAnswer:
        """The text up to a stop string, and the tokens up to the one that completed it."""
        ids, stop = result.token_ids, self.questions.stop
        text, count = self._text(ids), len(ids)
        if result.finish_reason == "length":
            text = whole_characters(text)
        if first_stop(text, stop) is not None:

            def is_complete(tokens: int) -> bool:
                return first_stop(self._text(ids[:tokens]), stop) is not None

            count = 1 + bisect_left(range(1, count), True, key=is_complete)
            text = self._text(ids[:count])
        return _account(result, text[: first_stop(text, stop)], count)

    def _text(self, ids: Sequence[int]) -> str:
        decoded = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(decoded)


def _now_and_then(say: Callable[[str], None], batch: str, most: int) -> Callable[[int], None]:
    """Report progress within a long batch, but not at every step, which would flood the log."""
    told = time.monotonic()

    def tell(tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_EVERY_SECONDS:
            told = time.monotonic()
            say(f"{batch}, {tokens} of at most {most} tokens")

    return tell


def _account(result: Result, text: str, tokens: int) -> TaskAnswer:
    """The cost of an answer's first tokens; in lossless mode a proportional share, since a pass yields several."""
    if result.mode != "lossless":
        return TaskAnswer(text, tokens, sum(result.depths[:tokens]))
    taken = (result.layers_executed, result.drafted, result.accepted, result.verifications)
    return TaskAnswer(text, tokens, *(round(count * tokens / len(result.token_ids)) for count in taken))


def _plan_key(plan: Plan | None) -> list[Any]:
    """Identifies a plan by its content, including its repairs file."""
    if plan is None:
        return []
    file = plan.folder / plan.repairs if plan.folder is not None and plan.repairs is not None else None
    repairs = hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None
    return [plan.to_dict(), repairs]


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """The position of the first stop string."""
    places = [place for place in (text.find(one) for one in stop) if place >= 0]
    return min(places, default=None)


def end_tokens(model: Any, tokenizer: Any, stop: Sequence[str]) -> list[int]:
    """Tokens that end an answer: the model's own, and those that contain a whole stop string, such as two newlines.

    The text would be cut there anyway. Stopping at the token means that the row does not keep its batch running.
    """
    own = model.generation_config.eos_token_id
    ends = set(own if isinstance(own, list | tuple) else [] if own is None else [own])
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if stop:
        size = min(vocabulary, len(tokenizer))
        texts = tokenizer.batch_decode([[token] for token in range(size)], clean_up_tokenization_spaces=False)
        ends |= {token for token, text in enumerate(texts) if first_stop(text, stop) is not None}
    return sorted(int(token) for token in ends if 0 <= token < vocabulary) or [-1]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
