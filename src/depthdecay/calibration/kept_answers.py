"""Texts to calibrate on: prompts, split and answered by the full model, then recorded; kept for resuming."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from depthdecay.calibration.continuations import Continuation, Split, continue_prompts, split_prompts, variety
from depthdecay.calibration.own_questions import Say, own_prompts
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.settings import CalibrationSettings
from depthdecay.calibration.time_budget import (
    ANSWERS_SHARE,
    QUESTIONS_SHARE,
    RECORDING_SHARE,
    TimeBudget,
    counted,
)
from depthdecay.calibration.work_folder import WorkFolder
from depthdecay.engine.engine import Engine
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.model.devices import free_bytes
from depthdecay.model.layers import LayerStack
from depthdecay.plan.identity import identity

OpensEngine = Callable[..., Engine]  # with the arguments of an engine

# Time for everything after the minimum number of answers, relative to the time for these: recording them, one search
# step, maps of two depths, and the measurements. As measured on two cores.
_REST_OF_THE_LEAST = 2.0
# Further prompts of the user's to train maps on; finding and tokenizing these takes seconds.
_MOST_SPARE = 4096


class RecordedTexts:
    """Recordings of texts to fit on, of validation and held-out texts, and of held-out texts of other kinds.

    `settings` are those requested, with a horizon that the texts reach.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Any] | None,
        folder: Path,
        settings: CalibrationSettings,
        say: Say,
        time_budget: TimeBudget | None = None,
        opens: OpensEngine = Engine,
    ) -> None:
        """`opens`: makes the engines that write text."""
        self.stack = LayerStack.of(model)
        self.model = model
        self.settings = settings
        self.time = time_budget or TimeBudget(settings.whole_minutes)
        device = self.stack.model.device
        self.say = say
        self.opens = opens
        prompts = self._own_prompts(tokenizer, folder) if prompts is None else prompts
        split = self._split(prompts, tokenizer)
        others = self._others(prompts, tokenizer, len(split.calibration))
        inputs = {
            "model": identity(self.stack.model).to_dict(),
            "numbers": f"{self.stack.model.dtype} {device.type}",
            "settings": repr(self.settings),
            "prompts": split.calibration,
            "held_out": split.held_out,
            "others": others,
        }
        self.work = WorkFolder(folder, inputs)
        split = self._that_fit(split, len(others), device)
        own, held_out, more = self._texts(split.calibration, split.held_out, others)
        texts = len(own) + len(held_out) + len(more)
        again = self._answers_again(split.calibration[: self._fitted(len(split.calibration))], texts, device)
        self.settings = self._within_texts([*own, *held_out])
        # Of the other kinds, some are held out and the rest are fitted on. Choices are made on the user's texts only:
        # other kinds lose several times as much, and would dominate.
        elsewhere, more = more[: len(more) // 6], more[len(more) // 6 :]
        fit = self._fitted(len(own))
        seen = {token for text in (*own, *again, *more) for token in (*text.prompt, *text.tokens)}
        self.vocabulary = torch.tensor(sorted(seen))
        self.held_out_texts = held_out
        self.spare_prompts = split.spare  # the user's, in none of the texts
        self.fit_texts = [*own[:fit], *again, *more]
        self.select = self._record(own[fit:], "recording validation texts")
        self.held_out = self._record(held_out, "recording held-out texts")
        started = time.monotonic()
        self.fit = self._record(
            self.fit_texts, "recording calibration texts", enough=lambda: self.time.is_over(RECORDING_SHARE)
        )
        self.fit_seconds = time.monotonic() - started
        if self.time.is_over(RECORDING_SHARE):  # nothing is promised about other kinds
            elsewhere = []
        self.elsewhere = self._record(elsewhere, "recording other held-out texts") if elsewhere else None

    def _own_prompts(self, tokenizer: Any, folder: Path) -> list[list[int]]:
        """As many prompts as are needed, written by the model itself."""
        count = self.settings.fit_prompts + self.settings.select_prompts + self.settings.held_out_prompts
        bounds = {name: bound for name, bound in self._bounds().items() if name != "vocabulary"}
        engine = self.opens(self.model, compile=False)
        until = time.monotonic() + self.time.left_of(QUESTIONS_SHARE)
        return own_prompts(engine, tokenizer, count, folder=folder, say=self.say, until=until, **bounds)

    def _fitted(self, count: int) -> int:
        """How many of `count` texts are fitted on; the others are for validation."""
        wanted = self.settings.fit_prompts + self.settings.select_prompts
        return min(max(4, self.settings.fit_prompts * count // wanted), count)

    def _others(self, prompts: Sequence[Any], tokenizer: Any, own: int) -> list[list[int]]:
        """Prompts of other kinds than the user's: maps fitted on one kind of text ruin all others."""
        count = int(self.settings.variety * self._fitted(own))
        return variety(count, tokenizer, besides=prompts, **self._bounds())

    def _that_fit(self, split: Split, others: int, device: torch.device) -> Split:
        """Fewer prompts if their hidden states would not fit in memory twice (maps are tried on a copy).

        The decision is kept, so that an interrupted run resumes with the same prompts.
        """
        most = self._room_for_texts(device) - len(split.held_out) - others
        kept = self.work.read("prompts")
        most = min(most, len(split.calibration)) if kept is None else kept
        if most < min(8, len(split.calibration)):
            raise ArgumentError(
                f"the states of {len(split.held_out)} texts of {self.settings.new_tokens} tokens leave no memory for "
                "calibration; reduce new_tokens or held_out_prompts",
                *("new_tokens", "held_out_prompts"),
            )
        self.work.write("prompts", most)
        if most == len(split.calibration):
            return split
        self.say(f"memory fits the states of {most} prompts, so not all {len(split.calibration)} are used")
        return replace(split, calibration=split.calibration[:most])

    def _room_for_texts(self, device: torch.device) -> int:
        """How many texts' states fit in memory."""
        size = torch.empty((), dtype=self.stack.model.dtype).element_size()
        states = self.settings.new_tokens * self.stack.hidden_size * (self.stack.num_layers + 1) * size
        return int(0.7 * free_bytes(device) / (2.5 * states))

    def _within_texts(self, texts: Sequence[Continuation]) -> CalibrationSettings:
        """Settings with a horizon that the texts reach: longer answers cannot be measured, so nothing is promised."""
        lengths = sorted((len(text.tokens) for text in texts), reverse=True)
        reached = max(lengths[len(lengths) // 4], 2)
        if reached >= self.settings.new_tokens:
            return self.settings
        self.say(f"a quarter of the answers reach {reached} tokens, so that is the plan's horizon")
        return replace(self.settings, new_tokens=reached)

    def _split(self, prompts: Sequence[Any], tokenizer: Any) -> Split:
        calibration = self.settings.fit_prompts + self.settings.select_prompts
        held_out = self.settings.held_out_prompts
        spare = _MOST_SPARE if self.settings.learning_minutes else 0
        return split_prompts(
            prompts, tokenizer, calibration=calibration, held_out=held_out, spare=spare, **self._bounds()
        )

    def _bounds(self) -> dict[str, Any]:
        """The limits on prompts, and the seed that splits them."""
        limit, new_tokens = self.stack.context_limit(), self.settings.new_tokens
        if limit is not None and limit <= new_tokens:
            raise DepthDecayError(f"{new_tokens} new tokens do not fit the model's context of {limit}; reduce them")
        return {
            "vocabulary": self.stack.model.get_input_embeddings().weight.shape[0],
            "longest": None if limit is None else limit - new_tokens,
            "seed": self.settings.seed,
        }

    def _texts(self, *kinds: list[list[int]]) -> list[list[Continuation]]:
        """The full model's answers to prompts of each kind, read from the work folder if they are there."""
        prompts = [prompt for kind in kinds for prompt in kind]
        kept = self.work.read("texts")
        if kept is not None:
            self.say("resuming with the texts of an interrupted run")
        else:
            kept = self._answers_in_time(prompts)
            self.work.write("texts", kept)
        pairs = iter(zip(prompts, kept, strict=True))
        return [
            [Continuation(tuple(p), tuple(t)) for p, t in itertools.islice(pairs, len(kind)) if t is not None]
            for kind in kinds
        ]

    def _answers_in_time(self, prompts: list[list[int]]) -> list[Sequence[int] | None]:
        """The tokens of every answer; if time is short, for some prompts of each kind, and None for the others."""
        engine, title = self.opens(self.model, compile=False), "the full model answers prompts"
        if not self.time.is_bounded:
            return [text.tokens for text in self._answered(engine, prompts, title)]
        rounds = -(-len(prompts) // self.settings.batch)
        found: list[Sequence[int] | None] = [None] * len(prompts)
        for start in range(rounds):
            chosen = range(start, len(prompts), rounds)
            before = self.time.used
            texts = self._answered(engine, [prompts[index] for index in chosen], f"{title}, part {start + 1}")
            if start == 0:
                self._warn_of_least(self.time.used + _REST_OF_THE_LEAST * (self.time.used - before))
            for index, text in zip(chosen, texts, strict=True):
                found[index] = text.tokens
            took = self.time.used - before
            if self.time.left_of(ANSWERS_SHARE) <= took / 2 and start + 1 < rounds:
                answered = sum(tokens is not None for tokens in found)
                self.say(f"there is time for {answered} of {len(prompts)} prompts")
                break
        return found

    def _warn_of_least(self, seconds: float) -> None:
        if seconds > 1.1 * self.time.seconds:
            warnings.warn(
                f"on this machine the smallest calibration takes about {seconds:.0f} s, but only "
                f"{self.time.seconds:.0f} s were given; it continues anyway",
                stacklevel=2,
            )

    def _answered(
        self, engine: Engine, prompts: list[list[int]], title: str, seed: int | None = None
    ) -> list[Continuation]:
        batch, told = min(self.settings.batch, len(prompts)), self._told(title)
        return continue_prompts(engine, prompts, self.settings.new_tokens, batch=batch, seed=seed, progress=told)

    def _answers_again(self, prompts: list[list[int]], texts: int, device: torch.device) -> list[Continuation]:
        """Sampled answers to the same prompts, if there are few: fitting maps needs more text than validation.

        `texts` exist already, and all must fit in memory together.
        """
        kept = self.work.read("again")
        if kept is None:
            wanted = min(self.settings.fit_prompts - len(prompts), self._room_for_texts(device) - texts)
            rounds = 0 if self.time.is_bounded else min(max(wanted, 0) // len(prompts), self.settings.again)
            engine, title = self.opens(self.model, compile=False), "the full model answers the same prompts again"
            answers = (self._answered(engine, prompts, title, seed=number + 1) for number in range(rounds))
            kept = [text.tokens for answer in answers for text in answer]
            self.work.write("again", kept)
        repeated = prompts * (len(kept) // len(prompts))
        return [Continuation(tuple(p), tuple(t)) for p, t in zip(repeated, kept, strict=True)]

    def _record(
        self, texts: Sequence[Continuation], title: str, enough: Callable[[], bool] = lambda: False
    ) -> Recording:
        rows, told = self.settings.rows, self._told(title)
        return Recording.of(self.stack, texts, rows=rows, progress=told, enough=enough)

    def _told(self, title: str) -> Callable[[int, int], None]:
        return counted(self.say, title)
