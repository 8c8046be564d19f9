"""The batch's graphs without a GPU: operations are recorded when a graph is captured, and only these run again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import (
    SHALLOW,
    SMALL,
    Windows,
    assert_nothing_left,
    check_random_arrivals,
    random_repairs,
    run_dry,
    submit,
)
from tiny_models import LAYERS, PROMPTS, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.cuda import layer_graphs as layer_graphs_module
from depthdecay.cuda.capture_or_fallback import Graphs
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.kernels.paged_attention import Paged, attend_paged, parts_for
from depthdecay.cuda.layer_graphs import LayerGraphs, bucket_of
from depthdecay.errors import GuessedPlanWarning
from depthdecay.runners.contract import Ask, Part, Profile

# What a capture rejects: synchronizing with the device, or copying from pageable memory.
_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::lift_fresh"}


class Noted(TorchDispatchMode):
    """Replaces a CUDA graph: the operations of a pass with their tensors, and no Python in between."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _WAITS:
            raise RuntimeError(f"{func._schema.name} is not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


class Notes:
    """Replaces the capturer. Recording leaves no trace, since in a real capture nothing executes."""

    steps: LayerGraphs

    def capture(self, warm_up: Callable[[], None], run: Callable[[], None]) -> Noted:
        warm_up()
        states = getattr(self.steps, "states", None)
        before = None if states is None else states.clone()
        graph = Noted()
        with graph:
            run()
        if before is not None:
            self.steps.states.copy_(before)
        return graph


class NotedSteps(LayerGraphs):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        notes: Any = Notes()
        notes.steps = self
        self.graphs = Graphs(self.graphs.compiled, self.graphs.whose, notes)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch here runs as graphs; single requests run as usual."""
    monkeypatch.setattr(layer_graphs_module, "LayerGraphs", NotedSteps)
    plain = Batcher.__init__

    def with_graphs(self: Batcher, engine: Engine, *args: Any, **kwargs: Any) -> None:
        engine.uses_graphs = True
        plain(self, engine, *args, **kwargs)

    monkeypatch.setattr(Batcher, "__init__", with_graphs)


def steps_of(batcher: Batcher) -> LayerGraphs:
    assert batcher.runner.graphs is not None
    return batcher.runner.graphs


def test_random_arrivals_give_every_request_its_solo_tokens(architecture: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no fallback
        warnings.simplefilter("ignore", GuessedPlanWarning)
        check_random_arrivals(tiny_model(architecture), seed=1)


def test_lossless_rows_draft_among_others(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification is some rows of the step, next to prompts that are prefilled within it."""
    model, windows = tiny_model(architecture), Windows(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", GuessedPlanWarning)
        batcher = check_random_arrivals(model, seed=5, modes=("lossless", "lossless", "decay", "full"), windows=windows)
        assert 0 < batcher.counters.accepted < batcher.counters.drafted
        windows.texts.clear()
        batcher = check_random_arrivals(model, seed=6, modes=("lossless", "lossless", "decay"), plans=[SHALLOW])
    assert batcher.counters.drafted > 0


def test_a_model_that_waits_for_the_device_runs_eagerly_and_says_so() -> None:
    model = tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.warns(UserWarning, match="cannot run as CUDA graphs"):
        check_random_arrivals(model, seed=1)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_one_depth_share_their_own_repairs(seed: int) -> None:
    check_random_arrivals(tiny_model(), seed, random_repairs(Plan.decay(LAYERS, "0.9")))


def test_little_room_and_blocks_that_change_hands_change_no_token() -> None:
    model = tiny_model()
    a_block = Batcher(Engine(model, None), SMALL).blocks.stores[0].block_bytes * LAYERS
    check_random_arrivals(model, 2, settings=BatchSettings(max_batch=4, prefill_tokens=6, cache_bytes=5 * a_block))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral", "gpt2"])
def test_a_graph_step_is_the_eager_step(architecture: str) -> None:
    """Rows at several depths, among them a prompt and a verification, and padding rows in each graph."""
    plan, settings = Plan.decay(LAYERS, "0.93"), BatchSettings(max_batch=5, prefill_tokens=6, cohort_seconds=0)
    batcher = Batcher(Engine(tiny_model(architecture), None, plan, repairs=random_repairs(plan)), settings)
    for number, prompt in enumerate(PROMPTS):
        submit(batcher, prompt, 20, plan if number else None, "decay" if number else "full")
        for _ in range(4):
            batcher.step()
    steps, parts = steps_of(batcher), []
    for row in sorted(batcher.rows, key=lambda row: -row.depth):
        parts.append(Part(row.slot, row.length, row.next_tokens(), row.depth, row.plan))
        batcher.blocks.extend(row.slot, row.plan.layers(row.depth), row.length + 1)
    slot = batcher.blocks.enter(batcher.blocks.needs(Plan.full(LAYERS), 20, 1)[LAYERS])
    batcher.blocks.extend(slot, range(LAYERS), 20)
    parts.insert(0, Part(slot, 0, list(range(5, 25)), LAYERS, Plan.full(LAYERS)))
    slot = batcher.blocks.enter(batcher.blocks.needs(Plan.full(LAYERS), 20, 1)[LAYERS])
    batcher.blocks.extend(slot, range(LAYERS), 20)
    parts.insert(0, Part(slot, 0, list(range(30, 35)), LAYERS, Plan.full(LAYERS), wanted=5))
    assert len({part.depth for part in parts}) > 2
    others = [(store.keys.clone(), store.values.clone()) for store in batcher.blocks.stores]
    said = steps.run(parts)
    after = [(store.keys.clone(), store.values.clone()) for store in batcher.blocks.stores]
    for store, (keys, values) in zip(batcher.blocks.stores, others, strict=True):
        store.keys.copy_(keys)
        store.values.copy_(values)
    expected = batcher.runner.forward.run(parts)
    torch.testing.assert_close(said.logits, expected.logits, atol=2e-4, rtol=2e-4)
    assert said.tokens_run == expected.tokens_run
    for store, states in zip(batcher.blocks.stores, after, strict=True):
        for eager, graph in zip((store.keys, store.values), states, strict=True):
            torch.testing.assert_close(
                graph[: store.scratch], eager[: store.scratch], atol=1e-3, rtol=1e-3, equal_nan=True
            )


def test_prompts_are_read_within_the_steps_of_others() -> None:
    batcher = Batcher(Engine(tiny_model(), None), SMALL)
    fast = submit(batcher, [5], 8)
    batcher.step()
    slow = submit(batcher, [6] * 30, 2)
    assert sorted(update.id for update in batcher.step()) == [fast, slow]
    long = submit(batcher, [7] * 250, 2)
    assert [update.id for update in batcher.step()] == [fast, slow]
    assert batcher.rows[-1].length == steps_of(batcher).rows - 2
    assert long in [update.id for update in run_dry(batcher)]
    assert_nothing_left(batcher)


def test_graphs_are_few_and_captured_once() -> None:
    plan = Plan.decay(LAYERS, "0.8")
    batcher = Batcher(Engine(tiny_model(), None, plan), SMALL)
    batcher.warm_up()
    captured = dict(steps_of(batcher).graphs.by_key)
    sizes = {bucket_of(rows) for rows in range(1, steps_of(batcher).rows + 1)}
    assert len(captured) == LAYERS * len(sizes) + 2
    for prompt in PROMPTS:
        submit(batcher, prompt, 12, plan, "decay")
    assert sum(update.finished for update in run_dry(batcher)) == 3
    assert steps_of(batcher).graphs.by_key == captured
    assert batcher.counters.layers_executed == 3 * sum(plan.depths(12)[1:])


def test_graphs_that_say_something_else_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    expected = Engine(model, None).generate(PROMPTS[:1], 9, mode="full")[0].token_ids
    monkeypatch.setattr("depthdecay.cuda.layer_graphs.attend_paged", lambda *args: attend_paged(*args) * 1.5)
    batcher = Batcher(Engine(model, None), SMALL)
    submit(batcher, PROMPTS[0], 9)
    with pytest.warns(UserWarning, match="graphs of layers differ from plain ones"):
        tokens = [update.token for update in run_dry(batcher)]
    assert tokens == expected
    assert batcher.runner.graphs is None


def test_a_model_is_left_as_it_was_found() -> None:
    model = tiny_model()
    before = dict(model.config.__dict__)
    batcher = Batcher(Engine(model, None), SMALL)
    submit(batcher, PROMPTS[0], 4)
    list(run_dry(batcher))
    assert model.config.__dict__ == before
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


def test_buckets_cover_and_are_few() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 9, 33, 64, 65, 128, 129)] == [1, 2, 4, 16, 64, 64, 128, 128, 192]
    assert [parts_for(programs) for programs in (1, 64, 300, 528, 4096)] == [16, 16, 2, 1, 1]


def test_a_profile_counts_rows_by_layer_and_depth() -> None:
    plan = Plan.constant(4, 3, drop_order=[1])
    profile = Profile.of([Part(0, 0, [5, 6, 7], 4, Plan.full(4)), Part(1, 9, [8], 3, plan)])
    assert profile == Profile([4, 3, 4, 4], {4: (0, 3), 3: (3, 1)})


def test_attention_sees_a_row_s_own_text_only() -> None:
    """Compared with torch's attention over each row's gathered keys."""
    torch.manual_seed(0)
    table = torch.randperm(60)[:45].add(1).view(3, 3, 5).int()
    keys, values = torch.randn(61 * 16, 2, 8), torch.randn(61 * 16, 2, 8)
    slots, positions = torch.tensor([2, 0, 0, 1]), torch.tensor([70, 4, 5, 33])
    query = torch.randn(4, 6, 1, 8)
    found = attend_paged(query, keys, values, Paged(table, slots, positions, torch.tensor([4, 3, 4])), 1, 0.3, 20)
    for row in range(3):
        last = int(positions[row])
        seen = torch.arange(max(0, last - 19), last + 1)
        places = table[slots[row], 1][seen // 16].long() * 16 + seen % 16
        own = [store[places].transpose(0, 1).repeat_interleave(3, dim=0) for store in (keys, values)]
        expected = torch.nn.functional.scaled_dot_product_attention(query[row], *own, scale=0.3)
        torch.testing.assert_close(found[row, 0], expected[:, 0])
    assert not found[3].any()


class Again:
    """Replaces the capturer for compiled layers, whose operations cannot be recorded: passes simply run again."""

    def __init__(self, steps: LayerGraphs) -> None:
        self.steps = steps

    def capture(self, warm_up: Callable[[], None], run: Callable[[], None]) -> Any:
        warm_up()

        def replay() -> None:
            with self.steps._own_attention():
                run()

        return SimpleNamespace(replay=replay)


@pytest.mark.parametrize(("architecture", "kinds"), [("llama", 1), ("gemma3_text", 2), ("gpt2", 1)])
def test_compiled_pieces_serve_all_layers_of_a_kind(
    architecture: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = tiny_model(architecture), Plan.decay(LAYERS, "0.9")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batcher = Batcher(Engine(model, None, plan), SMALL)
    batcher.runner.use_graphs(CompiledLayers(), 64)
    steps_of(batcher).graphs.capturer = Again(steps_of(batcher))  # type: ignore[assignment]
    numbers = [submit(batcher, prompt, 9, plan, "decay") for prompt in PROMPTS]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", GuessedPlanWarning)
        updates = list(run_dry(batcher))
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        expected = Engine(model, None, plan).generate([prompt], 9)[0].token_ids
        assert [update.token for update in updates if update.id == number] == expected
    # For one row, for a second number, and then for a dynamic one.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4 * 3 * kinds
    assert [module.layer_idx for module in model.modules() if hasattr(module, "layer_idx")][-1] == LAYERS - 1


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_states_are_handed_out_as_by_an_eager_pass(architecture: str) -> None:
    plan, asked = Plan.constant(LAYERS, LAYERS - 3, drop_order=[3, 4, 6]), Ask(states=(0, 3, 4, LAYERS - 1))
    batcher = Batcher(Engine(tiny_model(architecture), None, plan, repairs=random_repairs(plan)), SMALL)
    slots = [batcher.blocks.enter(batcher.blocks.needs(Plan.full(LAYERS), 20, 1)[LAYERS]) for _ in range(2)]
    parts = [Part(slots[0], 0, [5, 6, 7], LAYERS, plan, wanted=2), Part(slots[1], 0, [9], LAYERS - 3, plan)]
    for part in parts:
        batcher.blocks.make_room(part)
    said, expected = steps_of(batcher).run(parts, asked), batcher.runner.forward.run(parts, asked)
    assert said.states.keys() == expected.states.keys() == set(asked.states)
    for layer, states in expected.states.items():
        torch.testing.assert_close(said.states[layer], states, atol=2e-4, rtol=2e-4)
