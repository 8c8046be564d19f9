"""The graph path without a GPU: the same passes, buckets and device positions, replayed by calling them again."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import ORDERS, plan_with
from late_host import lag_behind
from reference import decoder_layers, reference_tokens
from replays import replay_captures
from tiny_models import LAYERS, PROMPTS, tiny_model
from torch.nn import functional

import depthdecay as dd
from depthdecay.cuda import compiled_layers, gemv_pass
from depthdecay.cuda import decode_attention as attention
from depthdecay.cuda.compiled_layers import CompiledLayers, free_rows, inductor_options
from depthdecay.cuda.kernels import dependent_launch as overlap
from depthdecay.cuda.kernels import gated_product, gemv
from depthdecay.cuda.kernels import split_attention as attend
from depthdecay.cuda.pass_graphs import PassGraphs
from depthdecay.engine.mailbox import Mailbox
from depthdecay.engine.request import prepare_request
from depthdecay.errors import DepthDecayError, NotCapturable
from depthdecay.model.kv_cache import bucket_for
from depthdecay.model.repairs import Repair
from depthdecay.runners.contract import SLOTS


def graph_engine(monkeypatch: pytest.MonkeyPatch, model: Any, plan: dd.Plan, compile: bool = False) -> dd.Engine:
    replay_captures(monkeypatch)
    engine = dd.Engine(model, plan=plan, fast=False)  # a CPU's compiled pass would run the prompt
    engine.uses_graphs = True
    engine.compiled = CompiledLayers() if compile else None
    return engine


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_buckets_and_device_clock_give_the_same_text(
    architecture: str, order: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = tiny_model(architecture), plan_with(order)
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)  # so that a short text crosses buckets
    engine = graph_engine(monkeypatch, model, plan)
    expected = [reference_tokens(model, plan, prompt, 24) for prompt in PROMPTS]
    results = engine.generate(PROMPTS, max_new_tokens=24)
    assert [(r.token_ids, r.depths) for r in results] == expected
    again = engine.generate(PROMPTS, max_new_tokens=20)  # graphs and cache are reused
    assert [r.token_ids for r in again] == [tokens[:20] for tokens, _ in expected]
    single = engine.generate(PROMPTS[:1], max_new_tokens=24)
    assert single[0].token_ids == expected[0][0]


@pytest.mark.parametrize("compile", [False, True])
def test_our_attention_gives_the_same_text(architecture: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compile and architecture not in ("llama", "gemma2", "gemma3_text"):
        pytest.skip("compiling takes long; one plain kind of layer and two mixed kinds show it")
    # transformers 5.17 runs Gemma 2 with SDPA, which ignores its softcap; we do not override that.
    name = "eager" if architecture == "gemma2" else "sdpa"
    model, plan = tiny_model(architecture, attn_implementation=name), plan_with(None)
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)
    monkeypatch.setattr(attention, "cuda_generation", lambda: 8)
    monkeypatch.setattr(attention, "can_attend", lambda query, key, value, seen: seen is not None and seen.dim() == 4)
    taken: list[int] = []
    plain = attend._reference
    monkeypatch.setattr(attend, "_reference", lambda *args: (taken.append(1), plain(*args))[1])
    monkeypatch.setattr(attention, "stepwise", functools.cache(attention.stepwise.__wrapped__))
    torch._dynamo.reset()
    engine = graph_engine(monkeypatch, model, plan, compile)
    result = engine.generate(PROMPTS[:1], max_new_tokens=24)[0]
    assert (result.token_ids, result.depths) == reference_tokens(model, plan, PROMPTS[0], 24)
    assert taken


def test_a_kept_decoder_forgets_the_padding_of_the_request_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(), plan_with(None)
    engine = graph_engine(monkeypatch, model, plan)
    engine.generate(PROMPTS, max_new_tokens=12)
    kept = engine.steps.last
    even = [prompt[:3] for prompt in PROMPTS]
    results = engine.generate(even, max_new_tokens=12)
    assert engine.steps.last is kept
    assert [r.token_ids for r in results] == [reference_tokens(model, plan, prompt, 12)[0] for prompt in even]


def test_a_single_row_leaves_room_for_a_longer_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)
    model, plan = tiny_model(), plan_with(None)
    engine = graph_engine(monkeypatch, model, plan)
    engine.generate(PROMPTS[:1], max_new_tokens=12)
    kept = engine.steps.last
    longer = PROMPTS[0] * (40 // len(PROMPTS[0]))
    result = engine.generate([longer], max_new_tokens=12)[0]
    assert engine.steps.last is kept
    assert result.token_ids == reference_tokens(model, plan, longer, 12)[0]


def test_inside_an_applied_block_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(), plan_with(None)
    engine = graph_engine(monkeypatch, model, plan)
    stream = engine._decode(prepare_request(engine, PROMPTS[:1], 8, {}), [dd.Result(num_layers=LAYERS, mode="decay")])
    next(stream)
    with warnings.catch_warnings(), dd.applied(model, plan):
        warnings.simplefilter("error")  # a refusal must not count as a failed capture
        with pytest.raises(DepthDecayError, match="applied"):
            next(stream)
    assert engine.steps.last is not None
    assert engine.steps.last.graphs.can_capture


def test_sampling_overwrites_what_the_graph_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(), plan_with(None)
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.2, "seed": 5, "repetition_penalty": 1.2}
    expected = dd.Engine(model, plan=plan).generate(PROMPTS, **settings)
    results = graph_engine(monkeypatch, model, plan).generate(PROMPTS, **settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tokens that the mailbox copied itself, while the host lags and passes are captured in mid-text."""
    copies: list[torch.Tensor] = []
    plain = Mailbox._copied
    monkeypatch.setattr(Mailbox, "_copied", lambda self, *given: (copies.append(given[0]), plain(self, *given))[1])
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 4)
    lag_behind(monkeypatch)
    return copies


def turns_agree(engine: dd.Engine) -> bool:
    passes = engine.steps.last
    return passes is not None and passes.turn.tolist() == [passes._turn]


@pytest.mark.parametrize("count", [1, len(PROMPTS)])
def test_steps_copy_their_tokens_to_a_host_that_lags(
    count: int, copied: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = tiny_model(), plan_with(None)
    engine = graph_engine(monkeypatch, model, plan)
    for new_tokens in (4 * SLOTS + 3, 2 * SLOTS + 1):  # the second request finds the graphs of the first
        results = engine.generate(PROMPTS[:count], new_tokens, eos_token_id=None)
        expected = [reference_tokens(model, plan, prompt, new_tokens)[0] for prompt in PROMPTS[:count]]
        assert [r.token_ids for r in results] == expected
        assert turns_agree(engine)
    assert len(copied) == 2  # the prompts' own tokens


def test_greedy_and_sampled_requests_share_graphs(copied: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(), plan_with(None)
    engine, eager = graph_engine(monkeypatch, model, plan), dd.Engine(model, plan=plan)
    sampled: dict[str, Any] = {"temperature": 1.2, "seed": 5}
    watched: dict[str, Any] = {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]}
    kept = None
    for settings, copies in (({}, 1), (sampled, 20), ({}, 1), (watched, 20), ({}, 1)):
        expected = eager.generate(PROMPTS, 20, eos_token_id=None, **settings)
        copied.clear()
        results = engine.generate(PROMPTS, 20, eos_token_id=None, **settings)
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        assert len(copied) == copies
        kept = kept or engine.steps.last
        assert engine.steps.last is kept


def test_eager_steps_between_replays_take_no_turn(copied: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(), plan_with(None)
    engine = graph_engine(monkeypatch, model, plan)
    graph, calls = PassGraphs.graph, itertools.count()

    def at_times(self: PassGraphs, *args: Any, **kwargs: Any) -> Any:
        if next(calls) % 5 > 2:
            raise NotCapturable("not this time")
        return graph(self, *args, **kwargs)

    monkeypatch.setattr(PassGraphs, "graph", at_times)
    results = engine.generate(PROMPTS, 26, eos_token_id=None)
    assert [r.token_ids for r in results] == [reference_tokens(model, plan, prompt, 26)[0] for prompt in PROMPTS]
    assert len(copied) == 1 + 2 * 5
    assert turns_agree(engine)


def test_a_capture_that_fails_in_mid_text_loses_no_token(
    copied: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = tiny_model(), plan_with(None)
    engine = graph_engine(monkeypatch, model, plan)
    replay_captures(monkeypatch, allowed=itertools.chain([True] * 3, itertools.repeat(False)))
    with pytest.warns(UserWarning, match="cannot run as CUDA graphs"):
        results = engine.generate(PROMPTS, 26, eos_token_id=None)
    assert [r.token_ids for r in results] == [reference_tokens(model, plan, prompt, 26)[0] for prompt in PROMPTS]
    assert 1 < len(copied) < 26
    assert turns_agree(engine)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "gpt2"])  # three names for the cache argument
def test_one_compilation_serves_all_layers(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(architecture), plan_with(ORDERS["first-layers-too"])
    engine = graph_engine(monkeypatch, model, plan, compile=True)
    monkeypatch.setattr(
        CompiledLayers, "function", lambda self, plain, dynamic=None, rows="one": plain
    )  # the functions around the layers
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = engine.generate(PROMPTS[:1], max_new_tokens=24)[0]
    assert result.token_ids == reference_tokens(model, plan, PROMPTS[0], 24)[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    indices = [{m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")} for layer in decoder_layers(model)]
    assert indices == [{i} for i in range(LAYERS)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products each call of our kernels replaced."""
    counts: list[int] = []
    replace = gemv_pass.GemvPass._replace
    monkeypatch.setattr(
        gemv_pass.GemvPass,
        "_replace",
        lambda self, graph, products: (counts.append(len(products)), replace(self, graph, products)),
    )
    return counts


@pytest.mark.parametrize(
    ("architecture", "groups"), [("llama", [3, 1, 2, 1]), ("qwen2", [3, 1, 2, 1]), ("phi3", [1] * 4)]
)
def test_products_that_share_their_input_become_one_call(
    architecture: str, groups: list[int], made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = tiny_model(architecture, sliding_window=None).to(torch.bfloat16), plan_with(None)
    torch._dynamo.reset()
    engine = graph_engine(monkeypatch, model, plan, compile=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        result = engine.generate(PROMPTS[:1], max_new_tokens=3)[0]
    assert len(result.token_ids) == 3
    assert made[: len(groups)] == groups


def test_gemv_without_a_gpu_is_the_plain_product() -> None:
    x, weights = torch.randn(1, 8), [torch.randn(5, 8), torch.randn(3, 8)]
    expected = torch.cat([x @ w.t() for w in weights], dim=1)
    assert torch.allclose(torch.ops.depthdecay.gemv(x, weights, False), expected)
    torch.library.opcheck(gemv.gemv, (x, weights, False))


def test_products_with_a_few_rows_become_one_call(made: list[int]) -> None:
    """Whatever the number of rows: the first is specialized, the second makes it symbolic."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(256, 128, bias=True).bfloat16(), torch.nn.Linear(256, 64, bias=False).bfloat16()
    odd = torch.nn.Linear(256, 33, bias=False).bfloat16()  # its last program is not full: it cannot share a launch
    narrow = torch.nn.Linear(33, 32, bias=False).bfloat16()  # not a multiple of the kernel's block of columns

    def products(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([first(x).relu(), second(x), narrow(odd(x))], dim=-1)

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(products, options=inductor_options("few"))
        for count in (3, 5, 16, 2):
            x = torch.randn(1, count, 256).bfloat16()
            assert torch.allclose(compiled(x).float(), products(x).float(), atol=0.03)
    assert made == [2, 1] * 2


class GatedMLP(torch.nn.Module):
    def __init__(self, rows: int, activation: Any) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(64, rows, bias=False).bfloat16() for _ in "ab")
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.activation(self.gate(x))


@pytest.mark.parametrize(
    ("rows", "activation", "calls"),
    [
        (132 * 32, functional.silu, []),
        (216 * 64, functional.silu, []),
        (64, functional.silu, [2]),  # too few programs
        (132 * 32, functional.gelu, [2]),
        (132 * 32, lambda x: functional.silu(x) + x, [2]),
        (132 * 32, lambda x: functional.silu(x.float()).to(x.dtype) * x, [2]),
    ],
)
def test_a_gated_activation_is_part_of_its_products(
    rows: int, activation: Any, calls: list[int], made: list[int]
) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(rows, activation)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(mlp.forward, options=inductor_options("few"))
        x = torch.randn(1, 3, 64).bfloat16()
        assert torch.allclose(compiled(x).float(), mlp(x).float(), atol=0.02)
        assert made == calls


def test_a_gated_product_without_a_gpu_is_the_plain_one() -> None:
    x, gate, up = torch.randn(3, 64), torch.randn(96, 64), torch.randn(96, 64)
    expected = functional.silu(x @ gate.t()) * (x @ up.t())
    assert torch.allclose(torch.ops.depthdecay.gated_product(x, gate, up, False), expected)
    torch.library.opcheck(gated_product.gated_product, (x, gate, up, False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_with_any_number_of_rows_are_compiled_once(made: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(256, 128, bias=True).to(dtype), torch.nn.Linear(256, 64, bias=False).to(dtype)

    def products(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([first(x).relu(), second(x)], dim=-1)

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(products, options=inductor_options("any"))
        for shape in ((40, 1), (3, 1), (2, 1), (1, 1)):
            x = torch.randn(*shape, 256).to(dtype)
            free_rows(x, "any")
            assert torch.allclose(compiled(x).float(), products(x).float(), atol=0.03)
    assert made == [2, 2]  # a single row is specialized


def test_a_few_rows_without_a_gpu_are_the_plain_product() -> None:
    x, weights = torch.randn(3, 1280), [torch.randn(128, 1280), torch.randn(64, 1280)]
    alone = torch.ops.depthdecay.skinny_gemm(x, weights[:1], False)
    assert alone.shape == (5, 3, 128)  # so few weight rows give few programs, so columns are split
    expected = torch.cat([x @ w.t() for w in weights], dim=1)
    got = torch.ops.depthdecay.skinny_gemm(x, weights, False)
    assert got.shape == (2, 3, 192)  # less often for several consumers
    assert torch.allclose(got.sum(0), expected)
    torch.library.opcheck(gemv.skinny_gemm, (x, weights, False))


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(), plan_with(None)
    engine = graph_engine(monkeypatch, model, plan)
    replay_captures(monkeypatch, allowed=itertools.repeat(False))
    with pytest.warns(UserWarning, match="cannot run as CUDA graphs"):
        results = engine.generate(PROMPTS, max_new_tokens=16)
    expected = dd.Engine(model, plan=plan).generate(PROMPTS, max_new_tokens=16)
    assert [(r.token_ids, r.depths) for r in results] == [(r.token_ids, r.depths) for r in expected]


def test_a_layer_that_needs_its_index_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model(), plan_with(None)
    plain = type(model.model.layers[0].mlp).forward
    for index, layer in enumerate(model.model.layers):
        layer.mlp.layer_idx = index
    monkeypatch.setattr(
        type(model.model.layers[0].mlp), "forward", lambda self, x: plain(self, x) * (1 + self.layer_idx % 3)
    )
    engine = graph_engine(monkeypatch, model, plan, compile=True)
    with pytest.warns(UserWarning, match="compiled layers differ from plain ones"):
        result = engine.generate(PROMPTS[:1], max_new_tokens=12)[0]
    assert result.token_ids == reference_tokens(model, plan, PROMPTS[0], 12)[0]


def test_buckets_cover_the_text_and_waste_little() -> None:
    before = 0
    for filled in range(1, 20000):
        bucket = bucket_for(filled)
        assert bucket >= filled
        assert bucket >= before
        assert bucket - filled < max(128, filled / 8 + 1)
        before = bucket
    assert len({bucket_for(n) for n in range(1, 32769)}) < 60


@pytest.mark.parametrize(("hidden", "keys", "inner"), [(1536, 256, 8960), (4096, 4096, 11008), (5120, 5120, 13824)])
def test_products_with_a_few_rows_fill_an_h200_in_one_wave(hidden: int, keys: int, inner: int) -> None:
    for rows, columns in (([hidden, keys, keys], hidden), ([hidden], hidden), ([inner] * 2, hidden), ([hidden], inner)):
        tile = gemv.tiling([torch.empty(count, columns, device="meta", dtype=torch.bfloat16) for count in rows])
        resident = {gemv.LOW.rows: 3, gemv.MIDDLE.rows: 2, gemv.TALL.rows: 2}[tile.rows]
        assert sum(rows) // tile.rows * tile.parts <= resident * 132


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hidden", "keys", "inner"), [(1536, 256, 8960), (4096, 4096, 11008), (8192, 1024, 28672)])
def test_products_with_a_few_rows_come_in_parts_that_the_next_kernel_sums(
    hidden: int, keys: int, inner: int, dtype: torch.dtype
) -> None:
    for rows, columns in (([hidden, keys, keys], hidden), ([hidden], hidden), ([inner] * 2, hidden), ([hidden], inner)):
        tile = gemv.tiling([torch.empty(count, columns, device="meta", dtype=dtype) for count in rows])
        assert all(count % tile.rows == 0 for count in rows)
        assert columns % (tile.parts * gemv.SKINNY_COLUMNS) == 0
        assert tile.parts < torch._inductor.config.unroll_reductions_threshold
        # With more, a kernel of its own would sum the parts for the several that read them.
        assert len(rows) == 1 or tile.parts < torch._inductor.config.realize_reads_threshold
        assert gemv.ALONE_PROGRAMS.start <= sum(rows) // tile.rows * tile.parts <= 2000


def test_compiled_maps_of_every_size_say_what_plain_ones_do(made: list[int]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = CompiledLayers()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        for neurons in (64, 128, 0, 192, 64):
            shapes = [(32, 48), (48, 32), (48,)] + ([(neurons, 48), (neurons, 48), (48, neurons)] if neurons else [])
            repair = Repair(0, 1, *(torch.randn(shape, dtype=torch.bfloat16) * 0.1 for shape in shapes))
            hidden = torch.randn((1, 1, 48), dtype=torch.bfloat16)
            torch.testing.assert_close(compiled.repair(repair)(hidden), repair(hidden), atol=0.05, rtol=0.05)
    assert made == [3, 1] * 2 + [1, 1] + [3, 1]  # our kernels in each of the four shapes


def test_generated_kernels_wait_before_their_first_access() -> None:
    kernel_class = pytest.importorskip("torch._inductor.codegen.triton").TritonKernel
    original = kernel_class._handle_pdl_before_access
    loops = SimpleNamespace(is_loop=True)
    for inside_loop, place in ((False, "loads"), (True, "body")):
        buffers = {name: SimpleNamespace(lines=[]) for name in ("loads", "body")}
        for buffer in buffers.values():
            buffer.writeline = buffer.lines.append
        kernel = SimpleNamespace(
            inside_reduction=inside_loop, range_trees=[loops], body=buffers["body"], GDC_WAIT=kernel_class.GDC_WAIT
        )
        kernel._enable_pdl_codegen = lambda: True
        with overlap.waiting_first():
            kernel_class._handle_pdl_before_access(kernel, buffers["loads"], "a weight that no kernel wrote")
        assert {name: len(buffer.lines) for name, buffer in buffers.items() if buffer.lines} == {place: 1}
    assert kernel_class._handle_pdl_before_access is original


def test_nothing_is_compiled_outside_the_place_where_kernels_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference pass for compiled layers must be plain: anything it compiled would overlap unsafely."""
    inside: list[bool] = []
    is_open = [False]

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        is_open[0] = True
        try:
            yield
        finally:
            is_open[0] = False

    def function(self: CompiledLayers, plain: Any, dynamic: bool | None = None, rows: str = "one") -> Any:
        inside.append(is_open[0])
        return plain

    monkeypatch.setattr(compiled_layers, "waiting_first", waiting)
    monkeypatch.setattr(CompiledLayers, "function", function)
    engine = graph_engine(monkeypatch, tiny_model(), plan_with(None), compile=True)
    engine.generate(PROMPTS[:1], max_new_tokens=4)
    assert inside
    assert all(inside)


@pytest.mark.parametrize("rows", [1, 5])
def test_products_over_one_column_are_multiplications(rows: int) -> None:
    """As rotary embedding multiplies frequencies by positions; with one row inductor makes `mm` of it on a GPU."""
    seen: list[str] = []

    def watched(graph: torch.fx.Graph) -> None:
        multiply_outer(graph)
        seen.extend(str(node.target) for node in graph.nodes)

    multiply_outer = gemv_pass._multiply_outer
    column, positions = torch.randn(1, 64, 1), torch.arange(rows, dtype=torch.float32)

    def products(column: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (column @ positions[None, None]).cos(), (column[0] @ positions[None]).sin()

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as monkeypatch, torch._inductor.config.patch(force_disable_caches=True):
        monkeypatch.setattr(gemv_pass, "_multiply_outer", watched)
        found = torch.compile(products, options=inductor_options("few"))(column, positions)
    torch.testing.assert_close(found, products(column, positions), atol=1e-6, rtol=0)
    assert not any("mm" in name for name in seen)
