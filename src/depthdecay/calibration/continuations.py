"""The texts that calibration measures on: prompts, split into sets, and the full model's greedy answers to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Any

from depthdecay.engine.engine import Engine
from depthdecay.engine.request import PLAIN_GREEDY
from depthdecay.errors import DepthDecayError
from depthdecay.model.prompts import token_ids


@dataclass(frozen=True)
class Continuation:
    """A prompt and the full model's answer, both as token ids."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Token ids of prompts to calibrate on, of held-out prompts, and of further ones; none is in two of them."""

    calibration: list[list[int]]
    held_out: list[list[int]]
    spare: list[list[int]]


def split_prompts(
    prompts: Sequence[Any],
    tokenizer: Any,
    *,
    vocabulary: int,
    calibration: int,
    held_out: int,
    longest: int | None,
    seed: int,
    spare: int = 0,
) -> Split:
    """Shuffle, drop duplicates and prompts that are too long, and split the rest.

    If there are fewer than requested, calibration and held-out prompts shrink in proportion, down to eight and four.
    """
    unique = {_as_read(prompt): prompt for prompt in prompts}
    order = sorted(unique)  # independent of the file's order
    Random(seed).shuffle(order)
    wanted = calibration + held_out
    fitting: list[list[int]] = []
    seen: set[tuple[int, ...]] = set()
    left_out = 0
    for key in order:
        if len(fitting) == wanted + spare:
            break
        ids = token_ids(tokenizer, unique[key], {}, vocabulary)
        if longest is not None and len(ids) > longest:
            left_out += 1
            continue
        if tuple(ids) not in seen:  # a template may map two texts to the same ids
            seen.add(tuple(ids))
            fitting.append(ids)
    if len(fitting) < 12:
        long = f" ({left_out} are longer than {longest} tokens and were left out)" if left_out else ""
        raise DepthDecayError(
            f"there are {len(fitting)} distinct prompts that fit{long}; calibration needs at least 12, "
            "since some are held out"
        )
    if len(fitting) < wanted:
        held_out = min(max(4, len(fitting) * held_out // wanted), len(fitting) - 8)
    return Split(fitting[held_out:wanted], fitting[:held_out], fitting[wanted:])


def variety(
    count: int, tokenizer: Any, *, vocabulary: int, longest: int | None, seed: int, besides: Sequence[Any]
) -> list[list[int]]:
    """Prompts of many kinds that ship with the package, as token ids; none that is also among the user's."""
    if tokenizer is None or count < 1:
        return []
    lines = resources.files("depthdecay").joinpath("data/variety.txt").read_text(encoding="utf-8").splitlines()
    taken = {_as_read(prompt) for prompt in besides}
    texts = [text for text in (line.replace("\\n", "\n") for line in lines) if _as_read(text) not in taken]
    Random(seed).shuffle(texts)
    found = (token_ids(tokenizer, text, {}, vocabulary) for text in texts)
    return [ids for ids in found if longest is None or len(ids) <= longest][:count]


def _as_read(prompt: Any) -> str:
    """A prompt as a key, independent of whitespace and of the form it was given in."""
    turns = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else None
    if turns is not None and len(turns) == 1 and turns[0].get("role") == "user":
        prompt = turns[0]["content"]
    if isinstance(prompt, str):
        return json.dumps(" ".join(prompt.split()))
    return json.dumps(prompt, sort_keys=True)


def continue_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    batch: int = 64,
    mode: str = "full",
    seed: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Continuation]:
    """The full model's answers, or in mode "decay" the plan's; each up to its end of text, in the order of the prompts.

    Greedy, or sampled if a seed is given.
    """
    picked = PLAIN_GREEDY if seed is None else {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": seed}
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    found: dict[int, Continuation] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        rows = [list(prompts[index]) for index in chosen]
        rows += [rows[-1]] * (batch - len(rows)) if start else []  # one batch size, so one set of graphs
        results = engine.generate(rows, new_tokens, mode=mode, stop=[], **picked)
        for index, result in zip(chosen, results, strict=False):
            found[index] = Continuation(tuple(prompts[index]), tuple(result.token_ids))
        progress(min(start + batch, len(order)), len(order))
    return [found[index] for index in range(len(prompts))]
