"""Windows as CUDA graphs, without a GPU: the same graphs, replayed by calling them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lossless_answers import perfect_engine, token_ids
from replays import replay_captures
from tiny_models import ARCHITECTURES, LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.pass_graphs import Captured
from depthdecay.speculative.chain_lane import Chain, DeviceWindow, take_draft


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_graph_path_says_the_same(architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets, padded windows and positions kept on the device."""
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)
    replay_captures(monkeypatch)
    engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5]))
    prompts = PROMPTS[:1]
    expected = token_ids(engine, "full", prompts, 30, eos_token_id=None)
    engine.uses_graphs = True
    for settings in ({}, {"lookup": False}):
        results = engine.generate(prompts, 30, mode="lossless", eos_token_id=None, **settings)
        assert [result.token_ids for result in results] == expected
        assert all(len(result.draft_depths) == 30 for result in results)
    kept = engine.lanes.chain.last
    assert kept is not None
    assert {key[0] for key in kept.passes.graphs.by_key} == {"draft", "verify"}
    # Graphs and cache are reused, for a shorter text and for a longer one.
    for prompt, tokens in ((prompts[0][1:], 20), ([*prompts[0], *PROMPTS[1]], 40)):
        engine.generate([prompt], tokens, mode="lossless", eos_token_id=None)
        assert engine.lanes.chain.last is kept
    assert token_ids(engine, "lossless", prompts, 30, eos_token_id=None) == expected


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])  # with 4D masks, and with sliding windows
def test_compiled_windows_say_the_same(architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled: layers, the modules around them, masks and the ends of passes."""
    torch._dynamo.reset()
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)
    replay_captures(monkeypatch)
    model = tiny_model(architecture)
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5]), fast=False)
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
    engine.uses_graphs, engine.compiled = True, CompiledLayers()
    for settings in ({}, {"lookup": False}):
        (result,) = engine.generate(PROMPTS[:1], 30, mode="lossless", eos_token_id=None, **settings)
        assert [result.token_ids] == expected
        assert result.drafted > 0
    assert engine.lanes.chain.last is not None
    graphs = engine.lanes.chain.last.passes.graphs
    assert graphs.can_capture
    assert graphs.compiled is engine.compiled  # no fallback
    assert graphs.compared == {"one", "few"}
    norm = next(child for name, child in engine.stack.owner.named_children() if name == "norm")
    assert "forward" not in norm.__dict__  # restored


def test_captures_and_timings_leave_no_trace(windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run a pass before the one that counts. It must start where that one does, or it overruns the bucket."""
    timed: list[Captured] = []

    def time(self: Chain, captured: Captured) -> float:
        timed.append(captured)
        for _ in range(4):
            with self.passes.unchanged():
                captured.graph.replay()
        return 1.0

    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)
    replay_captures(monkeypatch)
    monkeypatch.setattr(Chain, "_time", time)
    engine = perfect_engine()  # all drafts are accepted, so an extra pass would advance by a whole window
    for start in range(len(PROMPTS[0])):
        prompt = PROMPTS[0][start:]
        expected = token_ids(engine, "full", [prompt], 60, eos_token_id=None)
        engine.uses_graphs = True
        assert token_ids(engine, "lossless", [prompt], 60, eos_token_id=None) == expected
        engine.uses_graphs = False
    assert {captured.layer_pass.layers_executed for captured in timed} == {LAYERS - 1, LAYERS}


@pytest.mark.parametrize("rows", ["one", "few"])
def test_compiled_layers_that_say_something_else_are_given_up(
    rows: str, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that uses its index for anything besides the cache is wrong once all layers share one."""

    def layer(self: CompiledLayers, stack: Any, index: int, kind: str, args: Any, kwargs: Any) -> Any:
        output = stack.layers[index].__class__.forward(stack.layers[index], *args, **kwargs)
        return output if kind != rows else output + index

    def carrying(self: CompiledLayers, stack: Any, index: int, carried: Any, args: Any, kwargs: Any) -> Any:
        return self.layer(stack, index, "few", args, kwargs)

    replay_captures(monkeypatch)
    monkeypatch.setattr(CompiledLayers, "layer", layer)
    monkeypatch.setattr(CompiledLayers, "carrying_layer", carrying)
    monkeypatch.setattr(CompiledLayers, "function", lambda self, plain, dynamic=None, rows="one": plain)
    engine = perfect_engine()
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
    engine.uses_graphs, engine.compiled = True, CompiledLayers()
    with pytest.warns(UserWarning, match="compiled layers differ from plain ones"):
        assert token_ids(engine, "lossless", PROMPTS[:1], 30, eos_token_id=None) == expected
    assert engine.lanes.chain.last is not None
    assert engine.lanes.chain.last.passes.graphs.compiled is None


@pytest.mark.parametrize("allowed", [0, 1, 2, 3])
def test_a_pass_that_cannot_be_captured_is_run_eagerly(
    allowed: int, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first graph, or after some windows. The next request does not try again."""
    engine = perfect_engine()
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
    replay_captures(monkeypatch, iter([True] * allowed + [False]))
    engine.uses_graphs = True
    with pytest.warns(UserWarning, match="eagerly: no capture"):
        assert token_ids(engine, "lossless", PROMPTS[:1], 30, eos_token_id=None) == expected
    assert token_ids(engine, "lossless", PROMPTS[:1], 30, eos_token_id=None) == expected


@pytest.mark.parametrize("lookup", [0, 3])
def test_plain_steps_run_ahead_while_drafting_pauses(lookup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_captures(monkeypatch)
    under_way: list[int] = []
    collect = Chain.collect

    def counted(self: Any) -> list[int]:
        under_way.append(len(self._underway))
        return collect(self)

    monkeypatch.setattr(Chain, "collect", counted)
    engine = dd.Engine(tiny_model("llama"), plan=dd.Plan.constant(LAYERS, 4, drop_order=[3, 5, 2, 6]))
    for tokens in (1, 2, 3, 60):
        expected = token_ids(engine, "full", PROMPTS[:1], tokens, eos_token_id=None)
        engine.uses_graphs = True
        assert token_ids(engine, "lossless", PROMPTS[:1], tokens, eos_token_id=None, lookup=lookup) == expected
        engine.uses_graphs = False
    assert set(under_way) == {1, 2}
    assert under_way.count(2) > 20


@pytest.mark.parametrize(("lookup", "most_finds"), [(0, 0.3), (3, -1.0), (3, 1.0)])
def test_a_window_is_begun_before_the_last_one_is_known(
    lookup: int, most_finds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the device does not wait for the host. If lookup often finds something, such drafts would be wasted."""
    monkeypatch.setattr("depthdecay.speculative.lossless.MOST_FINDS", most_finds)
    replay_captures(monkeypatch)
    ahead: list[bool] = []
    verify, draft = Chain.verify, Chain.draft
    passes = 0

    def launched(self: Any, width: int) -> None:
        nonlocal passes
        passes += LAYERS
        verify(self, width)

    def drafted(self: Any, depth: int, step: int) -> None:
        nonlocal passes
        passes += depth
        if step == 0:
            ahead.append(bool(self._underway))
        draft(self, depth, step)

    monkeypatch.setattr(Chain, "verify", launched)
    monkeypatch.setattr(Chain, "draft", drafted)
    engine = perfect_engine()
    engine.lanes.drafting(engine.repairs).pace.takes_to_draft(7, 0.1)
    engine.lanes.drafting(engine.repairs).pace.takes_to_verify(1, 1.0)
    expected = token_ids(engine, "full", PROMPTS[:1], 60, eos_token_id=None)
    engine.uses_graphs = True
    for _ in range(3):
        passes = LAYERS  # the first token comes from the prefill
        (result,) = engine.generate(PROMPTS[:1], 60, mode="lossless", eos_token_id=None, lookup=lookup)
        assert [result.token_ids] == expected
        assert result.layer_passes == passes  # including wasted drafts
    assert ahead.count(True) > 6 if most_finds > 0 else not any(ahead)


@pytest.mark.parametrize("width", [64 * 5, 100])
def test_a_draft_is_the_likeliest_token_with_its_probability(width: int) -> None:
    window = DeviceWindow(torch.device("cpu"))
    window.turn.fill_(2)
    names = torch.randperm(1000)[:width]
    for step in range(3):
        logits = torch.randn(1, width) * 3
        take_draft(logits, names, window.ids, window.drafted, window.confidences, window.turn)
        assert window.drafted.item() == step + 1
        assert window.ids[0, step + 1] == names[logits.argmax()]
        assert float(window.confidences[2, step]) == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)
