"""A batch-invariant batch without a GPU: the kernels are replaced by running rows one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import SHALLOW, Windows, alone, random_repairs, run_dry, submit
from company import check_company, mixed_asks
from tiny_models import LAYERS, PROMPTS, VOCABULARY, tiny_model
from torch.nn import functional

from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.batching.prompt_reading import EXACT_PIECE
from depthdecay.cuda import exact_layer_graphs, exactness, layer_graphs
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.exact_layer_graphs import ExactLayerGraphs, parts_in_blocks
from depthdecay.cuda.kernels.paged_attention import attend_paged
from depthdecay.errors import DepthDecayError
from depthdecay.model.repairs import Repair, repaired, repaired_at_once
from depthdecay.runners.block_runner import MOST_IN_STEPS
from depthdecay.runners.forward import ForwardRunner

EXACT = BatchSettings(max_batch=6, prefill_tokens=1024, cohort_seconds=0, exact=True, max_positions=128)
LONG = replace(EXACT, max_positions=1400)
SAME = Plan.decay(LAYERS, "0.97")


class RowByRow(CompiledLayers):
    """Replaces compiled layers and their product kernel: each row is multiplied on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[tuple[str, int]] = set()

    def layer(self, stack: Any, index: int, rows: str, args: Any, kwargs: Any) -> Any:
        self.asked.add((rows, args[0].shape[0]))
        with products_by_row():
            return type(stack.layers[index]).forward(stack.layers[index], *args, **kwargs)

    def function(self, plain: Callable[..., Any], dynamic: bool | None = None, rows: str = "one") -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with products_by_row():
                return plain(*args, **kwargs)

        return run


@contextlib.contextmanager
def products_by_row() -> Iterator[None]:
    def by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        said = torch.bmm(x, weight.t().expand(len(x), -1, -1))
        return said if bias is None else said + bias

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", by_row)
        yield


def attended(*args: Any, exact: bool) -> torch.Tensor:
    """On a CPU the attention of each row is a separate product anyway."""
    assert exact
    return attend_paged(*args)


class Again:
    """Replaces the capturer: passes simply run again."""

    def __init__(self, steps: ExactLayerGraphs) -> None:
        self.steps = steps

    def capture(self, warm_up: Callable[[], None], run: Callable[[], None]) -> Any:
        warm_up()
        states = self.steps.states.clone() if hasattr(self.steps, "states") else None
        run()
        if states is not None:
            self.steps.states.copy_(states)  # nothing executes during a capture

        class Graph:
            def replay(_self) -> None:
                with self.steps._own_attention():
                    run()

        return Graph()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ExactLayerGraphs.__init__

    def made(self: ExactLayerGraphs, *args: Any) -> None:
        plain(self, *args)
        self.graphs.capturer = Again(self)  # type: ignore[assignment]

    monkeypatch.setattr(ExactLayerGraphs, "__init__", made)
    monkeypatch.setattr(layer_graphs, "attend_paged", attended)
    monkeypatch.setattr(exactness, "why_inexact", lambda stack: None)


def engine_of(model: Any = None, plan: Plan | None = None, **more: Any) -> Engine:
    engine = Engine(model or tiny_model(max_position_embeddings=2048), None, plan, fast=False, **more)
    engine.uses_graphs, engine.compiled = True, RowByRow()
    return engine


def test_an_answer_has_the_same_bits_alone_and_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every mode, greedy and seeded, with prompts prefilled as rows, in separate chunks, and both."""
    windows = Windows(monkeypatch)
    model = tiny_model(max_position_embeddings=2048)
    lengths = (3, 40, MOST_IN_STEPS, MOST_IN_STEPS + 1, EXACT_PIECE + 9, 2 * EXACT_PIECE + 300)
    batcher = Batcher(engine_of(model, SAME, repairs=random_repairs(SAME)), LONG)
    asks = mixed_asks(12, VOCABULARY, 14, lengths, SAME, ("full", "decay", "lossless"))
    for ask in asks:
        if ask["mode"] == "lossless":
            ask.pop("logprobs", None)
            windows.knows(ask["prompt"], [token for token, _ in alone(model, ask, None)])
    check_company(batcher, asks, (2, 6))
    assert 0 < batcher.counters.accepted < batcher.counters.drafted


def test_tokens_are_those_of_the_engine_alone() -> None:
    batcher = Batcher(engine_of(), EXACT)
    numbers = [submit(batcher, prompt, 9) for prompt in PROMPTS]
    got: dict[int, list[int | None]] = {number: [] for number in numbers}
    for update in run_dry(batcher):
        got[update.id].append(update.token)
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        assert got[number] == Engine(batcher.stack.model, None).generate([prompt], 9, mode="full")[0].token_ids


@pytest.mark.parametrize("mode", ["full", "decay", "lossless"])
def test_the_engine_answers_several_prompts_as_each_alone(mode: str) -> None:
    """Also with a penalty that sees the prompt: it must not see padding for the other prompts."""
    engine = engine_of(plan=SAME)
    settings: dict[str, Any] = {"exact": True, "mode": mode, "repetition_penalty": 1.3, "pad_token_id": 7}
    settings |= {"do_sample": True, "seed": 1, "eos_token_id": None}
    together = engine.generate(PROMPTS, 12, **settings)
    kept = engine.rows.last
    for prompt, result in zip(PROMPTS, together, strict=True):
        (single,) = engine.generate([prompt], 12, **settings)
        assert (single.exact, single.inexact_because) == (result.exact, result.inexact_because) == (True, None)
        assert (single.token_ids, single.depths) == (result.token_ids, result.depths)
        assert single.depths[-1] == (SAME.depth(11) if mode == "decay" else LAYERS)
    assert engine.rows.last is kept  # the same batch also serves fewer prompts


def test_a_cpu_refuses_to_be_exact() -> None:
    with pytest.raises(DepthDecayError, match="cannot be exact here: only our kernels"):
        Engine(tiny_model(), None).generate(PROMPTS, 2, exact=True)


def test_layers_never_run_with_one_row_nor_by_other_kernels() -> None:
    engine = engine_of()
    batcher = Batcher(engine, EXACT)
    submit(batcher, [5], 3)
    list(run_dry(batcher))
    assert {rows for rows, _ in engine.compiled.asked} == {"any"}
    assert min(count for _, count in engine.compiled.asked) == 2
    graphs = batcher.runner.graphs
    assert graphs is not None
    assert {count for _, count in engine.compiled.asked} == {*graphs.buckets, 3, 5}  # dynamo's two warm-up sizes
    assert sorted(graphs.buckets) == [2, 4, 8, 16, 32, 64, 128]


def test_pieces_of_a_prompt_go_by_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[tuple[int, int]] = []
    run = ForwardRunner.run

    def noted(self: ForwardRunner, parts: Any, *args: Any) -> Any:
        pieces.extend((part.length, len(part.tokens)) for part in parts)
        return run(self, parts, *args)

    batcher = Batcher(engine_of(), LONG)
    monkeypatch.setattr(ForwardRunner, "run", noted)
    prompt = [5] * (2 * EXACT_PIECE + 300)
    expected = [(0, EXACT_PIECE), (EXACT_PIECE, EXACT_PIECE), (2 * EXACT_PIECE, 300)]
    submit(batcher, prompt, 2)
    list(run_dry(batcher))
    assert pieces == expected
    pieces.clear()
    for other in ([6] * 20, prompt, [7] * 700, [8] * 400, [9] * 230):
        submit(batcher, other, 3)
    list(run_dry(batcher))
    assert sorted(pieces) == sorted([*expected, (0, EXACT_PIECE), (0, 400)])  # the rest of 700 is prefilled as rows


def test_a_long_prompt_holds_up_no_shorter_one_and_is_not_held_up_itself() -> None:
    batcher = Batcher(engine_of(), LONG)
    long = submit(batcher, [5] * 1300, 2)
    short = submit(batcher, [6] * 300, 3)
    batcher.step()
    assert [(row.id, row.length) for row in batcher.rows] == [(long, EXACT_PIECE), (short, 301)]


def test_a_trial_that_finds_other_bits_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ExactLayerGraphs.run

    def rounded(self: ExactLayerGraphs, parts: Any, *args: Any) -> Any:
        said = run(self, parts, *args)
        said.logits.mul_(1 + 1e-6 * (sum(len(part.tokens) for part in parts) > 40))
        return said

    monkeypatch.setattr(ExactLayerGraphs, "run", rounded)
    with pytest.raises(DepthDecayError, match="in a trial, this model"):
        Batcher(engine_of(), EXACT)


def test_a_trial_looks_at_maps_too_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: set[int] = set()
    run = ExactLayerGraphs.run

    def noted(self: ExactLayerGraphs, parts: Any, *args: Any) -> Any:
        depths.update(part.depth for part in parts)
        return run(self, parts, *args)

    monkeypatch.setattr(ExactLayerGraphs, "run", noted)
    repairs = random_repairs(SAME)
    batcher = Batcher(engine_of(plan=SAME, repairs=repairs), EXACT)
    assert depths == {LAYERS, min(repairs.at_depth)}
    assert batcher.usage().used == batcher.usage().promised == 0


def test_a_tiny_cache_is_tried_with_fewer_tokens() -> None:
    a_block = Batcher(engine_of(), BatchSettings(max_batch=1)).blocks.stores[0].block_bytes * LAYERS
    settings = BatchSettings(max_batch=2, cache_bytes=a_block, exact=True)
    assert Batcher(engine_of(), settings).inexact is None


def test_layers_that_cannot_be_captured_are_refused_and_nothing_runs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(exact_layer_graphs.ExactLayerGraphs, "_layer", broken)
    with pytest.raises(DepthDecayError, match=r"cannot be exact here.*no kernel for this"):
        Batcher(engine_of(), EXACT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda engine: setattr(engine, "uses_graphs", False), "only our kernels guarantee that"),
        (lambda engine: setattr(engine, "compiled", None), "layers are not compiled"),
        (lambda engine: engine.compiled.exactness.tell(same_bits=False), "a trial has shown"),
    ],
)
def test_what_cannot_be_promised_is_refused_by_its_reason(change: Callable[[Engine], None], reason: str) -> None:
    engine = engine_of()
    engine.compiled.exactness.examine(engine.stack)
    change(engine)
    with pytest.raises(DepthDecayError, match=f"answers cannot be exact here: .*{reason}"):
        Batcher(engine, EXACT)


def test_rows_of_other_batches_say_why_they_may_differ() -> None:
    batcher = Batcher(Engine(tiny_model(), None, fast=False), BatchSettings(max_batch=2))
    batcher.engine.uses_graphs = True  # only results depend on it now
    submit(batcher, PROMPTS[0], 2)
    results = [update.result for update in run_dry(batcher) if update.result is not None]
    assert [(result.exact, "rows of a batch" in str(result.inexact_because)) for result in results] == [(False, True)]


@pytest.mark.parametrize("neurons", [0, 5])
def test_maps_in_whole_blocks_are_the_same_maps(neurons: int) -> None:
    torch.manual_seed(0)
    hidden, rank = 256, 4
    shapes = [(rank, hidden), (hidden, rank), (hidden,)]
    shapes += [(neurons, hidden), (neurons, hidden), (hidden, neurons)] if neurons else []
    repair = Repair(1, 2, *(torch.randn(shape) * 0.1 for shape in shapes))
    parts = parts_in_blocks(repair)
    assert all(size % 128 == 0 for part in parts for size in part.shape)
    states = torch.randn((3, 1, hidden))
    torch.testing.assert_close(repaired_at_once(states, *parts), repaired(states, *repair.parts))


def test_shallow_drafts_are_verified_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    Windows(monkeypatch)
    batcher = Batcher(engine_of(plan=SHALLOW), EXACT)
    check_company(batcher, mixed_asks(6, VOCABULARY, 20, (3, 30), SHALLOW, ("lossless",)), (3,))
    assert batcher.counters.drafted > 0


@pytest.mark.parametrize(("architecture", "kinds"), [("llama", 1), ("gemma3_text", 2)])
def test_one_compilation_serves_every_number_of_rows(
    architecture: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really compiled. No graph runs code that dynamo specialized for one number of rows."""
    monkeypatch.setattr(layer_graphs, "attend_paged", attend_paged)
    model, plan = tiny_model(architecture), Plan.decay(LAYERS, "0.9")
    batcher = Batcher(Engine(model, None, plan, repairs=random_repairs(plan), fast=False), BatchSettings(max_batch=6))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    batcher.runner.use_exact_graphs(CompiledLayers(), 64)
    batcher.runner.capture_ahead()
    captured = counters["stats"]["unique_graphs"]
    # The layer's pieces around its attention, the final norm, the LM head, positions, and maps: each for 3 rows and
    # for a dynamic number.
    assert captured <= 2 * (4 * kinds + 4)
    numbers = [submit(batcher, prompt, 9, plan, "decay") for prompt in PROMPTS]
    updates = list(run_dry(batcher))
    assert counters["stats"]["unique_graphs"] == captured
    alone_engine = Engine(model, None, plan, repairs=random_repairs(plan), fast=False)
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        expected = alone_engine.generate([prompt], 9)[0].token_ids
        assert [update.token for update in updates if update.id == number] == expected
