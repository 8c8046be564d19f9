"""A learned head in windows that run as CUDA graphs, without a GPU: graphs are replayed by calling them again."""

from __future__ import annotations

import pytest
import torch
from draft_heads import random_head, states_of
from lossless_answers import token_ids
from replays import replay_captures
from tiny_models import PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.model.layers import LayerStack
from depthdecay.speculative import chain_head
from depthdecay.speculative.expected_gain import LEARNED, TrackRecord
from depthdecay.speculative.head_text import HeadText, PlacedHead

ARCHITECTURES = ["llama", "gemma3_text", "gpt2"]


@pytest.fixture(autouse=True)
def eager_to_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of one to four drafts in turn, however often they are rejected."""
    counts = iter(range(10_000))
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)
    monkeypatch.setattr(TrackRecord, "window", lambda record: 1 + next(counts) % 4)
    monkeypatch.setattr(TrackRecord, "pays", property(lambda record: True))
    monkeypatch.setattr(TrackRecord, "goes_on", lambda record, sure: next(counts) % 3 > 0)
    replay_captures(monkeypatch)


@pytest.mark.parametrize("first_layers", [0, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_the_full_models_and_keys_those_of_verified_states(architecture: str, first_layers: int) -> None:
    model = tiny_model(architecture)
    head = random_head(model, first_layers)
    engine = dd.Engine(model, draft_head=head, fast=False)
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
    engine.uses_graphs = True
    for _ in range(2):
        (result,) = engine.generate(PROMPTS[:1], 30, mode="lossless", eos_token_id=None, lookup=False)
        assert [result.token_ids] == expected
        assert result.drafted > 0
    chain = engine.lanes.chain.last
    assert chain is not None
    assert chain.head is not None
    assert {key[:2] for key in chain.passes.graphs.by_key if key[0] == "draft"} == {("draft", LEARNED)}

    stack = LayerStack.of(model)
    placed = PlacedHead(head, stack)
    text = [*PROMPTS[0], *result.token_ids][: chain.passes.filled]
    alone = (
        HeadText(placed, lambda token, position: torch.zeros(1, head.shape.hidden))
        if first_layers
        else HeadText(placed)
    )
    alone.verified(text[1:], states_of(stack, text, placed.states))
    alone.read()
    assert alone.keys is not None
    known = chain.head.known[: alone.length].nonzero().squeeze(1)
    assert known.tolist() == list(range(1, alone.length))
    assert torch.allclose(chain.head.keys[:, :, known], alone.keys[:, :, known], atol=1e-4)


@pytest.mark.parametrize("first_layers", [0, 2])
def test_compiled_heads_say_the_same(first_layers: int) -> None:
    torch._dynamo.reset()
    model = tiny_model("llama")
    engine = dd.Engine(model, draft_head=random_head(model, first_layers), fast=False)
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
    engine.uses_graphs, engine.compiled = True, CompiledLayers()
    (result,) = engine.generate(PROMPTS[:1], 30, mode="lossless", eos_token_id=None, lookup=False)
    assert [result.token_ids] == expected
    assert result.drafted > 0
    assert engine.lanes.chain.last is not None
    assert engine.lanes.chain.last.passes.graphs.compiled is engine.compiled  # no fallback


def test_a_head_that_is_not_asked_stops_reading_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup finds the text: the head follows none of it, and what it had drafted there is never attended to."""
    monkeypatch.setattr(chain_head, "UNUSED", 2)
    model = tiny_model("llama")
    engine = dd.Engine(model, draft_head=random_head(model), fast=False)
    prompt = PROMPTS[0] * 4
    expected = token_ids(engine, "full", [prompt], 40, eos_token_id=None)
    engine.uses_graphs = True
    monkeypatch.setattr(TrackRecord, "pays", property(lambda record: record.depth != LEARNED))
    quiet = iter([*[2] * 3, *[0] * 12, *[2] * 1000])
    monkeypatch.setattr(TrackRecord, "window", lambda record: next(quiet))
    (result,) = engine.generate([prompt], 40, mode="lossless", eos_token_id=None, lookup=False)
    assert [result.token_ids] == expected
    chain = engine.lanes.chain.last
    assert chain is not None
    assert chain.head is not None
    assert {key[3] for key in chain.passes.graphs.by_key if key[0] == "verify"} == {True, False}
    known = chain.head.known[1 : chain.passes.filled]
    assert not known.all()
    assert known[: len(prompt) - 1].all()
