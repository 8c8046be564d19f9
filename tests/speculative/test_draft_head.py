"""A learned head drafts as it was trained to, and lossless answers stay those of the full model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import random_head, states_of
from tiny_models import LAYERS, VOCABULARY, tiny_model

import depthdecay as dd
from depthdecay.calibration.head_fit import HeadFit
from depthdecay.calibration.head_states import StatesOfTexts
from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.model import devices
from depthdecay.model.layers import LayerStack
from depthdecay.speculative.draft_head import HEAD_FILE, DraftHead, HeadShape, outer_states
from depthdecay.speculative.expected_gain import LEARNED, TrackRecord
from depthdecay.speculative.head_text import HeadText, PlacedHead

PROMPT = [5, 17, 3, 88, 41, 9, 60, 23]
TEXT = [*PROMPT, 7, 12, 93, 4, 55, 31, 8, 70]


@pytest.mark.parametrize("first_layers", [0, 2])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_a_window_is_drafted_as_it_was_fitted(
    architecture: str, first_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft of a window, wherever it begins: states in decoding match those of the unrolled training."""
    monkeypatch.setattr(devices, "_is_faster_in_bfloat16", lambda: False)  # decoding is in 32 bits
    model = tiny_model(architecture)
    stack = LayerStack.of(model)
    head = random_head(model, first_layers)
    placed = PlacedHead(head, stack)
    states = states_of(stack, TEXT, placed.states)
    texts = StatesOfTexts(stack, [head.shape], [(PROMPT, TEXT[len(PROMPT) :])], rows=1, longest=64, room=0)
    texts.dtype = torch.float32
    fit = HeadFit(stack, head)
    unrolled = [fit.said(head.norm(state))[0] for state in fit.windows(texts.batch(0, head.shape), 3)]

    def first(token: int, position: int) -> torch.Tensor:
        assert TEXT[position] == token
        return states[first_layers - 1][position : position + 1]

    text = HeadText(placed, first if first_layers else None)
    certain = 4
    text.verified(TEXT[1 : certain + 1], states)
    for begins in (4, 7, 8, 11):  # position of the last verified token
        rows = {layer: state[certain:begins] for layer, state in states.items()}
        if begins > certain:
            text.verified(TEXT[certain + 1 : begins + 1], rows)
        certain = begins
        for draft in range(3):
            logits = text.draft(TEXT[begins + 1 : begins + 1 + draft])
            assert torch.allclose(logits[0], unrolled[draft][begins + draft], atol=1e-4), (begins, draft)


@pytest.mark.parametrize("first_layers", [0, 1, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "mixtral"])
def test_lossless_answers_are_the_full_models_whatever_a_head_says(
    architecture: str, first_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrackRecord, "verified_above", -1.0)  # verify drafts that do not deserve it
    model = tiny_model(architecture)
    full = dd.Engine(model).generate([PROMPT], 40, mode="full")[0]
    engine = dd.Engine(model, draft_head=random_head(model, first_layers))
    for _ in range(2):
        result = engine.generate([PROMPT], 40, mode="lossless", lookup=0)[0]
        assert result.token_ids == full.token_ids
        assert result.drafted > 0


def test_sampled_answers_too() -> None:
    model = tiny_model("llama")
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20, "seed": 3}
    full = dd.Engine(model).generate([PROMPT], 40, mode="full", **settings)[0]
    engine = dd.Engine(model, draft_head=random_head(model, vocabulary=60))
    result = engine.generate([PROMPT], 40, mode="lossless", lookup=0, **settings)[0]
    assert result.token_ids == full.token_ids
    assert result.drafted > 0


def test_right_drafts_are_taken_and_told() -> None:
    """A model whose layers add nothing: its next token depends on the last one alone, so a head can predict it."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    stack = LayerStack.of(model)
    head = DraftHead.new(stack, HeadShape.of(stack, first_layers=1), torch.arange(VOCABULARY))
    with torch.no_grad():
        for parameter in (head.fc.weight, head.output.weight, head.down.weight):
            parameter.zero_()
        assert head.join is not None
        head.join.weight.copy_(torch.eye(head.shape.hidden))
    engine = dd.Engine(model, draft_head=head.requires_grad_(False))
    result = engine.generate([PROMPT], 64, mode="lossless", lookup=0, eos_token_id=-1)[0]
    assert result.token_ids == dd.Engine(model).generate([PROMPT], 64, mode="full", eos_token_id=-1)[0].token_ids
    assert result.acceptance == 1
    assert result.draft_depths.count(LEARNED) == result.accepted > 20
    assert result.layer_passes == (result.verifications + 1) * LAYERS + result.drafted


class TestFile:
    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        head = random_head(tiny_model("llama"), 2, vocabulary=50)
        head.right = 0.75
        loaded = DraftHead.load(head.save(tmp_path / HEAD_FILE))
        assert loaded.shape == head.shape
        assert loaded.right == 0.75
        found, saved = loaded.state_dict(), head.state_dict()
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)

    def test_beside_a_plan(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        plan = dd.Plan.full(LAYERS)
        head = random_head(model)
        head.save(tmp_path / HEAD_FILE)
        replace(plan, draft_head=HEAD_FILE).save(tmp_path)
        loaded = dd.Plan.load(tmp_path)
        assert loaded.draft_head == HEAD_FILE
        assert "learned drafter" in loaded.describe()
        engine = dd.Engine(model, plan=loaded)
        assert engine.draft_head is not None
        assert engine.generate([PROMPT], 30, mode="lossless", lookup=0)[0].drafted > 0

    def test_another_models_head_is_refused(self) -> None:
        head = random_head(tiny_model("llama"))
        with pytest.raises(PlanMismatchError, match="hidden size 32"):
            dd.Engine(tiny_model("llama", hidden_size=64), draft_head=head)

    @pytest.mark.parametrize("damage", ["missing", "garbage", "not finite", "other format"])
    def test_a_damaged_file_is_told(self, tmp_path: Path, damage: str) -> None:
        from safetensors.torch import save_file

        file = tmp_path / HEAD_FILE
        head = random_head(tiny_model("llama"))
        if damage == "garbage":
            file.write_bytes(b"nothing of the kind")
        elif damage == "not finite":
            head.fc.weight.data[0, 0] = float("nan")
            head.save(file)
        elif damage == "other format":
            save_file({"fc.weight": head.fc.weight}, file)
        with pytest.raises(DepthDecayError, match=r"there is no|cannot be read|not finite|holds no draft head"):
            DraftHead.load(file)


def test_a_head_beside_a_model_in_16_bits_turns_by_all_digits_of_its_frequencies() -> None:
    head = random_head(tiny_model("llama"))
    frequencies = head.frequencies.clone()
    placed = PlacedHead(head, LayerStack.of(tiny_model("llama").to(torch.bfloat16)))
    assert placed.head.fc.weight.dtype == torch.bfloat16
    assert torch.equal(placed.head.frequencies, frequencies)


def test_states_that_heads_are_fed() -> None:
    assert outer_states(30) == (1, 14, 29)
    assert outer_states(2) == (0, 1)


def test_a_head_in_4_bits_is_small_and_drafts_nearly_as_well(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=128, intermediate_size=256)
    head = random_head(model, 0)
    whole, small = head.save(tmp_path / "whole"), head.save(tmp_path / "small", in_4_bits=True)
    assert small.stat().st_size < 0.45 * whole.stat().st_size  # where matrices take 2 bytes per element
    read = DraftHead.load(small)
    assert read.shape == head.shape
    assert torch.equal(read.vocabulary, head.vocabulary)
    for name, weight in head.state_dict().items():
        kept = read.state_dict()[name].float()
        error = (kept - weight.float()).norm() / weight.float().norm()
        assert float(error) < (0.1 if weight.dim() == 2 else 1e-2), name
    again = DraftHead.load(read.save(tmp_path / "again", in_4_bits=True))
    assert all(
        torch.allclose(tensor, again.state_dict()[name], atol=1e-3) for name, tensor in read.state_dict().items()
    )


def test_a_backlog_of_plain_steps_is_read_before_a_draft() -> None:
    """Catching up first changes nothing about what is drafted."""
    model = tiny_model("llama")
    stack = LayerStack.of(model)
    placed = PlacedHead(random_head(model), stack)
    states = states_of(stack, TEXT, placed.states)
    drafts = []
    for catches_up in (False, True):
        text = HeadText(placed)
        text.verified(TEXT[1:13], states)
        if catches_up:
            text.catch_up()
            assert len(text.tokens) == 1
        drafts.append(text.draft([]))
    assert torch.allclose(*drafts, atol=1e-5)
