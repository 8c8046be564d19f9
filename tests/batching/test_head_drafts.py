"""Rows of a batch that draft with a learned head: answers equal the full model's, whatever the head drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draft_heads import random_head, states_of
from tiny_models import LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.engine import lanes
from depthdecay.engine.request import prepare_request
from depthdecay.model.layers import LayerStack
from depthdecay.speculative import head_rows
from depthdecay.speculative.draft_head import HEAD_FILE, PORTABLE_HEAD_FILE
from depthdecay.speculative.expected_gain import LEARNED
from depthdecay.speculative.head_rows import HeadRows
from depthdecay.speculative.head_text import PlacedHead


@pytest.fixture(autouse=True)
def heads_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA."""
    monkeypatch.setattr(lanes, "HEADS_IN_BATCHES", {"cpu", "cuda"})


MORE = [*PROMPTS, [(5 * place) % 90 + 3 for place in range(60)], [9, 8, 7]]


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 4, "temperature": 0.9, "top_k": 30}])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_answers_are_the_full_models(architecture: str, settings: dict[str, Any], windows: list[int]) -> None:
    model = tiny_model(architecture)
    engine = dd.Engine(model, draft_head=random_head(model, vocabulary=70))
    asked = {**settings, "eos_token_id": None}
    full = engine.generate(MORE, 24, mode="full", **asked)
    for lookup in (0, 3):
        results = engine.generate(MORE, 24, mode="lossless", lookup=lookup, **asked)
        assert [result.token_ids for result in results] == [result.token_ids for result in full]
        assert sum(result.drafted for result in results) > 0


def test_prompts_in_pieces_and_rows_that_come_and_go(windows: list[int]) -> None:
    model = tiny_model("llama")
    engine = dd.Engine(model, draft_head=random_head(model))
    expected = {
        tuple(prompt): engine.generate([prompt], 20, mode="full", eos_token_id=None)[0].token_ids for prompt in MORE
    }
    batcher = Batcher(engine, BatchSettings(max_batch=3, prefill_tokens=16, cohort_seconds=0))
    ids: dict[int, tuple[int, ...]] = {}
    for prompt in [*MORE, *MORE]:
        (number,) = batcher.submit(prepare_request(engine, [prompt], 20, {"eos_token_id": None}), mode="lossless")
        ids[number] = tuple(prompt)
    drafted = 0
    while not batcher.is_idle:
        for update in batcher.step():
            assert update.error is None
            if update.finished and update.result is not None:
                assert update.result.token_ids == expected[ids.pop(update.id)]
                drafted += update.result.drafted
    assert not ids
    assert drafted > 0
    assert batcher.head is not None
    assert not batcher.head.rows  # no state is left of finished rows


def test_on_a_cpu_no_head_drafts_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = tiny_model("llama")
    assert Batcher(dd.Engine(model, draft_head=random_head(model))).head is None


def test_rows_draft_what_each_would_alone() -> None:
    """Next to longer and shorter texts, and after windows with more or fewer accepted drafts."""
    model = tiny_model("llama")
    stack = LayerStack.of(model)
    placed = PlacedHead(random_head(model), stack)
    engine = dd.Engine(model)
    texts = [[*MORE[0], 7, 8, 9, 10], [*MORE[-2], 3, 4], [*MORE[-1], 50, 51, 52, 53, 54, 55]]
    rows = HeadRows(placed, slots=5)
    slots = [4, 0, 2]
    samplers = [engine.sampler(prepare_request(engine, [text], 8, {}), 0) for text in texts]
    for certain in (-4, -3, -1):
        expected = []
        for slot, text in zip(slots, texts, strict=True):
            known = text[:certain] if certain < -1 else text
            states = states_of(stack, known, placed.states)
            alone = placed.text()
            alone.verified(known[1:], states)
            alone.read()
            drafts: list[int] = []
            for _ in range(3):
                drafts.append(int(alone.draft(drafts).argmax()))
            expected.append(drafts)
            done = 0 if slot not in rows.rows else rows.rows[slot].length - 1 + len(rows.rows[slot].tokens)
            more = {layer: state[done:] for layer, state in states.items()}
            rows.verified(slot, known[done + 1 :], more)
        assert rows.draft(slots, 3, samplers, [0, 0, 0]) == expected


def test_states_of_paused_rows_are_joined_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_rows, "UNJOINED", 4)
    model = tiny_model("llama")
    stack = LayerStack.of(model)
    placed = PlacedHead(random_head(model), stack)
    text = [*MORE[0], 7, 8, 9, 10]
    states = states_of(stack, text, placed.states)
    rows = HeadRows(placed, slots=1)
    waiting = []
    for place, token in enumerate(text[1:]):
        rows.verified(0, [token], {layer: state[place:] for layer, state in states.items()})
        waiting.append(rows.rows[0].unjoined)
    assert waiting[:5] == [1, 2, 3, 0, 1]
    sampler = dd.Engine(model).sampler(prepare_request(dd.Engine(model), [text], 8, {}), 0)
    at_once = HeadRows(placed, slots=1)
    at_once.verified(0, text[1:], states)
    assert rows.draft([0], 3, [sampler], [0]) == at_once.draft([0], 3, [sampler], [0])


def test_a_head_on_first_layers_leaves_batches_to_the_portable_one(tmp_path: Path) -> None:
    model = tiny_model("llama")
    assert Batcher(dd.Engine(model, draft_head=random_head(model, first_layers=2))).head is None
    random_head(model, first_layers=2).save(tmp_path / HEAD_FILE)
    random_head(model).save(tmp_path / PORTABLE_HEAD_FILE)
    replace(dd.Plan.full(LAYERS), draft_head=HEAD_FILE).save(tmp_path)
    engine = dd.Engine(model, plan=tmp_path, mode="lossless")
    assert engine.draft_head is not None
    assert engine.draft_head.shape.first_layers == 2
    found = Batcher(engine).head
    assert found is not None
    assert found.head.shape.first_layers == 0


def test_a_head_for_drafting_next_to_a_plan_that_decays(tmp_path: Path, windows: list[int]) -> None:
    model = tiny_model("llama")
    dd.Plan.constant(LAYERS, LAYERS - 2).save(tmp_path)
    random_head(model, first_layers=2).save(tmp_path / "lossless" / HEAD_FILE)
    random_head(model).save(tmp_path / "lossless" / PORTABLE_HEAD_FILE)
    replace(dd.Plan.full(LAYERS), draft_head=HEAD_FILE).save(tmp_path / "lossless")
    with pytest.warns(dd.errors.GuessedPlanWarning):
        engine = dd.Engine(model, plan=tmp_path)
    assert engine.step_mode == engine.row_mode == "decay"
    assert set(engine.generate(MORE[:1], 8, eos_token_id=None)[0].depths[1:]) == {LAYERS - 2}
    (alone,) = engine.generate(MORE[:1], 20, mode="lossless", lookup=0, eos_token_id=None)
    assert alone.token_ids == engine.generate(MORE[:1], 20, mode="full", eos_token_id=None)[0].token_ids
    assert alone.drafted > 0
    found = Batcher(engine).head
    assert found is not None
    assert found.head.shape.first_layers == 0
    only_drafts = dd.Engine(model, plan=tmp_path / "lossless")
    assert (only_drafts.step_mode, only_drafts.row_mode) == ("full", "lossless")


def test_what_drafted_is_told(windows: list[int]) -> None:
    model = tiny_model("llama")
    engine = dd.Engine(model, draft_head=random_head(model))
    results = engine.generate(MORE, 60, mode="lossless", lookup=0, eos_token_id=None)
    found = {source for result in results for source in result.draft_depths}
    assert found <= {LEARNED, None}
