"""Batches of random requests for tests, each compared with its answer alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny_models import LAYERS, VOCABULARY

from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings, Update
from depthdecay.batching.drafting import BatchDrafting, BatchPace, CPUPace, Found, RowDrafts
from depthdecay.engine.request import prepare_request
from depthdecay.engine.result import Result
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.plan.ladder import runs_of
from depthdecay.speculative.expected_gain import TrackRecord

SMALL = BatchSettings(max_batch=4, prefill_tokens=6, cohort_seconds=0)


def random_repairs(plan: Plan, hidden: int = 32) -> Repairs:
    """Repair maps that change the text, one per run and depth, so that a row with the wrong map is noticed."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    depths = range(plan.ladder.min_layers, plan.num_layers)
    return Repairs(
        {
            depth: tuple(
                Repair(start, end, drawn(4, hidden), drawn(hidden, 4), drawn(hidden))
                for start, end in runs_of(plan.dropped(depth))
            )
            for depth in depths
        }
    )


def submit(
    batcher: Batcher, prompt: list[int], tokens: int, plan: Plan | None = None, mode: str = "full", **settings: Any
) -> int:
    logprobs = settings.pop("logprobs", None)
    request = prepare_request(batcher.engine, [prompt], tokens, settings)
    (number,) = batcher.submit(request, plan, mode, logprobs=logprobs)
    return number


def run_dry(batcher: Batcher) -> Iterator[Update]:
    while not batcher.is_idle:
        yield from batcher.step()


def assert_nothing_left(batcher: Batcher) -> None:
    blocks = batcher.blocks
    assert not batcher.rows
    assert not batcher.waiting
    assert batcher.usage().used == 0
    assert batcher.usage().promised == 0
    assert sorted(blocks.free_slots) == list(range(batcher.settings.max_batch))
    assert not blocks.table.any()
    for store in blocks.stores:
        assert sorted(store.free) == list(range(1, store.blocks + 1))


MIXED = ("full", "decay", "decay", "lossless")


DECAYS = [Plan.decay(LAYERS, alpha) for alpha in ("0.9", "0.95", "0.8")]


def random_asks(
    generator: random.Random, count: int, modes: Sequence[str] = MIXED, plans: Sequence[Plan] = DECAYS
) -> list[dict[str, Any]]:
    asks = []
    for number in range(count):
        mode = generator.choice(modes)
        settings: dict[str, Any] = {}
        if generator.random() < 0.5:
            settings = {"temperature": generator.choice([0.8, 1.3]), "seed": number}
            if generator.random() < 0.5:
                settings["top_p"] = 0.9
        if generator.random() < 0.2:
            settings["repetition_penalty"] = 1.3
        if number % 5 == 3:
            settings |= {"frequency_penalty": 1.5, "presence_penalty": -0.5}
        if number % 5 == 4:
            settings["logit_bias"] = dict.fromkeys(range(3, 40), 2.0)
        asks.append(
            {
                "prompt": [generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(1, 25))],
                "tokens": generator.randrange(1, 30),
                "plan": generator.choice(plans) if mode == "decay" else None,
                "mode": mode,
                **settings,
            }
        )
    return asks


def alone(model: Any, ask: dict[str, Any], repairs: Repairs | None) -> list[tuple[int, int]]:
    settings = {name: value for name, value in ask.items() if name not in ("prompt", "tokens", "plan", "mode")}
    plan = ask["plan"]
    engine = Engine(model, None, plan, repairs=repairs if plan is not None else None, compile=False)
    mode = "decay" if ask["mode"] == "decay" else "full"
    result = engine.generate([ask["prompt"]], ask["tokens"], mode=mode, **settings)[0]
    return list(zip(result.token_ids, result.depths, strict=True))


def check_random_arrivals(
    model: Any,
    seed: int,
    repairs: Repairs | None = None,
    settings: BatchSettings = SMALL,
    *,
    modes: Sequence[str] = MIXED,
    plans: Sequence[Plan] = DECAYS,
    windows: Windows | None = None,
    batcher_type: type[Batcher] = Batcher,
) -> Batcher:
    """Requests arrive at random steps and some are cancelled; the others get the answer they get alone."""
    generator = random.Random(seed)
    batcher = batcher_type(Engine(model, None, plans[0], repairs=repairs, compile=False), settings)
    coming = random_asks(generator, 12, modes, plans)
    if windows is not None:
        for ask in (ask for ask in coming if ask["mode"] == "lossless"):
            windows.knows(ask["prompt"], [token for token, _ in alone(model, ask, repairs)])
    asked: dict[int, dict[str, Any]] = {}
    got: dict[int, list[tuple[int | None, int]]] = {}
    ended: set[int] = set()
    cancelled: set[int] = set()
    while coming or not batcher.is_idle:
        if coming and generator.random() < 0.4:
            ask = coming.pop()
            number = submit(batcher, **ask)
            asked[number], got[number] = ask, []
        open_ones = sorted(asked.keys() - ended - cancelled)
        if open_ones and generator.random() < 0.05:
            number = generator.choice(open_ones)
            assert batcher.cancel(number)
            cancelled.add(number)
        for update in batcher.step():
            assert update.error is None
            assert update.id not in cancelled
            got[update.id].append((update.token, update.depth))
            if update.result is not None:
                assert update.finished
                check_account(update.result)
                ended.add(update.id)
        usage = batcher.usage()
        assert usage.used <= usage.promised <= usage.total
    assert_nothing_left(batcher)
    assert ended | cancelled == asked.keys()
    for number in asked:
        expected = alone(model, asked[number], repairs)
        assert got[number] == (expected[: len(got[number])] if number in cancelled else expected)
    return batcher


def check_account(result: Result) -> None:
    """A result's counts add up: every draft was verified, and every verification yielded a token."""
    if result.mode != "lossless":
        assert result.layers_executed == sum(result.depths)
        return
    tokens = len(result.token_ids)
    assert len(result.draft_depths) == tokens
    assert result.draft_depths[0] is None
    assert sum(source is not None for source in result.draft_depths) <= result.accepted <= result.drafted
    assert 1 + result.verifications + result.accepted >= tokens
    assert result.layers_executed >= LAYERS * (1 + result.verifications)


class Windows:
    """Windows of varying length instead of those that pay off, and drafts that are mostly accepted.

    Random weights draft badly and their texts do not repeat. So lookup gets full depth's answer, with some mistakes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[list[int]] = []
        self.lengths = itertools.cycle((1, 5, 3, 0, 7))
        self.turns = itertools.count()
        monkeypatch.setattr(TrackRecord, "window", lambda _: next(self.lengths))
        monkeypatch.setattr(BatchDrafting, "_worth_it", lambda _, found, rows: self.cut(found))
        monkeypatch.setattr(CPUPace, "_drafts", lambda *_: 0.0)
        monkeypatch.setattr(CPUPace, "has_begun", True)
        monkeypatch.setattr(CPUPace, "longest_after", BatchPace.longest_after)
        monkeypatch.setattr(RowDrafts, "found", lambda drafts, longest: self.found(drafts, longest))

    def cut(self, found: Sequence[Found]) -> list[Found]:
        return [(drafts, tokens[: next(self.lengths)]) for drafts, tokens in found]

    def knows(self, prompt: list[int], answer: list[int]) -> None:
        self.texts.append(prompt + answer)

    def found(self, drafts: RowDrafts, longest: int) -> list[int]:
        turn = next(self.turns)
        so_far = [] if drafts.text is None else drafts.text.text
        for text in self.texts:
            if so_far and text[: len(so_far)] == so_far and turn % 4:
                tokens = text[len(so_far) : len(so_far) + longest]
                if tokens and turn % 3 == 0:
                    wrong = turn % len(tokens)
                    tokens[wrong] = (tokens[wrong] + 1) % VOCABULARY
                return tokens
        return []


SHALLOW = Plan.constant(LAYERS, LAYERS - 1, drop_order=[3])
