"""Decoding methods to be timed against each other, ours and transformers', in interleaved rounds."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError, failure
from depthdecay.model.devices import synchronize
from depthdecay.model.layers import LayerStack

Decode = Callable[[], tuple[float, int | None]]  # runs once: seconds of decoding, and layers executed if counted


@dataclass
class Contender:
    """One decoding method, and its measured rounds."""

    title: str
    decode: Decode
    warm_up: Decode | None = None  # a shorter run that does all one-time work; None: a whole run
    seconds: list[float] = field(default_factory=list)
    setup_seconds: float = 0.0
    layers_executed: int | None = None
    memory: int = 0  # on CUDA
    error: str | None = None

    def set_up(self) -> None:
        """The first run: compilation, graph capture and warm-up, timed together."""
        started = time.perf_counter()
        self.measure(keep=False)
        self.setup_seconds = time.perf_counter() - started

    def warm(self) -> None:
        """The warm-up before the rounds. Not timed, and as short as possible: on a busy machine a run takes minutes."""
        try:
            (self.warm_up or self.decode)()
        except Exception as error:
            self.error = failure(error)

    def measure(self, keep: bool = True) -> None:
        if self.error is not None:
            return
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds, self.layers_executed = self.decode()
        except Exception as error:
            self.error = failure(error)
            return
        if torch.cuda.is_initialized():
            self.memory = max(self.memory, torch.cuda.max_memory_allocated())
        if keep:
            self.seconds.append(seconds)


def measure_in_rounds(contenders: Sequence[Contender], rounds: int, progress: Callable[[str], None]) -> None:
    """Each contender once per round, so that runs close in time can be compared."""
    for number in range(rounds):
        for contender in contenders:
            progress(f"round {number + 1} of {rounds}: {contender.title}")
            contender.measure()


def decoding(engine: Engine, mode: str, prompts: torch.Tensor, new_tokens: int) -> Decode:
    """Our engine: greedy, like the peers, and always to the full length."""

    def decode() -> tuple[float, int | None]:
        with never_ending(engine.stack.model):
            results = engine.generate(prompts.tolist(), new_tokens, mode=mode, do_sample=False)
        shortest = min(len(result.token_ids) for result in results)
        if shortest != new_tokens:
            raise DepthDecayError(f"decoding ended after {shortest} of {new_tokens} tokens")
        return results[0].decode_seconds, results[0].layers_executed

    return decode


def transformers_decoding(model: Any, prompts: torch.Tensor, new_tokens: int, **settings: Any) -> Decode:
    """transformers' generate. The time of a one-token run, prefill and set-up, is subtracted; the rest is decoding."""

    def generate(count: int) -> float:
        mask = torch.ones_like(prompts)
        synchronize(prompts.device)
        started = time.perf_counter()
        with torch.no_grad():
            output = model.generate(prompts, attention_mask=mask, max_new_tokens=count, do_sample=False, **settings)
        synchronize(prompts.device)
        assert output.shape[1] == prompts.shape[1] + count
        return time.perf_counter() - started

    def decode() -> tuple[float, int | None]:
        with never_ending(LayerStack.of(model).model):
            first = generate(1)
            return generate(new_tokens) - first, None

    return decode


def times_as_fast(contender: Contender, other: Contender | None) -> list[float] | None:
    """Median, lowest and highest speed ratio over the rounds; None if either failed."""
    if other is None or contender.error is not None or other.error is not None:
        return None
    ratios = [theirs / ours for theirs, ours in zip(other.seconds, contender.seconds, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


@contextlib.contextmanager
def never_ending(model: Any) -> Iterator[None]:
    """Makes every method decode the full length, by removing the end-of-text token from the generation config."""
    config = model.generation_config
    before, pad = config.eos_token_id, config.pad_token_id
    config.eos_token_id, config.pad_token_id = None, 0
    try:
        yield
    finally:
        config.eos_token_id, config.pad_token_id = before, pad
