"""How one prompt is answered: with our own modes, and with transformers' drafting methods."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from depthdecay.engine.engine import Engine
from depthdecay.engine.request import PLAIN_GREEDY
from depthdecay.engine.result import Result
from depthdecay.errors import ArgumentError
from depthdecay.model.devices import synchronize

PEERS = ("generate", "prompt-lookup", "early-exit", "assisted")
Way = Callable[[list[int]], tuple[list[int], float, Result | None]]  # an answer, its seconds, and our own Result


def our_answer(
    engine: Engine, tokens: int, mode: str, ids: list[int], **settings: Any
) -> tuple[list[int], float, Result]:
    (result,) = engine.generate([ids], tokens, mode=mode, stop=[], **settings)
    return result.token_ids, result.decode_seconds, result


def transformers_answer(
    model: Any, tokens: int, peer: str, assistant: Any, ids: list[int]
) -> tuple[list[int], float, None]:
    options: dict[str, Any] = {}
    if peer == "prompt-lookup":
        options["prompt_lookup_num_tokens"] = 10
    if peer == "early-exit":
        layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        options["assistant_early_exit"] = max(1, layers // 2)
    if peer == "assisted":
        if assistant is None:
            raise ArgumentError("assisted generation needs a smaller model; give one as assistant", "assistant")
        options["assistant_model"] = assistant
    given = torch.tensor([ids], device=model.device)
    synchronize(given.device)
    started = time.perf_counter()
    with torch.no_grad(), _same_layers(model):
        output = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, **PLAIN_GREEDY, **options
        )
    synchronize(given.device)
    return output[0, len(ids) :].tolist(), time.perf_counter() - started, None


@contextlib.contextmanager
def _same_layers(model: Any) -> Iterator[None]:
    """transformers' early exit changes the number of layers in the model's config. If it then fails, as 5.17 does when
    it rejects a draft, it leaves it so, and every later answer would come from half a model."""
    config = model.config.get_text_config(decoder=True)
    before = config.num_hidden_layers
    try:
        yield
    finally:
        config.num_hidden_layers = before
