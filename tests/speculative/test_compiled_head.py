"""A draft head as one compiled call on a CPU matches the same head in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_heads import random_head, states_of
from tiny_models import tiny_model

import depthdecay as dd
from depthdecay.cpu.choose_stack import open_stack
from depthdecay.model.layers import LayerStack
from depthdecay.speculative.compiled_head import CompiledHead
from depthdecay.speculative.expected_gain import TrackRecord
from depthdecay.speculative.head_text import HeadText, PlacedHead

TEXT = [5, 17, 3, 88, 41, 9, 60, 23, 7, 12, 93, 4, 55, 31, 8, 70, 22, 9, 11, 64]


@pytest.mark.parametrize(("quantize", "tolerance"), [(None, 1e-4), ("int8", 0.08)])
def test_logits_are_those_of_torch(quantize: str | None, tolerance: float) -> None:
    model = tiny_model("llama")
    head = random_head(model, vocabulary=70)
    stack = open_stack(model, quantize=quantize)
    if not stack.has_compiled_pass:
        pytest.skip("no compiler here")
    placed = PlacedHead(head, stack)
    compiled = CompiledHead.of(placed)
    assert compiled is not None
    states = states_of(LayerStack.of(model), TEXT, placed.states)
    plain, fast = placed.text(), compiled.text()
    certain = 3
    for text in (plain, fast):
        text.verified(TEXT[1 : certain + 1], states)
        text.read()
    for begins in (3, 4, 9, 12):
        for text in (plain, fast):
            if begins > certain:
                rows = {layer: state[certain:begins] for layer, state in states.items()}
                text.verified(TEXT[certain + 1 : begins + 1], rows)
        certain = begins
        for draft in range(4):
            ahead = TEXT[begins + 1 : begins + 1 + draft]
            expected, said = plain.draft(ahead), fast.draft(ahead)
            assert (said - expected).norm() <= tolerance * expected.norm(), (begins, draft)


def test_weights_take_the_models_own_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrackRecord, "verified_above", -1.0)  # verify drafts that do not deserve it
    model = tiny_model("llama")
    head = random_head(model)
    sizes = {}
    for quantize in (None, "int8", "int4"):
        engine = dd.Engine(model, draft_head=head, quantize=quantize)
        if not engine.stack.has_compiled_pass:
            pytest.skip("no compiler here")
        engine.lanes.drafting(engine.repairs)
        assert isinstance(engine.lanes.placed_head, CompiledHead)
        sizes[quantize] = engine.lanes.placed_head.nbytes
        answer = engine.generate([TEXT], 30, mode="lossless", lookup=0)[0]
        assert answer.token_ids == engine.generate([TEXT], 30, mode="full")[0].token_ids
        assert answer.drafted > 0
    assert sizes[None] > 2 * sizes["int8"] > 2 * sizes["int4"] > 0


def test_a_head_on_first_layers_stays_in_torch() -> None:
    model = tiny_model("llama")
    engine = dd.Engine(model, draft_head=random_head(model, first_layers=2))
    engine.lanes.drafting(engine.repairs)
    assert type(engine.lanes.placed_head) is PlacedHead


def test_a_long_text_finds_room() -> None:
    model = tiny_model("llama")
    engine = dd.Engine(model, draft_head=random_head(model))
    prompt = [(7 * place) % 90 + 3 for place in range(150)]
    answer = engine.generate([prompt], 100, mode="lossless", lookup=0)[0]
    assert answer.token_ids == engine.generate([prompt], 100, mode="full")[0].token_ids


def compiled_head(model: Any) -> CompiledHead:
    found = CompiledHead.of(PlacedHead(random_head(model), open_stack(model)))
    return found or pytest.skip("no compiler here")


def test_the_last_layer_of_torch_is_left_alone() -> None:
    """The compiled call writes to its own copy of the states."""
    model = tiny_model("llama")
    compiled = compiled_head(model)
    text = compiled.text()
    states = states_of(LayerStack.of(model), TEXT, compiled.states)
    text.verified(TEXT[1:4], states)
    given = [part.clone() for part in (*text.before, *states.values())]
    before = [*text.before, *states.values()]
    text.draft([])
    text.draft([TEXT[4]])
    assert all(map(torch.equal, before, given))


def test_large_states_are_joined_as_torch_would() -> None:
    """Hidden states of real models are not near 1, and the call joins them before any norm."""
    compiled = compiled_head(tiny_model("llama"))
    states = 10 * torch.randn((5, compiled.head.fc.weight.shape[1]))
    given = torch.randn((1, 5, compiled.head.shape.hidden))
    own, plain = compiled.text(), HeadText(compiled)
    for found, expected in zip(
        own._run_verified(given, states, True), plain._run_verified(given, states, True), strict=True
    ):
        assert found is not None
        assert expected is not None
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_angles_are_looked_up_at_any_position() -> None:
    compiled = compiled_head(tiny_model("llama"))
    for position, end in ((1, 3), (511, 514), (5000, 5002), (2, 4)):
        expected = compiled.head.angles(torch.arange(position, end)[None], torch.float32)
        for found, part in zip(compiled.angles(end), expected, strict=True):
            assert torch.equal(found[position - 1 : end - 1], part[0, 0])  # the cache has no position 0
