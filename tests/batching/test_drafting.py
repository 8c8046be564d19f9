"""Drafting of lossless rows in a batch, with made-up step times: it stops where it does not pay."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import PROMPTS, tiny_model

from depthdecay import Engine
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.batching.drafting import BatchDrafting, RowDrafts
from depthdecay.engine.request import prepare_request

RIGHT, WRONG = 1, 2
Seconds = Callable[[int, int], float]  # step time by number of rows and of drafts


def every_token_costs_the_same(rows: int, drafts: int) -> float:
    return 0.01 * (rows + drafts)


def long_texts(rows: int, drafts: int) -> float:
    """A row's drafts share its keys and values, so they cost less than rows."""
    return 0.01 * (rows + 0.4 * drafts)


def weights_take_the_time(rows: int, drafts: int) -> float:
    return 0.01 * (1 + 0.01 * (rows + drafts))


class MadeUpText:
    """Always finds something."""

    def after(self, most: int) -> list[int]:
        return [RIGHT] * most

    def add(self, tokens: list[int]) -> None:
        pass


class MadeUpRow:
    """A row whose drafts are accepted with a given probability."""

    def __init__(self, drafts: RowDrafts, depth: int) -> None:
        self.drafts, self.depth, self.index = drafts, depth, 0

    @property
    def drafts_left(self) -> int:
        return self.drafts.longest - len(self.drafts.tokens)


def made_up_batch(rows: int) -> tuple[BatchDrafting, list[Any]]:
    batcher = Batcher(Engine(tiny_model(), None), BatchSettings(max_batch=rows, cohort_seconds=0))
    request = prepare_request(batcher.engine, [PROMPTS[0]], 8, {})
    made = []
    for _ in range(rows):
        drafts = RowDrafts(PROMPTS[0], request, True, batcher.drafting.found)
        drafts.text = MadeUpText()  # type: ignore[assignment]
        made.append(MadeUpRow(drafts, batcher.stack.num_layers))
    return batcher.drafting, made


def speed(
    drafting: BatchDrafting, rows: list[Any], seconds: Seconds, right: float, steps: int, noise: float = 0
) -> Any:
    """Over so many steps: tokens per row in the time of a full-depth step, and the number of drafts."""
    chance = random.Random(0)
    taken, kept, drafted = 0.0, 0, 0
    for _ in range(steps):
        drafting.prepare(rows, 64, 0)
        by_layers = any(row.drafts.is_drafting for row in rows)
        if by_layers:
            source = rows[0].drafts.source
            taken += seconds(len(rows), 0) * drafting.by_layers.shares[source.depth]
            for row in rows:
                row.drafts.tokens.append(RIGHT)
            continue
        new = sum(len(row.drafts.tokens) for row in rows)
        taken += seconds(len(rows), new)
        drafted += new
        timed = seconds(len(rows), new) * (1 + noise * (2 * chance.random() - 1))
        drafting.pace.saw_step(len(rows) + new, timed, new)
        for row in rows:
            said = [RIGHT if chance.random() < right else WRONG for _ in range(len(row.drafts.tokens) + 1)]
            tokens = len(row.drafts.judge(said))
            row.index += tokens
            kept += tokens
    return SimpleNamespace(rate=kept / taken * seconds(len(rows), 0) / len(rows), drafted=drafted)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("right", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("rows", [2, 8, 16])
def test_a_batch_pauses_where_every_token_costs_the_same(rows: int, right: float, noise: float) -> None:
    drafting, made = made_up_batch(rows)
    found = speed(drafting, made, every_token_costs_the_same, right, 100, noise)
    assert 0 < found.drafted <= (3 if noise == 0 else 20) * rows  # trial drafts, to time their cost
    assert found.rate > 0.97


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_a_batch_drafts_where_it_pays(rows: int) -> None:
    drafting, made = made_up_batch(rows)
    assert speed(drafting, made, weights_take_the_time, 0.8, 200).rate > 1.7
    drafting, made = made_up_batch(rows)
    assert speed(drafting, made, long_texts, 0.9, 200).rate > 1.1
    drafting, made = made_up_batch(rows)
    assert speed(drafting, made, long_texts, 0.1, 200).rate > 0.97


def test_rows_that_draft_nothing_still_learn_from_what_they_find() -> None:
    drafting, made = made_up_batch(4)
    found = speed(drafting, made, every_token_costs_the_same, 1.0, 80)
    assert found.drafted <= 12
    assert all(row.drafts.lookup.judged > 60 and row.drafts.lookup.acceptance > 0.9 for row in made)


def test_only_rows_whose_drafts_are_right_get_them() -> None:
    drafting, made = made_up_batch(8)
    speed(drafting, made[:4], long_texts, 0.95, 60)
    speed(drafting, made[4:], long_texts, 0.05, 60)
    drafting.prepare(made, 64, 0)
    assert all(row.drafts.tokens for row in made[:4])
    assert not any(row.drafts.tokens for row in made[4:])


def test_prompts_are_read_before_anybody_decodes_where_texts_begin_together() -> None:
    engine = Engine(tiny_model(), None)
    settings = BatchSettings(max_batch=3, prefill_tokens=4, cohort_seconds=0, prompts_first=True)
    batcher = Batcher(engine, settings)
    prompts = [[5, 6, 7], [8] * 9, [9, 5]]
    batcher.submit(prepare_request(engine, prompts, 6, {"eos_token_id": -1}))
    got: dict[int, list[int | None]] = {}
    while not batcher.is_idle:
        for update in batcher.step():
            got.setdefault(update.id, []).append(update.token)
        if any(row.in_prompt for row in batcher.rows):
            assert all(len(tokens) == 1 for tokens in got.values())  # the one from prefill
    assert list(dict(sorted(got.items())).values()) == [
        result.token_ids for result in engine.generate(prompts, 6, mode="full", eos_token_id=-1)
    ]
