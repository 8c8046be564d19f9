"""The batch on a GPU: graphs of layers and paged attention. Skipped without one."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from batches import (
    SHALLOW,
    SMALL,
    Windows,
    alone,
    check_random_arrivals,
    random_asks,
    random_repairs,
    run_dry,
    submit,
)
from tiny_models import LAYERS, PROMPTS, tiny_model

from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.cuda.kernels import paged_attention as paged_module
from depthdecay.cuda.kernels.paged_attention import Paged, attend_paged
from depthdecay.cuda.layer_graphs import bucket_of
from depthdecay.runners.contract import Part

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def on_gpu(architecture: str = "llama", **changes: Any) -> Any:
    return tiny_model(architecture, **changes).cuda()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma3_text", "gpt2", "phi3"])
def test_random_arrivals_give_every_request_its_solo_tokens(architecture: str) -> None:
    """In float32, since a request alone runs as different graphs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot run as CUDA graphs")
        check_random_arrivals(on_gpu(architecture), seed=1)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_lossless_rows_draft_among_others(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = on_gpu(architecture), Windows(monkeypatch)
    batcher = check_random_arrivals(model, seed=5, modes=("lossless", "lossless", "decay", "full"), windows=windows)
    assert 0 < batcher.counters.accepted < batcher.counters.drafted
    windows.texts.clear()
    batcher = check_random_arrivals(model, seed=6, modes=("lossless", "lossless", "decay"), plans=[SHALLOW])
    assert batcher.counters.drafted > 0


def test_rows_of_one_depth_share_their_own_repairs() -> None:
    check_random_arrivals(on_gpu(), 0, random_repairs(Plan.decay(LAYERS, "0.9")))


def test_a_wide_batch_gives_the_cpu_s_tokens() -> None:
    """Many rows at once, more than one bucket, and blocks that are reused; compared with single requests on a CPU."""
    plan = Plan.decay(LAYERS, "0.95")
    settings = BatchSettings(max_batch=24, prefill_tokens=64, cohort_seconds=0)
    batcher = Batcher(Engine(on_gpu(), None, plan, compile=False), settings)
    batcher.warm_up()
    asks = [ask | {"plan": plan} if ask["mode"] == "decay" else ask for ask in random_asks(random.Random(3), 40)]
    numbers = [submit(batcher, **ask) for ask in asks]
    got: dict[int, list[int | None]] = {number: [] for number in numbers}
    for update in run_dry(batcher):
        assert update.error is None
        got[update.id].append(update.token)
    assert batcher.runner.graphs is not None
    model = tiny_model()
    for number, ask in zip(numbers, asks, strict=True):
        assert got[number] == [token for token, _ in alone(model, ask, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a_graph_step_is_the_eager_step(architecture: str, dtype: torch.dtype) -> None:
    """Rows at several depths, among them a prompt of several tokens, and padding rows in each graph."""
    plan = Plan.decay(LAYERS, "0.93")
    engine = Engine(on_gpu(architecture).to(dtype), None, plan, repairs=random_repairs(plan), compile=False)
    batcher = Batcher(engine, SMALL)
    batcher.warm_up()
    for number, prompt in enumerate(PROMPTS):
        submit(batcher, prompt, 20, plan if number else None, "decay" if number else "full")
        for _ in range(4):
            batcher.step()
    parts = []
    for row in sorted(batcher.rows, key=lambda row: -row.depth):
        parts.append(Part(row.slot, row.length, row.next_tokens(), row.depth, row.plan))
        batcher.blocks.extend(row.slot, row.plan.layers(row.depth), row.length + 1)
    slot = batcher.blocks.enter(batcher.blocks.needs(Plan.full(LAYERS), 20, 1)[LAYERS])
    batcher.blocks.extend(slot, range(LAYERS), 20)
    parts.insert(0, Part(slot, 0, list(range(5, 25)), LAYERS, Plan.full(LAYERS)))
    assert batcher.runner.graphs is not None
    said = batcher.runner.graphs.run(parts)
    eager = batcher.runner.forward.run(parts)
    logits, expected = said.logits, eager.logits
    error = float((logits.float() - expected.float()).norm() / expected.float().norm())
    assert error < (1e-4 if dtype == torch.float32 else 0.1)
    assert said.tokens_run == eager.tokens_run


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows' settings, and during prefill: the host waits for nothing but the tokens."""
    plan = Plan.decay(LAYERS, "0.9")
    batcher = Batcher(Engine(on_gpu(), None, plan, compile=False), BatchSettings(max_batch=8, cohort_seconds=0))
    batcher.warm_up()
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    ]
    for prompt, more in zip(PROMPTS, settings, strict=True):
        submit(batcher, prompt, 30, plan, "decay", **more)
    steps = batcher.runner.graphs
    assert steps is not None
    run = steps.run

    def strict(parts: Any, *args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(parts, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for _ in range(3):
        batcher.step()
    monkeypatch.setattr(steps, "run", strict)
    submit(batcher, [9] * 20, 10, plan, "decay")
    assert sum(update.finished for update in run_dry(batcher)) == 4
    assert batcher.counters.errors == 0


def test_graphs_are_captured_ahead_and_take_little() -> None:
    before = torch.cuda.memory_reserved()
    batcher = Batcher(Engine(on_gpu(), None, compile=False), BatchSettings(max_batch=64, max_positions=256))
    batcher.warm_up()
    assert batcher.runner.graphs is not None
    sizes = {bucket_of(rows) for rows in range(1, batcher.runner.graphs.rows + 1)}
    assert len(batcher.runner.graphs.graphs.by_key) == LAYERS * len(sizes) + 2
    assert torch.cuda.memory_reserved() - before - batcher.usage().total < 2**28


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(32, 32, 128), (12, 2, 128), (4, 2, 8), (40, 2, 64), (6, 6, 80)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (None, 20.0)])
def test_attention_over_blocks_is_exact_up_to_rounding(
    heads: int, groups: int, size: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows, slots, layers, most = 9, 7, 3, 40
    keys, values = (torch.randn((300 * 16, groups, size), device="cuda").to(dtype) for _ in "kv")
    table = torch.randint(1, 300, (slots, layers, most), device="cuda").int()
    inputs = [torch.randint(0, slots, (rows,)), torch.randint(0, most * 16, (rows,)), torch.tensor([rows, 5, 0])]
    paged = Paged(table, *(tensor.cuda() for tensor in inputs))
    query = torch.randn((rows, 1, heads, size), device="cuda").to(dtype).transpose(1, 2)
    for layer in range(layers):
        got = attend_paged(query, keys, values, paged, layer, 0.1, window, softcap).double()
        wide = [tensor.double() for tensor in (query, keys, values)]
        exact = paged_module._reference(*wide, paged, layer, 0.1, window, softcap).double()
        error = float((got - exact).norm() / exact.norm().clamp(min=1e-9))
        assert error < (2e-5 if dtype == torch.float32 else 1e-2)
