"""What the user asked for, checked and completed from the model's own generation settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList

from .errors import DepthDecayError

if TYPE_CHECKING:
    from .engine import Engine

DEFAULT_NEW_TOKENS = 256  # where neither the caller nor the model's generation_config says

# Settings that change the scores and are transformers' business; everything else unknown is refused by name.
_PASSED_ON = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_new_tokens",
    "eos_token_id",
    "pad_token_id",
    "suppress_tokens",
    "sequence_bias",
)
_OWN = ("seed", "stop", "chat", "system", "logits_processor", "stopping_criteria")


@dataclass
class Request:
    """A batch of prompts as token ids, and everything that decides how their answers are picked and ended."""

    prompts: list[list[int]]
    max_new_tokens: int
    generation_config: Any
    eos_token_ids: frozenset[int]
    pad_token_id: int
    stop: tuple[str, ...]
    seed: int | None
    logits_processor: Sequence[Any] | None
    stopping_criteria: StoppingCriteriaList


def prepare_request(
    engine: Engine, prompts: Sequence[Any], max_new_tokens: int | None, settings: dict[str, Any]
) -> Request:
    unknown = sorted(set(settings) - set(_PASSED_ON) - set(_OWN))
    if unknown:
        raise DepthDecayError(f"unknown setting '{unknown[0]}'; known are {', '.join(sorted(_PASSED_ON + _OWN))}")
    if not prompts:
        raise DepthDecayError("no prompt was given; pass a string, token ids, or a list of those")
    config = _generation_config(engine, settings)
    stop = settings.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and engine.tokenizer is None:
        raise DepthDecayError("stop strings need a tokenizer; Engine(model, tokenizer, plan) takes one")
    if not all(isinstance(s, str) and s for s in stop):
        raise DepthDecayError(f"stop strings must be non-empty strings, got {stop!r}")
    ids = [_token_ids(engine, prompt, settings) for prompt in prompts]
    eos = config.eos_token_id
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    pad = config.pad_token_id
    return Request(
        prompts=ids,
        max_new_tokens=_new_tokens(engine, max_new_tokens, config, max(map(len, ids))),
        generation_config=config,
        eos_token_ids=eos_ids,
        pad_token_id=pad if isinstance(pad, int) and pad >= 0 else min(eos_ids, default=0),
        stop=stop,
        seed=_seed(settings.get("seed")) if config.do_sample else None,
        logits_processor=settings.get("logits_processor"),
        stopping_criteria=StoppingCriteriaList(settings.get("stopping_criteria") or []),
    )


def _generation_config(engine: Engine, settings: dict[str, Any]) -> Any:
    given = {name: settings[name] for name in _PASSED_ON if settings.get(name) is not None}
    _check_sampling(given)
    temperature = given.get("temperature")
    if temperature == 0:
        given.pop("temperature")
        given["do_sample"] = False
    elif "do_sample" not in given and {"temperature", "top_k", "top_p", "min_p", "typical_p"} & given.keys():
        given["do_sample"] = True
    config, _ = engine.stack.model._prepare_generation_config(None, **given)
    if config.num_beams not in (None, 1):
        raise DepthDecayError(f"the model's generation_config asks for {config.num_beams} beams; set num_beams to 1")
    return config


def _check_sampling(given: dict[str, Any]) -> None:
    def check(name: str, low: float, high: float, what: str) -> None:
        value = given.get(name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise DepthDecayError(f"{name} must be {what}, got {value!r}")

    check("temperature", 0, 1e6, "0 (greedy) or more")
    check("top_k", 0, 2**31, "a whole number, 0 for no limit")
    check("top_p", 1e-9, 1, "above 0 and at most 1")
    check("min_p", 0, 1, "between 0 and 1")
    check("repetition_penalty", 1e-9, 1e6, "above 0 (1 is none)")


def _token_ids(engine: Engine, prompt: Any, settings: dict[str, Any]) -> list[int]:
    vocabulary = engine.stack.model.get_input_embeddings().weight.shape[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
        if engine.tokenizer is None:
            raise DepthDecayError("text prompts need a tokenizer; pass token ids, or Engine(model, tokenizer, plan)")
        from .models import chat_ids, prompt_ids

        if isinstance(prompt, str):
            if not prompt.strip():
                raise DepthDecayError("the prompt is empty; give at least one word")
            ids = prompt_ids(engine.tokenizer, prompt, chat=settings.get("chat"), system=settings.get("system"))
        else:
            ids = chat_ids(engine.tokenizer, prompt)
    else:
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.flatten().tolist()
        try:
            ids = [int(token) for token in prompt]
        except (TypeError, ValueError):
            raise DepthDecayError(
                f"a prompt is a string, a list of messages or a list of token ids, not {type(prompt).__name__}"
            ) from None
    if not ids:
        raise DepthDecayError("the prompt is empty; give at least one token")
    bad = next((token for token in ids if not 0 <= token < vocabulary), None)
    if bad is not None:
        raise DepthDecayError(f"token id {bad} is outside the model's vocabulary of {vocabulary}")
    return ids


def _new_tokens(engine: Engine, asked: int | None, config: Any, prompt_length: int) -> int:
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise DepthDecayError(f"max_new_tokens must be a whole number of at least 1, got {asked!r}")
    limit = engine.stack.context_limit()
    if limit is not None and prompt_length >= limit:
        raise DepthDecayError(
            f"the prompt has {prompt_length} tokens, but the model's context holds {limit} and needs one for the answer"
        )
    wanted = asked or config.max_new_tokens or DEFAULT_NEW_TOKENS
    return int(min(wanted, limit - prompt_length) if limit is not None else wanted)


def _seed(seed: Any) -> int:
    if seed is None:
        # torch.manual_seed then makes runs repeatable, as with generate.
        return int(torch.randint(2**31, ()).item())
    if isinstance(seed, bool) or not isinstance(seed, int) or math.fabs(seed) >= 2**63:
        raise DepthDecayError(f"seed must be a whole number, got {seed!r}")
    return seed
