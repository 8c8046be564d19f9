"""Layers that leave their last sum to the next one, without a GPU: the same text, with a kernel less per layer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from replays import replay_captures
from tiny_models import PROMPTS, tiny_model
from torch import fx

import depthdecay as dd
from depthdecay.cuda import exactness, gemv_pass, last_sum
from depthdecay.cuda.compiled_layers import CompiledLayers, free_rows, inductor_options, leaves_out
from depthdecay.cuda.kernels import gemv
from depthdecay.cuda.last_sum import Carried, added, give_addends, in_addends
from depthdecay.cuda.pass_graphs import PassGraphs
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.runners.contract import Ask, Part

LAYERS = 4
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 128,
    "sliding_window": None,
}


def test_layers_with_outputs_of_their_own_are_not_taken_for_addends() -> None:
    rest, left = torch.ones(1, 2, 8), torch.ones(4, 2, 8)
    assert leaves_out((rest, left), left)
    assert not leaves_out((rest, torch.zeros_like(left)), left)  # nothing is left out
    assert not any(leaves_out(output, left) for output in (rest, (rest,), (rest, None), (rest, torch.ones(1, 2)), None))


def exact_engine(monkeypatch: pytest.MonkeyPatch, model: Any, plan: dd.Plan) -> dd.Engine:
    """One that runs as on CUDA. Of products without our kernels the trial would say that they are not exact."""
    replay_captures(monkeypatch)
    monkeypatch.setattr(exactness.Exactness, "tell", lambda self, same_bits: setattr(self, "tried", True))
    torch._dynamo.reset()
    engine = dd.Engine(model, plan=plan, fast=False)
    engine.uses_graphs, engine.compiled = True, CompiledLayers()
    return engine


@pytest.mark.parametrize(
    ("architecture", "carries"),
    [
        ("qwen2", True),
        ("olmo2", False),  # normalizes the product before it adds it
    ],
)
def test_the_text_stays_the_same(architecture: str, carries: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(architecture, **SHAPE)
    plan = dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[2])
    expected = dd.Engine(model, plan=plan, fast=False).generate(PROMPTS[:1], 24, mode="full")[0].token_ids
    engine = exact_engine(monkeypatch, model, plan)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert engine.generate(PROMPTS[:1], 24, mode="full")[0].token_ids == expected
        lossless = engine.generate(PROMPTS[:1], 24, mode="lossless")[0]
    assert lossless.token_ids == expected
    assert lossless.drafted > 0
    assert engine.compiled is not None
    made = engine.compiled.in_addends
    assert all((layer is not None) == carries for layer in made.values())
    assert made or not carries


def drawn_map(start: int, end: int, width: int) -> Repair:
    return Repair(start, end, *(torch.randn(shape) * 0.05 for shape in ((32, width), (width, 32), (width,))))


def test_states_and_repaired_layers_get_whole_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass of two tokens that replaces two layers, the last among them, and is asked for states."""
    torch.manual_seed(0)
    stack = LayerStack.of(tiny_model(**SHAPE))
    repairs = Repairs({2: (drawn_map(1, 2, 256), drawn_map(3, 4, 256))})
    plan = dd.Plan.constant(LAYERS, 2, drop_order=[1, 3])
    monkeypatch.setattr(exactness, "why_inexact", lambda stack: None)
    torch._dynamo.reset()
    passes = PassGraphs(stack, plan, repairs, CompiledLayers(), batch=1, rooms=[128] * LAYERS)
    passes.run([Part(0, 0, PROMPTS[0], LAYERS, plan)])
    ids, positions = torch.tensor([[3, 9]]), torch.arange(2) + len(PROMPTS[0])

    def said(compiled: bool, depth: int) -> list[torch.Tensor]:
        passes.go_to(depth)
        rows = passes._compiled("few") if compiled else contextlib.nullcontext()
        with torch.no_grad(), passes._decoding_layout(128), rows:
            logits = passes.several(ids, positions, 128, Ask(states=(0, 1, 2, 3)))
        return [logits, *passes.layer_pass.states.values()]

    with torch._inductor.config.patch(force_disable_caches=True):
        for depth in (LAYERS, 2):
            torch.testing.assert_close(said(True, depth), said(False, depth), atol=1e-3, rtol=1e-3)
    assert passes.graphs.compiled is not None
    assert all(passes.graphs.compiled.in_addends.values())


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 13),
                reason="inductor's C++ drops casts there, which Triton's code keeps in every version",
            ),
        ),
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
        ),
    ],
)
def test_asking_for_states_changes_no_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is stored is rounded; one that stays in the next kernel must be too. Learned heads ask for states."""
    stack = LayerStack.of(tiny_model(**SHAPE).to(device, torch.bfloat16))
    monkeypatch.setattr(exactness, "why_inexact", lambda stack: None)
    plan = dd.Plan.full(LAYERS)
    torch._dynamo.reset()
    passes = PassGraphs(stack, plan, Repairs(), CompiledLayers(), batch=1, rooms=[128] * LAYERS)
    passes.run([Part(0, 0, PROMPTS[0], LAYERS, plan)])
    ids = torch.tensor([[3, 9]], device=device)
    positions = torch.arange(2, device=device) + len(PROMPTS[0])

    def said(states: tuple[int, ...]) -> torch.Tensor:
        passes.go_to(LAYERS)
        with torch.no_grad(), passes._decoding_layout(128), passes._compiled("few"):
            return passes.several(ids, positions, 128, Ask(states=states))

    with torch._inductor.config.patch(force_disable_caches=True):
        expected = said(())
        assert all(torch.equal(said(states), expected) for states in ((0,), (1, 2), (0, 1, 2, 3)))


def test_a_state_that_was_changed_between_layers_is_refused() -> None:
    carried = Carried(added)
    rest, left = torch.ones(1, 2, 8), torch.ones(3, 2, 8)
    assert carried.whole(rest) is rest  # nothing is left to be added
    assert torch.equal(carried.whole(carried.leave(rest, left)), torch.full((1, 2, 8), 4.0))
    with pytest.raises(RuntimeError, match="changes the state"):
        carried.whole(carried.leave(rest, left) * 2)


def test_the_first_kernel_of_the_next_layer_sums() -> None:
    """The default of `addends`, which would sum at once, is gone from the graph."""
    torch.manual_seed(0)
    down = torch.nn.Linear(1280, 128, bias=False).bfloat16()

    def forward(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer(hidden.repeat(1, 1, 10).sin())

    seen: list[fx.Graph] = []

    def watched(graph: fx.Graph) -> None:
        give_addends(graph)
        seen.append(graph)

    torch._dynamo.reset()
    parts = gemv.tiling([down.weight]).parts
    assert parts > 1
    given = torch.randn(1, 3, 128).bfloat16(), torch.randn(parts, 3, 128)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        monkeypatch.setattr(gemv_pass.last_sum, "give_addends", watched)
        with torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(in_addends(forward, parts), options=inductor_options("few"))
            free_rows(given)
            rest, left = compiled(down, *given)
    assert (rest.shape, left.shape, left.dtype) == ((1, 3, 128), (parts, 3, 128), torch.float32)
    assert left.any()
    torch.testing.assert_close(added(rest, left), forward(down, added(*given)), atol=0.05, rtol=0.05)
    assert not any(node.target is torch.ops.depthdecay.addends.default for graph in seen for node in graph.nodes)
    torch.library.opcheck(last_sum.addends, (rest, parts))
