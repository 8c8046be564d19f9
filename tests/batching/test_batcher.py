"""Continuous batching: a request gets the same tokens in any batch as it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import (
    DECAYS,
    SHALLOW,
    SMALL,
    Windows,
    assert_nothing_left,
    check_account,
    check_random_arrivals,
    random_repairs,
    run_dry,
    submit,
)
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS, PROMPTS, VOCABULARY, tiny_model

from depthdecay import DepthDecayError, Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings, Update
from depthdecay.batching.drafting import BatchPace, RowDrafts
from depthdecay.batching.prompt_reading import read_within_step
from depthdecay.engine.request import PLAIN_GREEDY, prepare_request
from depthdecay.engine.result import Result
from depthdecay.model.layers import KeptShape
from depthdecay.model.load import load
from depthdecay.plan.file import EMBEDDED_PLAN
from depthdecay.runners.contract import Part
from depthdecay.runners.kv_blocks import BLOCK, KVBlocks, Store
from depthdecay.speculative.expected_gain import StepCosts, TrackRecord


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    return Windows(monkeypatch)


def test_random_arrivals_give_every_request_its_solo_tokens(architecture: str) -> None:
    check_random_arrivals(tiny_model(architecture), seed=1)


def test_requests_that_wait_for_company_get_what_they_get_alone() -> None:
    """Cohorts wait by the clock, which here advances with every call."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.003
        return now[0]

    held: list[int] = []

    class Waiting(Batcher):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.clock = clock

        def step(self) -> list[Update]:
            before = len(self.waiting)
            updates = super().step()
            held.append(before and len(self.waiting) == before and len(self.rows) < self.settings.max_batch)
            return updates

    settings = BatchSettings(max_batch=4, prefill_tokens=6, cohort_seconds=0.05)
    check_random_arrivals(tiny_model(), 3, settings=settings, batcher_type=Waiting)
    assert any(held)  # some did wait


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_one_depth_share_their_own_repairs(seed: int) -> None:
    check_random_arrivals(tiny_model(), seed, random_repairs(Plan.decay(LAYERS, "0.9")))


@pytest.mark.parametrize("seed", range(3))
def test_little_room_makes_requests_wait_and_changes_no_token(seed: int) -> None:
    model = tiny_model()
    a_block = Batcher(Engine(model, None), SMALL).blocks.stores[0].block_bytes * LAYERS
    check_random_arrivals(model, seed, settings=BatchSettings(max_batch=4, prefill_tokens=6, cache_bytes=5 * a_block))


def test_layers_are_counted_where_they_run_and_idle_ones_do_not_run() -> None:
    plan = Plan.decay(LAYERS, "0.8")
    batcher = Batcher(Engine(tiny_model(), None, plan), SMALL)
    for prompt in PROMPTS:
        submit(batcher, prompt, 12, plan, "decay")
    results = [update.result for update in run_dry(batcher) if update.result is not None]
    decoded = sum(sum(result.depths[1:]) for result in results)
    assert batcher.counters.layers_executed == decoded == 3 * sum(plan.depths(12)[1:])
    # Rows that started within a step or two share most layers, and a layer that no row needs does not run.
    assert batcher.counters.layer_passes < LAYERS * batcher.counters.steps


def test_a_pass_that_fails_ends_only_the_rows_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    # The model's own forward, since it can be made to fail; prompts are prefilled together.
    batcher = Batcher(Engine(model, None, fast=False), replace(SMALL, prefill_tokens=64))
    good = [submit(batcher, prompt, 9) for prompt in PROMPTS]
    poison = 96
    bad = submit(batcher, [5, poison], 9)
    forward = model.get_input_embeddings().forward

    def failing(ids: torch.Tensor) -> torch.Tensor:
        if (ids == poison).any():
            raise RuntimeError("poisoned")
        return forward(ids)

    monkeypatch.setattr(model.get_input_embeddings(), "forward", failing)
    updates = list(run_dry(batcher))
    monkeypatch.undo()
    assert [update.id for update in updates if update.error is not None] == [bad]
    # Retries are logged: otherwise a machine with occasional failures would be slow without any sign of why.
    assert batcher.counters.failed_passes == len(caplog.records) + 1 > 1
    assert {record.getMessage() for record in caplog.records} == {"a pass failed; retrying in halves"}
    expected = Engine(model, None).generate(PROMPTS, 9, mode="full")
    for number, solo in zip(good, expected, strict=True):
        assert [update.token for update in updates if update.id == number] == solo.token_ids
    assert_nothing_left(batcher)


def test_a_request_that_does_not_fit_waits_and_one_that_never_will_is_refused() -> None:
    engine = Engine(tiny_model(), None)
    whole = Batcher(engine, SMALL).blocks
    a_block = sum(whole.store(layer).block_bytes for layer in range(LAYERS))
    batcher = Batcher(engine, BatchSettings(max_batch=4, cache_bytes=3 * a_block, cohort_seconds=0))
    first, second = submit(batcher, [7] * 20, 10), submit(batcher, [8] * 20, 10)  # two blocks per layer each
    batcher.step()
    assert [row.id for row in batcher.rows] == [first]
    ends = [update.id for update in run_dry(batcher) if update.finished]
    assert ends == [first, second]
    with pytest.raises(DepthDecayError, match="does not fit into the KV cache"):
        submit(batcher, [7] * 20, 40)
    with pytest.raises(DepthDecayError, match="the limit for both together is 64"):
        submit(Batcher(engine, BatchSettings(max_positions=64)), [7] * 20, 100)
    assert_nothing_left(batcher)


def batcher_with_blocks(blocks: int, max_batch: int = 4) -> Batcher:
    """A batcher with this many blocks per layer."""
    engine = Engine(tiny_model(), None)
    a_block = Batcher(engine, SMALL).blocks.stores[0].block_bytes * LAYERS
    return Batcher(engine, BatchSettings(max_batch=max_batch, cache_bytes=blocks * a_block, cohort_seconds=0))


def test_small_requests_pass_one_that_does_not_fit_yet() -> None:
    batcher = batcher_with_blocks(10)
    running = submit(batcher, [7] * 2, 8)
    batcher.step()
    large, small = submit(batcher, [8] * 150, 8), submit(batcher, [9] * 2, 8)  # ten blocks, and one
    batcher.step()
    assert [row.id for row in batcher.rows] == [running, small]
    assert [row.id for row in batcher.waiting] == [large]
    assert [update.id for update in run_dry(batcher) if update.finished] == [running, small, large]
    assert_nothing_left(batcher)


def entries_until(batcher: Batcher, last: int, tokens: int) -> tuple[list[int], list[int]]:
    """The ids admitted, in order, and those of the small requests of `tokens` tokens that keep arriving meanwhile."""
    entered: list[int] = []
    small: list[int] = []
    while last not in entered:
        if len(batcher.waiting) < 6:
            small.append(submit(batcher, [5], tokens))  # there is always one that would fit
        before = {row.id for row in batcher.waiting}
        batcher.step()
        entered += sorted(before - {row.id for row in batcher.waiting})
    list(run_dry(batcher))
    assert_nothing_left(batcher)
    return entered, small


def test_a_large_request_is_delayed_so_often_and_is_next_then() -> None:
    batcher = batcher_with_blocks(10)
    submit(batcher, [7] * 2, 8)
    batcher.step()
    large, other = submit(batcher, [8] * 150, 2), submit(batcher, [9] * 150, 2)
    entered, small = entries_until(batcher, other, tokens=12)  # longer than the running row has left
    # A batch has four rows. `other` was overtaken together with `large`, so it is not overtaken again.
    assert entered[:6] == [*small[:4], large, other]


def test_those_that_leave_in_time_pass_a_large_request_without_delaying_it() -> None:
    def steps_until_it_enters(others: bool) -> int:
        batcher = batcher_with_blocks(10)
        submit(batcher, [7] * 2, 40)
        batcher.step()
        large = submit(batcher, [8] * 150, 2)
        passed = 0
        for step in range(60):
            if others:
                submit(batcher, [5], 3)
                passed += 1
            batcher.step()
            if large not in {row.id for row in batcher.waiting}:
                assert passed > 4 or not others  # more than a batch has rows
                list(run_dry(batcher))
                return step
        raise AssertionError("it never entered")

    assert steps_until_it_enters(others=True) <= steps_until_it_enters(others=False) + 3


def test_one_that_does_not_fit_ends_no_wait_for_company() -> None:
    clock = Time()
    plan = Plan.decay(LAYERS, "0.5", min_layers=4)
    batcher = batcher_with_blocks(16, max_batch=8)
    batcher = Batcher(Engine(tiny_model(), None, plan), replace(batcher.settings, cohort_seconds=0.5), clock=clock)
    for prompt in PROMPTS:
        submit(batcher, prompt, 20, plan, "decay")
    for _ in range(6):
        batcher.step()
    submit(batcher, [8] * 240, 8)
    clock.now += 1
    submit(batcher, [3, 4], 20, plan, "decay")
    batcher.pace.lone_layer, batcher.pace.step = 1.0, 8.0
    batcher.step()
    assert len(batcher.waiting) == 2
    clock.now += 1
    batcher.step()
    assert len(batcher.waiting) == 1


def test_a_decaying_row_promises_less_and_frees_layers_on_the_way() -> None:
    plan = Plan.decay(LAYERS, "0.9")
    batcher = Batcher(Engine(tiny_model(), None, plan), SMALL)
    submit(batcher, [9] * 5, 60, plan, "decay")
    full_need = batcher.blocks.needs(Plan.full(LAYERS), 5, 60)[LAYERS]
    assert batcher.waiting[0].needs[LAYERS][0] < full_need[0]
    saved = []
    while not batcher.is_idle:
        batcher.step()
        usage = batcher.usage()
        assert usage.used <= usage.promised or batcher.is_idle
        if batcher.rows:
            (row,) = batcher.rows
            held = {layer for layer in range(LAYERS) if batcher.blocks.held[layer][row.slot]}
            assert held <= set(plan.layers(row.depth))
            saved.append(usage.saved)
    assert saved[-1] > 0
    assert_nothing_left(batcher)


def test_layers_of_different_shapes_have_stores_of_their_own() -> None:
    shapes = [
        KeptShape((2, 8), (2, 8), torch.float32, torch.device("cpu")),
        KeptShape((1, 8), (1, 8), torch.float32, torch.device("cpu")),
    ]
    a_block = BLOCK * sum(shape.nbytes for shape in shapes)
    blocks = KVBlocks.within(shapes, slots=2, positions=64, cache_bytes=8 * a_block)
    assert [store.blocks for store in blocks.stores] == [8, 8]
    plan = Plan.constant(2, 1, drop_order=[0])
    needs = blocks.needs(plan, BLOCK, 33)[2]
    assert needs == [1, 3]  # layer 0 reads only the prompt, layer 1 also the answer, except its last token
    slot = blocks.enter(needs)
    blocks.extend(slot, [0, 1], BLOCK)
    blocks.drop(slot, [0])
    blocks.extend(slot, [1], BLOCK + 32)
    assert [len(store.free) for store in blocks.stores] == [8, 5]
    blocks.leave(slot)
    assert [len(store.free) for store in blocks.stores] == [8, 8]


def test_room_is_bounded_by_what_can_be_used_and_by_what_there_is() -> None:
    engine = Engine(tiny_model(), None)
    generous = Batcher(engine, BatchSettings(max_batch=2, max_positions=64, cache_bytes=10**18))
    a_block = generous.blocks.stores[0].block_bytes * LAYERS
    assert generous.usage().total == 2 * 64 // BLOCK * a_block
    with pytest.raises(DepthDecayError, match="does not fit into the memory of cpu"):
        Store(engine.stack.kept_shapes()[0], 10**12)


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_new_rows_wait_for_others_of_their_age_where_that_pays_and_not_for_long() -> None:
    clock = Time()
    plan = Plan.decay(LAYERS, "0.5", min_layers=4)
    engine = Engine(tiny_model(), None, plan)
    batcher = Batcher(engine, BatchSettings(max_batch=8, cohort_seconds=0.5), clock=clock)
    for prompt in PROMPTS:
        submit(batcher, prompt, 50, plan, "decay")
    for _ in range(6):
        batcher.step()
    assert {row.depth for row in batcher.rows} == {4}
    batcher.pace.lone_layer, batcher.pace.step = (
        1.0,
        8.0,
    )  # a step takes as long as its layers: half of them are idle
    submit(batcher, [3, 4], 50, plan, "decay")
    batcher.step()
    assert len(batcher.rows) == 3  # three rows save half of their time each while one row waits: that pays
    batcher.pace.step = 8.0
    submit(batcher, [3, 4], 50, plan, "decay")
    batcher.step()
    assert len(batcher.rows) == 5  # two waiting rows lose more than three running rows save
    for _ in range(6):
        batcher.step()
    assert {row.depth for row in batcher.rows} == {4}
    batcher.pace.step = 8.0
    submit(batcher, [3, 4], 50, plan, "decay")
    batcher.step()
    assert len(batcher.waiting) == 1
    clock.now += 1  # past the longest wait
    batcher.step()
    assert len(batcher.rows) == 6


def test_prompts_are_read_in_chunks_between_the_steps_of_others() -> None:
    batcher = Batcher(Engine(tiny_model(), None), SMALL)
    fast = submit(batcher, [5], 8)
    batcher.step()
    submit(batcher, [6] * 30, 2)
    seen = [[update.id for update in batcher.step()] for _ in range(4)]
    assert seen == [[fast]] * 4  # four chunks of six, and the other row gets a token in every step


def test_a_short_prompt_speaks_while_a_long_one_is_read() -> None:
    batcher = Batcher(Engine(tiny_model(), None), SMALL)
    long = submit(batcher, [6] * 200, 2)
    batcher.step()
    shorts = [submit(batcher, [5], 1), submit(batcher, [7] * 3, 1)]
    said = [[update.id for update in batcher.step()] for _ in range(2)]
    assert sorted(said[0] + said[1]) == sorted(shorts)
    assert next(run_dry(batcher)).id == long


def test_newcomers_take_half_of_a_step_at_most_from_the_oldest_prompt() -> None:
    """However many arrive. A prompt more than half as long as the oldest does not overtake it."""
    batcher = Batcher(Engine(tiny_model(), None), SMALL)
    submit(batcher, [6] * 200, 1)
    batcher.step()
    (long,) = batcher.rows
    while long.in_prompt:
        before = long.length
        while len(batcher.waiting) < 4:
            submit(batcher, [5] * 2, 1)
        batcher.step()
        assert long.length - before >= min(3, 200 - before)
    list(run_dry(batcher))
    first, second = submit(batcher, [6] * 40, 1), submit(batcher, [7] * 22, 1)
    assert [update.id for update in run_dry(batcher)] == [first, second]
    assert_nothing_left(batcher)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_least_budgets_read_every_prompt(budget: int) -> None:
    settings = BatchSettings(max_batch=4, prefill_tokens=budget, cohort_seconds=0)
    check_random_arrivals(tiny_model(), 4, settings=settings)


@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_overtake_and_are_overtaken_get_what_they_get_alone(seed: int) -> None:
    model = tiny_model()
    batcher = Batcher(Engine(model, None), SMALL)
    draw = random.Random(seed)
    asks = {}
    for number in range(10):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.choice([1, 2, 5, 60, 150]))]
        asks[submit(batcher, prompt, 6, temperature=1.0, seed=number)] = (prompt, number)
        batcher.step()
    got: dict[int, list[int]] = {}
    for update in run_dry(batcher):
        if update.result is not None:
            got[update.id] = update.result.token_ids
    for number, tokens in got.items():
        prompt, seed_of_it = asks[number]
        assert (
            tokens
            == Engine(model, None).generate([prompt], 6, mode="full", temperature=1.0, seed=seed_of_it)[0].token_ids
        )
    assert_nothing_left(batcher)


def read_shares(unread: Sequence[int], graph_rows: int, decoding: int = 0) -> list[int]:
    rows = [SimpleNamespace(in_prompt=True, unread=count, share=0) for count in unread]
    batch = [*(SimpleNamespace(in_prompt=False) for _ in range(decoding)), *rows]
    read_within_step(batch, graph_rows)  # type: ignore[arg-type]
    return [row.share for row in rows]


def test_a_step_of_graphs_is_shared_likewise() -> None:
    assert read_shares([200, 1, 10], 64) == [53, 1, 10]
    assert read_shares([150, 40, 30, 20], 64) == [32, 0, 12, 20]
    assert read_shares([60, 25, 25, 25], 160) == [60, 25, 25, 25]
    assert read_shares([60, 25, 25, 25], 120) == [60, 25, 25, 10]
    assert read_shares([100, 60], 64, decoding=4) == [60, 0]
    assert read_shares([250, 10], 64) == [0, 0]  # too much for a step: separate passes


def test_log_probabilities_are_the_models_own() -> None:
    model = tiny_model()
    batcher = Batcher(Engine(model, None), SMALL)
    submit(batcher, PROMPTS[0], 4, temperature=0.5, seed=3, logprobs=3)
    submit(batcher, PROMPTS[1], 4)
    updates = [update for update in run_dry(batcher) if update.id == 0]
    text = list(PROMPTS[0])
    for update in updates:
        with torch.no_grad():
            logs = torch.log_softmax(model(torch.tensor([text])).logits[0, -1], dim=-1)
        assert update.logprobs is not None
        assert update.token is not None
        assert update.logprobs.chosen == pytest.approx(float(logs[update.token]), abs=1e-4)
        assert [token for token, _ in update.logprobs.top] == logs.topk(3).indices.tolist()
        text.append(update.token)


def test_another_ladder_and_criteria_are_refused() -> None:
    engine = Engine(tiny_model(), None, Plan.decay(LAYERS, "0.9"))
    batcher = Batcher(engine, SMALL)
    with pytest.raises(DepthDecayError, match="one ladder"):
        submit(batcher, [5], 4, Plan.decay(LAYERS, "0.9", drop_order=[6, 5, 1]), "decay")
    with pytest.raises(DepthDecayError, match="unknown mode"):
        submit(batcher, [5], 4, mode="fast")
    with pytest.raises(DepthDecayError, match="stopping_criteria"):
        submit(batcher, [5], 4, stopping_criteria=lambda *_: torch.tensor([False]))
    with pytest.raises(DepthDecayError, match="needs a plan"):
        submit(Batcher(Engine(tiny_model(), None), SMALL), [5], 4, mode="decay")
    assert batcher.is_idle


@pytest.mark.parametrize(
    ("name", "value"), [("max_batch", 0), ("prefill_tokens", -1), ("cohort_seconds", -1.0), ("draft_rows", 0)]
)
def test_settings_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(DepthDecayError, match=name):
        BatchSettings(**{name: value})


def test_warm_up_leaves_nothing_behind_and_knows_the_pace() -> None:
    batcher = Batcher(Engine(tiny_model(), None), SMALL)
    batcher.warm_up()
    assert_nothing_left(batcher)
    assert batcher.pace.lone_layer > 0
    assert batcher.counters.tokens == 0
    assert set(batcher.drafting.pace.verifications) == {1, 2, 4, 8, 16, 32, 64}


# Lossless rows.


def test_lossless_rows_draft_among_others_and_say_what_full_depth_says(architecture: str, windows: Windows) -> None:
    """With prompt lookup next to rows of every mode, and with shallow layers where no other row runs deeper."""
    model = tiny_model(architecture)
    batcher = check_random_arrivals(model, seed=5, modes=("lossless", "lossless", "decay", "full"), windows=windows)
    assert 0 < batcher.counters.accepted < batcher.counters.drafted
    windows.texts.clear()
    batcher = check_random_arrivals(model, seed=6, modes=("lossless", "lossless", "decay"), plans=[SHALLOW])
    assert batcher.counters.drafted > 0


@pytest.mark.parametrize("seed", range(3))
def test_drafts_share_repairs_and_little_room(seed: int, windows: Windows) -> None:
    """Admission reserves the blocks that drafts need: a window never extends past the requested answer length."""
    model = tiny_model()
    a_block = Batcher(Engine(model, None), SMALL).blocks.stores[0].block_bytes * LAYERS
    settings = BatchSettings(max_batch=4, prefill_tokens=6, cache_bytes=5 * a_block)
    repairs = random_repairs(DECAYS[0])
    batcher = check_random_arrivals(
        model, seed, repairs, settings, modes=("lossless", "lossless", "decay"), windows=windows
    )
    assert batcher.counters.drafted > 0


def perfect_engine(tokenizer: Any = None, model: Any = None) -> Engine:
    """An engine whose drafts are always right: layer 3 does nothing."""
    model = tiny_model() if model is None else model
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    return Engine(model, tokenizer, SHALLOW)


def lossless_result(batcher: Batcher, prompt: Any, tokens: int, **settings: Any) -> Result:
    batcher.submit(prepare_request(batcher.engine, [prompt], tokens, settings), None, "lossless")
    (result,) = [update.result for update in run_dry(batcher) if update.result is not None]
    assert_nothing_left(batcher)
    return result


def test_drafts_that_are_right_are_kept_and_counted(windows: Windows) -> None:
    batcher = Batcher(perfect_engine(), SMALL)
    result = lossless_result(batcher, PROMPTS[0], 40)
    assert result.mode == "lossless"
    assert result.acceptance == 1.0
    assert result.accepted == result.drafted == batcher.counters.drafted == batcher.counters.accepted > 20
    assert result.draft_depths.count(LAYERS - 1) == result.accepted
    assert 1 + result.verifications + result.accepted == 40
    assert result.layers_executed == (1 + result.verifications) * LAYERS + result.drafted * (LAYERS - 1)
    # Work is counted per row: every draft and every verified token, but not the prompt.
    assert batcher.counters.layers_executed == result.drafted * (2 * LAYERS - 1) + result.verifications * LAYERS
    assert batcher.counters.layers_executed == batcher.counters.layers_full


def watched_parts(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Part]]:
    """Record the passes that a batch runs from now on."""
    passes: list[Sequence[Part]] = []
    run = batcher.runner.run

    def watched(parts: Sequence[Part], *args: Any) -> Any:
        passes.append(parts)
        return run(parts, *args)

    monkeypatch.setattr(batcher.runner, "run", watched)
    return passes


def test_rows_draft_in_the_same_steps_and_never_beside_full_depth(
    windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(perfect_engine(), BatchSettings(max_batch=4, cohort_seconds=0, draft_rows=64))
    passes = watched_parts(batcher, monkeypatch)
    for prompt in PROMPTS:
        submit(batcher, prompt, 30, mode="lossless")
    list(run_dry(batcher))
    drafted = batcher.counters.drafted
    assert drafted > 0
    assert all(len({part.depth for part in parts}) == 1 for parts in passes)
    submit(batcher, PROMPTS[0], 12)
    submit(batcher, PROMPTS[1], 10, mode="lossless")
    list(run_dry(batcher))
    assert batcher.counters.drafted == drafted  # a layer that runs for one row costs the same for two


def test_an_answer_that_ends_inside_a_window_ends_where_full_depth_ends(tmp_path: Path, windows: Windows) -> None:
    loaded = load(save_tiny_chat_model(tmp_path), device="cpu")
    engine = perfect_engine(loaded.tokenizer, loaded.model)
    settings: dict[str, Any] = {"temperature": 0, "chat": False}
    free = engine.generate(["abc"], 40, mode="full", eos_token_id=-1, **settings)[0]
    batcher = Batcher(engine, SMALL)
    for place in (2, 9, 10, 11, 12, 13):
        for ending in ({"eos_token_id": free.token_ids[place]}, {"stop": free.text[place : place + 2] or "x"}):
            full = engine.generate(["abc"], 40, mode="full", **ending, **settings)[0]
            result = lossless_result(batcher, "abc", 40, **ending, **settings)
            assert (result.token_ids, result.text) == (full.token_ids, full.text)
            assert result.finish_reason == full.finish_reason
            check_account(result)
    for tokens in (1, 2, 3, 17):
        result = lossless_result(batcher, "abc", tokens, eos_token_id=-1, **settings)
        assert result.token_ids == free.token_ids[:tokens]
        assert result.finish_reason == "length"
    assert batcher.counters.accepted > 0


def test_a_row_may_go_in_the_middle_of_a_window(windows: Windows) -> None:
    batcher = Batcher(perfect_engine(), SMALL)
    stays, goes = (submit(batcher, prompt, 30, mode="lossless") for prompt in PROMPTS[:2])
    got = []
    while not all(row.drafts is not None and len(row.drafts.tokens) > 1 for row in batcher.rows) or not batcher.rows:
        got += [update.token for update in batcher.step() if update.id == stays]
    assert batcher.cancel(goes)
    got += [update.token for update in run_dry(batcher)]
    assert got == batcher.engine.generate(PROMPTS[:1], 30, mode="full")[0].token_ids
    assert_nothing_left(batcher)


def test_a_step_never_has_more_rows_than_drafts_may_fill(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = Batcher(perfect_engine(), BatchSettings(max_batch=4, cohort_seconds=0, draft_rows=6))
    passes = watched_parts(batcher, monkeypatch)
    for prompt in ([5, 6, 7], [44, 6, 90], [13, 28, 55]):
        answer = batcher.engine.generate([prompt], 30, mode="full")[0].token_ids
        windows.knows(prompt, answer)
        submit(batcher, prompt, 30, mode="lossless")
        for _ in range(4):
            batcher.step()
    list(run_dry(batcher))
    assert max(sum(len(part.tokens) for part in parts) for parts in passes if parts[0].length >= 3) == 6
    assert batcher.counters.accepted > 0


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"logprobs": 2}])
def test_what_reads_the_text_or_tells_of_every_token_goes_token_by_token(settings: Any, windows: Windows) -> None:
    batcher = Batcher(perfect_engine(), SMALL)
    submit(batcher, PROMPTS[0], 12, mode="lossless", **settings)
    (result,) = [update.result for update in run_dry(batcher) if update.result is not None]
    assert (result.drafted, result.verifications) == (0, 11)
    assert result.layer_speedup == 1.0


def test_drafts_pay_where_rows_are_free_and_not_where_each_costs_the_same() -> None:
    """According to measured step times, since all rows wait for a step."""
    free, dear = BatchPace(), BatchPace()
    for rows in range(1, 20):
        free.takes_to_verify(rows, 1.0)
        dear.takes_to_verify(rows, float(rows))
    for rows in (1, 4):
        assert TrackRecord(free.charged(rows), prior=0.6).best_rate > 1.5
        assert TrackRecord(dear.charged(rows), prior=0.9).best_rate == 1.0
    some = BatchPace()
    for rows in range(1, 20):
        some.takes_to_verify(rows, 1 + 0.1 * rows)
    rates = [TrackRecord(some.charged(rows), prior=0.6).best_rate for rows in (1, 4, 16)]
    assert rates == sorted(rates, reverse=True)
    for _ in range(3):
        free.saw_step(4, 1.0)
    free.saw_step(5, 1000.0)  # as if something was loaded meanwhile
    assert free.verify(5) < 1.5
    for seconds in (0.01, 0.02, 0.05, 0.04):  # the machine's speed changes, the relative cost of rows does not
        for rows in (4, 4, 4, 4, 6, 4):
            some.saw_step(rows, seconds * (1 + 0.1 * rows))
    assert some.verify(6) / some.verify(4) == pytest.approx(1.6 / 1.4, rel=0.15)


def test_the_real_model_answers_alike_alone_and_in_company(cache: Path) -> None:
    """With its calibrated plan and repair maps, and staggered arrivals."""
    loaded = load(device="cpu")
    engine = Engine(loaded.model, loaded.tokenizer, Plan.load(EMBEDDED_PLAN))
    batcher = Batcher(engine, BatchSettings(max_batch=4, prefill_tokens=32, max_positions=256))
    questions = ["Why is the sky blue?", "Name three colours of the rainbow and say why.", "What is bread made of?"]
    asks = [(question, mode) for question in questions for mode in ("decay", "full", "lossless")]
    got: dict[int, list[int | None]] = {}
    for question, mode in asks:
        (number,) = batcher.submit(prepare_request(engine, [question], 48, PLAIN_GREEDY), None, mode)
        got[number] = []
        for update in [update for _ in range(5) for update in batcher.step()]:
            got[update.id].append(update.token)
    for update in run_dry(batcher):
        got[update.id].append(update.token)
    for (question, mode), tokens in zip(asks, got.values(), strict=True):
        expected = engine.generate([question], 48, mode="decay" if mode == "decay" else "full", **PLAIN_GREEDY)[0]
        assert tokens == expected.token_ids
    assert_nothing_left(batcher)


def test_a_new_row_knows_how_often_others_found_the_right_words() -> None:
    batcher = Batcher(Engine(tiny_model(), None), SMALL)
    request = prepare_request(batcher.engine, [PROMPTS[0]], 8, {})
    first = RowDrafts(PROMPTS[0], request, True, batcher.drafting.found)
    for _ in range(30):
        first.tokens, first.source = [5, 6, 7], first.lookup
        first.judge([9, 9, 9, 9])  # all wrong
    second = RowDrafts(PROMPTS[0], request, True, batcher.drafting.found)
    assert second.lookup.acceptance == pytest.approx(batcher.drafting.found.value)
    assert second.lookup.acceptance < 0.3
    first.tokens, first.source = [5], TrackRecord(StepCosts(0.3), depth=4)
    before = batcher.drafting.found.value
    first.judge([5, 6])  # shallow-layer drafts do not count for lookup
    assert batcher.drafting.found.value == before
