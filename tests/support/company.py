"""Batch invariance: requests get the same tokens and bitwise identical log-probabilities alone and in a batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from batches import assert_nothing_left, submit

from depthdecay.batching.batcher import Batcher
from depthdecay.engine.result import Result

Answer = tuple[list[int], list[Any]]  # tokens, and log-probabilities where requested


def answers(batcher: Batcher, asks: Sequence[dict[str, Any]], at_a_time: int, seed: int = 0) -> list[Answer]:
    """Submit requests in random order at random steps, at most `at_a_time` at once."""
    chosen = random.Random(seed)
    order = chosen.sample(range(len(asks)), len(asks))
    places: dict[int, int] = {}
    found: list[Answer] = [([], []) for _ in asks]
    ended = 0
    while ended < len(asks):
        while order and len(places) - ended < at_a_time and (batcher.is_idle or chosen.random() < 0.7):
            place = order.pop()
            places[submit(batcher, **asks[place])] = place
        for update in batcher.step():
            assert update.error is None, update.error
            tokens, logprobs = found[places[update.id]]
            assert update.token is not None
            tokens.append(update.token)
            logprobs.append(update.logprobs)
            if update.result is not None:
                check_exact(update.result)
                ended += 1
    assert_nothing_left(batcher)
    return found


def check_exact(result: Result) -> None:
    assert (result.exact, result.inexact_because) == (True, None)


def check_company(batcher: Batcher, asks: Sequence[dict[str, Any]], company: Sequence[int]) -> list[Answer]:
    """Every request gets the answer that it gets alone, whatever else is in the batch."""
    alone = answers(batcher, asks, 1)
    for at_a_time in company:
        for ask, got, expected in zip(asks, answers(batcher, asks, at_a_time, at_a_time), alone, strict=True):
            assert got == expected, f"{at_a_time} at a time: {ask['mode']}, prompt of {len(ask['prompt'])}"
    return alone


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"do_sample": True, "temperature": 0.8, "seed": 3},
    {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "seed": 4},
    {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "seed": 5, "logprobs": 2},
    {"do_sample": True, "temperature": 1.1, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 6},
)


def mixed_asks(
    count: int, vocabulary: int, tokens: int, lengths: Sequence[int], plan: Any, modes: Sequence[str]
) -> list[dict[str, Any]]:
    """Requests of several modes, lengths and settings; `plan` is for those that decay."""
    chosen = random.Random(count)
    asks = []
    for number in range(count):
        mode = modes[number % len(modes)]
        start = [chosen.randrange(3, vocabulary) for _ in range(chosen.randint(3, 9))]
        length = lengths[number % len(lengths)]
        asks.append(
            {
                "prompt": (start * length)[:length],  # repetitive, so that lookup finds something
                "tokens": chosen.randint(tokens // 2, tokens),
                "plan": plan if mode == "decay" else None,
                "mode": mode,
                "eos_token_id": None,
                **chosen.choice(SETTINGS),
            }
        )
    return asks
