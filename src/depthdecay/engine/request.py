"""A generation request, checked and completed from the model's own generation settings."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from depthdecay.argument_checks import whole_number
from depthdecay.engine.sampling import ScoreChanges
from depthdecay.errors import ArgumentError, ContextError, DepthDecayError, MissingNameError, one_line
from depthdecay.library_internals import completed_generation_config
from depthdecay.model.prompts import as_batch, plain, token_ids
from depthdecay.speculative.expected_gain import LONGEST
from depthdecay.speculative.prompt_lookup import LOOKUP

if TYPE_CHECKING:
    from depthdecay.engine.engine import Engine

# Plain greedy search: a model's own sampling, penalties or stop strings would hide the effect of its layers.
PLAIN_GREEDY: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
UNENDING: dict[str, Any] = {**PLAIN_GREEDY, "eos_token_id": -1, "stop": ()}  # answers of exactly the requested length
LEAST_TEMPERATURE = 1e-5  # below it, only the likeliest token remains, and dividing scores by it would overflow
DEFAULT_NEW_TOKENS = 256  # if neither the caller nor the model's generation_config sets a limit


@dataclass
class Request:
    """A batch of prompts as token ids, and everything that controls how answers are sampled and ended."""

    prompts: list[list[int]]
    max_new_tokens: int  # for all answers that decode in lock-step
    own_limits: list[int]  # per prompt, for rows that decode independently of longer ones in the batch
    generation_config: Any
    eos_token_ids: frozenset[int]
    pad_token_id: int
    stop: tuple[str, ...]
    seed: int | None
    logits_processor: Sequence[Any] | None  # as for `Sampler`
    stopping_criteria: StoppingCriteriaList
    lookup: int  # in lossless mode: the longest n-gram that prompt lookup matches; 0 for no lookup
    window: int  # in lossless mode: the maximum number of drafts before a verification


def prepare_request(engine: Engine, prompts: Any, max_new_tokens: int | None, settings: dict[str, Any]) -> Request:
    unknown = sorted(set(settings) - set(_PASSED_ON) - set(_OWN))
    if unknown:
        raise DepthDecayError(f"unknown setting '{unknown[0]}'; known are {', '.join(sorted((*_PASSED_ON, *_OWN)))}")
    vocabulary = engine.stack.model.get_input_embeddings().weight.shape[0]
    own = _defaults(engine.stack.model, settings.get("generation_config"))
    config = _generation_config(engine.stack.model, own, settings, vocabulary)
    stop = _stop_strings(engine, own, settings.get("stop"))
    _yes_or_no("control_tokens_in_content", settings.get("control_tokens_in_content") or False, vocabulary)
    ids = [token_ids(engine.tokenizer, prompt, settings, vocabulary) for prompt in as_batch(prompts)]
    prompt_length = max(map(len, ids))
    new_tokens = _new_tokens(engine, own, max_new_tokens, prompt_length)
    # Completed as in generate: processors that act near the end of the text read these.
    config.max_length = prompt_length + new_tokens
    if config.min_new_tokens is not None:
        config.min_length = prompt_length + config.min_new_tokens
    eos = config.eos_token_id or []
    # A model may name a pad token without an embedding; padding is masked, so any other token will do.
    pads = [pad for pad in (config.pad_token_id, *sorted(eos)) if pad is not None and 0 <= pad < vocabulary]
    return Request(
        prompts=ids,
        max_new_tokens=new_tokens,
        own_limits=[_new_tokens(engine, own, max_new_tokens, len(prompt)) for prompt in ids],
        generation_config=config,
        eos_token_ids=frozenset(eos),
        pad_token_id=pads[0] if pads else 0,
        stop=stop,
        seed=_seed(settings.get("seed")) if config.do_sample else None,
        logits_processor=[
            *_score_changes(settings, vocabulary),
            *_functions("logits_processor", settings.get("logits_processor")),
        ],
        stopping_criteria=StoppingCriteriaList(_functions("stopping_criteria", settings.get("stopping_criteria"))),
        lookup=_lookup(settings.get("lookup"), min(map(len, ids))),
        window=_window(settings.get("window")),
    )


_Check = Callable[[str, Any, int], Any]  # (name, value, size of the vocabulary) -> the value to use, or an error


def _refuse(name: str, value: Any, expected: str) -> DepthDecayError:
    return ArgumentError(f"{name} is {reprlib.repr(value)}; expected {expected}", name)


def _whole(low: int) -> _Check:
    return lambda name, value, vocabulary: whole_number(name, value, low)


def _real(low: float, high: float, expected: str) -> _Check:
    def check(name: str, value: Any, vocabulary: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _refuse(name, value, expected)
        return float(value)

    return check


def _yes_or_no(name: str, value: Any, vocabulary: int) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _lookup(value: Any, prompt_length: int) -> int:
    """The longest n-gram for prompt lookup to match; a prompt shorter than the default is fine."""
    if value is None or value is True:
        return LOOKUP
    if not isinstance(value, int) or value < 0 or value == 1:
        raise _refuse("lookup", value, "True, False, or a number of tokens of at least 2")
    if value > prompt_length:
        raise DepthDecayError(f"lookup is {value}, but the prompt has only {prompt_length} tokens; expected fewer")
    return int(value)


def _window(value: Any) -> int:
    if value is None:
        return LONGEST
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST:
        raise _refuse("window", value, f"a number of drafts from 1 to {LONGEST}")
    return value


def _token(name: str, value: Any, vocabulary: int, low: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < vocabulary:
        none = ", or -1 for none" if low < 0 else ""
        raise _refuse(name, value, f"a token id from 0 to {vocabulary - 1}{none}")
    return int(value)


def _tokens(name: str, value: Any, vocabulary: int) -> list[int]:
    if not isinstance(value, list | tuple):
        raise _refuse(name, value, "a list of token ids")
    return [_token(f"{name} {reprlib.repr(value)}: one", plain(token), vocabulary) for token in value]


def _pad_token(name: str, value: Any, vocabulary: int) -> int:
    return _token(name, value, vocabulary, low=-1)


def _end_tokens(name: str, value: Any, vocabulary: int) -> list[int] | None:
    tokens = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    return [t for t in (_token(name, plain(t), vocabulary, low=-1) for t in tokens) if t >= 0] or None


def _sequences(name: str, value: Any, vocabulary: int) -> list[list[int]] | None:
    if not isinstance(value, list | tuple) or not all(plain(ids) for ids in value):
        raise _refuse(name, value, "a list of non-empty lists of token ids")
    return [_tokens(name, plain(ids), vocabulary) for ids in value] or None


def _biases(name: str, value: Any, vocabulary: int) -> dict[tuple[int, ...], float] | None:
    expected = "a mapping from tuples of token ids to biases"
    try:
        pairs = [(tuple(ids), float(bias)) for ids, bias in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        raise _refuse(name, value, expected) from None
    if not all(ids for ids, _ in pairs):
        raise _refuse(name, value, expected)
    return {tuple(_tokens(name, ids, vocabulary)): bias for ids, bias in pairs} or None


def _token_biases(name: str, value: Any, vocabulary: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse(name, value, "a mapping from token ids to numbers from -100 to 100")
    bias = _real(-100, 100, "a number from -100 to 100")
    return {
        _token(f"{name}: one token", plain(token), vocabulary): bias(f"{name} of {token}", plain(own), vocabulary)
        for token, own in value.items()
    }


_SAMPLING: dict[str, _Check] = {
    "temperature": _real(0, 1e6, "a number from 0 (greedy) to 1000000"),
    "top_k": _whole(0),
    "top_p": _real(1e-9, 1, "a number above 0 and at most 1"),
    "min_p": _real(0, 1, "a number between 0 and 1"),
    "typical_p": _real(1e-9, 1, "a number above 0 and at most 1"),
}
# Settings that change the scores and are passed to transformers; any other unknown setting is rejected by name.
_PASSED_ON: dict[str, _Check] = {
    "do_sample": _yes_or_no,
    **_SAMPLING,
    "repetition_penalty": _real(1e-9, 1e6, "a number above 0 (1 is none) and at most 1000000"),
    "no_repeat_ngram_size": _whole(0),
    "bad_words_ids": _sequences,
    "min_new_tokens": _whole(0),
    "eos_token_id": _end_tokens,
    "pad_token_id": _pad_token,
    "suppress_tokens": _tokens,
    "sequence_bias": _biases,
}
_SCORES: dict[str, _Check] = {
    "frequency_penalty": _real(-2, 2, "a number from -2 to 2 (0 is none)"),
    "presence_penalty": _real(-2, 2, "a number from -2 to 2 (0 is none)"),
    "logit_bias": _token_biases,
}
_OWN = (
    *_SCORES,
    *("seed", "stop", "chat", "system", "control_tokens_in_content"),
    *("logits_processor", "stopping_criteria", "lookup", "window", "generation_config"),
)

# Features of generate that a generation_config may request but we do not support, with their neutral values.
_NOT_DONE: dict[str, Any] = {
    **{"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0, "guidance_scale": 1, "token_healing": False},
    **{"max_time": None, "dola_layers": None, "prompt_lookup_num_tokens": None, "assistant_early_exit": None},
}


def _defaults(model: Any, given: Any) -> Any:
    """The defaults for a call: the given generation_config, over the model's own."""
    if given is None:
        return model.generation_config
    if not isinstance(given, GenerationConfig):
        raise _refuse("generation_config", given, "a transformers GenerationConfig")
    own = copy.deepcopy(model.generation_config)
    own.update(**_said_by(given))
    return own


def _said_by(config: GenerationConfig | None) -> dict[str, Any]:
    """What a generation_config sets; None leaves a setting to the model, as in generate."""
    values = {} if config is None else config.to_dict()
    return {name: value for name, value in values.items() if value is not None and name != "transformers_version"}


def _generation_config(model: Any, own: Any, settings: dict[str, Any], vocabulary: int) -> Any:
    for name, nothing in _NOT_DONE.items():
        value = getattr(own, name, None)
        if value is not None and value != nothing:
            raise DepthDecayError(
                f"the model's generation_config sets {name} to {reprlib.repr(value)}, which is not supported; "
                f"set model.generation_config.{name} = None"
            )
    _own_value(own, "max_new_tokens", vocabulary)  # here, before transformers compares it with a number
    given = {
        name: check(name, plain(settings[name]), vocabulary)
        for name, check in _PASSED_ON.items()
        if settings.get(name) is not None
    }
    if "do_sample" not in given and _SAMPLING.keys() & given.keys():
        given["do_sample"] = True
    sampling = given["do_sample"] if "do_sample" in given else _own_value(own, "do_sample", vocabulary)
    if given.get("temperature", 1.0) < LEAST_TEMPERATURE:
        given["temperature"] = 0.0
    sampling = bool(sampling) and given.get("temperature") != 0
    chosen = {
        name: given[name] if name in given else _own_value(own, name, vocabulary)
        for name in _PASSED_ON
        if sampling or name not in _SAMPLING  # without sampling they mean nothing
    }
    chosen["do_sample"] = sampling = sampling and chosen["temperature"] != 0
    said = {
        name: value
        for name, value in chosen.items()
        if (value is not None or name in given) and (sampling or name not in _SAMPLING)
    }
    try:
        # Everything else is left to transformers' own defaults.
        config = completed_generation_config(model, None, **{**_said_by(settings.get("generation_config")), **said})
        config.eos_token_id = chosen["eos_token_id"]
        for name in () if sampling else _SAMPLING:
            setattr(config, name, None)
        mode = config.get_generation_mode()
    except MissingNameError:
        raise
    except (TypeError, ValueError) as error:
        raise DepthDecayError(f"the model's generation_config is not usable: {one_line(error)}") from error
    if mode not in ("greedy_search", "sample"):
        raise DepthDecayError(
            f"the model's generation_config selects {mode.value.replace('_', ' ')}, which is not supported; "
            "only greedy search and sampling are: unset the rest in model.generation_config"
        )
    return config


def _own_value(own: Any, name: str, vocabulary: int) -> Any:
    """A setting from the model's generation_config, checked by the same rules as the caller's."""
    value = plain(getattr(own, name, None))
    if value is None:
        return None
    # Models name special tokens without an embedding; such an EOS never occurs, and such a pad token is replaced.
    limit = 2**31 if name in ("eos_token_id", "pad_token_id") else vocabulary
    check = _whole(1) if name in ("max_new_tokens", "max_length") else _PASSED_ON[name]
    try:
        return check(name, value, limit)
    except DepthDecayError as error:
        raise DepthDecayError(
            f"the model's generation_config is not usable: {error}; correct model.generation_config.{name}"
        ) from None


def _new_tokens(engine: Engine, own: Any, asked: Any, prompt_length: int) -> int:
    """As generate decides: the caller, the model's max_new_tokens, its max_length (which counts the prompt)."""
    if asked is not None:
        asked = whole_number("max_new_tokens", plain(asked), 1)
    limit = engine.stack.context_limit()
    if limit is not None and prompt_length >= limit:
        raise ContextError(
            f"the prompt has {prompt_length} tokens, but the model's context holds {limit} and needs one for the answer"
        )
    wanted = asked or _own_value(own, "max_new_tokens", 0)
    if wanted is None and own.max_length not in (None, 20):  # 20 is transformers' default
        wanted = _own_value(own, "max_length", 0) - prompt_length
        if wanted < 1:
            raise DepthDecayError(
                f"the prompt has {prompt_length} tokens, but the model's generation_config sets max_length to "
                f"{own.max_length}, prompt included; give max_new_tokens"
            )
    wanted = wanted or DEFAULT_NEW_TOKENS
    return int(min(wanted, limit - prompt_length) if limit is not None else wanted)


def _stop_strings(engine: Engine, own: Any, given: Any) -> tuple[str, ...]:
    stop = own.stop_strings if given is None else given
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
        raise _refuse("stop", stop, "a non-empty string or a list of them")
    if stop and engine.tokenizer is None:
        whose = "the stop strings of the model's generation_config" if given is None else "stop strings"
        raise DepthDecayError(f"{whose} need a tokenizer; Engine(model, tokenizer, plan) takes one")
    return tuple(stop)


def _score_changes(settings: dict[str, Any], vocabulary: int) -> list[ScoreChanges]:
    """OpenAI's settings, if they change anything. A model's generation_config has none of them."""
    changes = ScoreChanges(
        **{
            name: check(name, plain(settings[name]), vocabulary)
            for name, check in _SCORES.items()
            if settings.get(name) is not None
        }
    )
    return [] if changes == ScoreChanges() else [changes]


def _functions(name: str, given: Any) -> list[Any]:
    """Processors or criteria: a list of them, or a single one."""
    functions = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    for function in functions:
        if not callable(function) or isinstance(function, type):
            raise _refuse(name, given, "a callable object, or a list of them")
    return functions


def _seed(seed: Any) -> int:
    if seed is None:
        # So torch.manual_seed makes runs reproducible, as with generate.
        return int(torch.randint(2**31, ()).item())
    seed = plain(seed)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise _refuse("seed", seed, "a whole number")
    return int(seed)
