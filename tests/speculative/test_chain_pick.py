"""Sampled text in windows that run as CUDA graphs, without a GPU: graphs are replayed by calling them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_heads import random_head
from replays import replay_captures
from tiny_models import LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.engine.request import prepare_request
from depthdecay.runners.keyed_noise import gumbel_noise, step_keys
from depthdecay.speculative.chain_lane import Chain
from depthdecay.speculative.chain_pick import settings_of
from depthdecay.speculative.host_lane import HostLane

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"do_sample": True, "temperature": 0.8},
    "top-k": {"do_sample": True, "top_k": 7},
    "top-p": {"do_sample": True, "temperature": 1.1, "top_p": 0.7},
    "all": {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"do_sample": True, "temperature": 0.9, "repetition_penalty": 1.4},
    "greedy with penalty": {"do_sample": False, "repetition_penalty": 1.4},
}


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Which lanes prefilled texts."""
    read: list[type] = []
    monkeypatch.setattr("depthdecay.model.kv_cache.BUCKET", 16)
    replay_captures(monkeypatch)
    for lane in (Chain, HostLane):
        plain = lane.read
        monkeypatch.setattr(lane, "read", lambda self, text, plain=plain: read.append(type(self)) or plain(self, text))
    return read


@pytest.mark.parametrize("drafter", ["layers", "head"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_seeded_answers_are_full_depths(
    settings: dict[str, Any], drafter: str, windows: list[int], lanes: list[type]
) -> None:
    model = tiny_model("llama")
    head = random_head(model, vocabulary=60) if drafter == "head" else None
    plan = dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5])
    engine = dd.Engine(model, plan=None if head else plan, draft_head=head, fast=False)
    asked = {**settings, "seed": 3, "eos_token_id": None}
    (full,) = engine.generate(PROMPTS[:1], 24, mode="full", **asked)
    engine.uses_graphs = True
    for lookup in (0, 3):
        (answer,) = engine.generate(PROMPTS[:1], 24, mode="lossless", lookup=lookup, **asked)
        assert answer.token_ids == full.token_ids
        assert answer.drafted > 0
    assert set(lanes) == {Chain}


def test_drafts_draw_what_their_verification_draws(windows: list[int], lanes: list[type]) -> None:
    """With all layers, so that only the draw could differ."""
    engine = dd.Engine(tiny_model("llama"), plan=dd.Plan.constant(LAYERS, LAYERS, drop_order=[3, 5]), fast=False)
    engine.uses_graphs = True
    for name in ("all", "penalty"):
        (answer,) = engine.generate(PROMPTS[:1], 24, mode="lossless", lookup=0, seed=1, **SETTINGS[name])
        assert answer.acceptance == 1
        assert answer.drafted > 0


def test_settings_take_turns(windows: list[int], lanes: list[type]) -> None:
    """Graphs are bound to their settings; greedy ones stay."""
    engine = dd.Engine(tiny_model("llama"), plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5]), fast=False)
    expected = {}
    for name, settings in SETTINGS.items():
        expected[name] = engine.generate(PROMPTS[:1], 20, mode="full", seed=1, eos_token_id=None, **settings)[0]
    greedy = engine.generate(PROMPTS[:1], 20, mode="full", eos_token_id=None, do_sample=False)[0]
    engine.uses_graphs = True
    for _ in range(2):
        for name, settings in SETTINGS.items():
            (answer,) = engine.generate(PROMPTS[:1], 20, mode="lossless", seed=1, eos_token_id=None, **settings)
            assert answer.token_ids == expected[name].token_ids, name
        (answer,) = engine.generate(PROMPTS[:1], 20, mode="lossless", eos_token_id=None, do_sample=False)
        assert answer.token_ids == greedy.token_ids
    assert engine.lanes.chain.last is not None
    assert len({key[-1] for key in engine.lanes.chain.last.passes.graphs.by_key}) == 2


@pytest.mark.parametrize(
    "settings",
    [{"no_repeat_ngram_size": 3}, {"bad_words_ids": [[5]]}, {"logits_processor": [lambda ids, scores: scores]}],
)
def test_what_graphs_cannot_pick_is_left_to_the_host(settings: dict[str, Any]) -> None:
    engine = dd.Engine(tiny_model("llama"), fast=False)
    request = prepare_request(engine, PROMPTS[:1], 8, settings)
    assert settings_of(engine.sampler(request, 0)) is None
    assert settings_of(engine.sampler(prepare_request(engine, PROMPTS[:1], 8, {}), 0)) == ()


def test_sampled_text_is_lossless_unless_told_otherwise(lanes: list[type]) -> None:
    engine = dd.Engine(tiny_model("llama"), fast=False)
    engine.uses_graphs = True
    assert engine.generate(PROMPTS[:1], 8, do_sample=True, seed=1)[0].mode == "lossless"


def test_noise_of_some_tokens_is_that_of_all() -> None:
    keys = step_keys([12345], 3, torch.device("cpu"))[0]
    tokens = torch.tensor([0, 5, 17, 96])
    assert torch.equal(gumbel_noise(keys, 97)[:, tokens], gumbel_noise(keys, 4, tokens))
