"""Lossless mode: the full model's answer, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lossless_answers import perfect_engine, token_ids
from replays import replay_captures
from tiny_models import ARCHITECTURES, LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.batching.drafting import RowDrafts
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack
from depthdecay.speculative.drafter_choice import drafting_plan
from depthdecay.speculative.expected_gain import StepCosts, TrackRecord
from depthdecay.speculative.short_head import ShortHead

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "seed": 5, "temperature": 0.7, "top_p": 0.9},
    "penalised": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_says_what_full_depth_says(architecture: str, settings: dict[str, Any], windows: list[int]) -> None:
    model = tiny_model(architecture)
    for order in ([3], [3, 4, 6, 1]):
        engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - len(order), drop_order=order))
        for prompts in (PROMPTS[:1], PROMPTS):
            expected = token_ids(engine, "full", prompts, 24, eos_token_id=None, **settings)
            assert token_ids(engine, "lossless", prompts, 24, eos_token_id=None, **settings) == expected
    assert windows


def test_texts_longer_than_a_sliding_window(windows: list[int]) -> None:
    for architecture in ("gemma3_text", "mistral", "gemma2"):
        engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[4]))
        expected = token_ids(engine, "full", PROMPTS, 70, eos_token_id=None)
        assert token_ids(engine, "lossless", PROMPTS, 70, eos_token_id=None) == expected


def test_drafts_that_are_right_are_kept(windows: list[int]) -> None:
    engine = perfect_engine()
    (result,) = engine.generate([PROMPTS[0]], 40, mode="lossless", eos_token_id=None, lookup=False)
    assert result.acceptance == 1.0
    assert result.accepted == result.drafted > 20
    assert len(result.token_ids) == len(result.depths) == len(result.draft_depths) == 40
    assert set(result.depths) == {LAYERS}
    assert result.draft_depths.count(LAYERS - 1) == result.accepted
    assert result.draft_depths[0] is None
    # The prefill gives one token, every verification one more, every accepted draft another.
    assert 1 + result.verifications + result.accepted == 40
    assert result.layers_executed == (1 + result.verifications) * LAYERS + result.drafted * (LAYERS - 1)
    assert result.passes_per_token == pytest.approx(result.layers_executed / (40 * LAYERS))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_rows_advance_by_different_amounts(
    architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are accepted for one row and rejected for another, many times over."""
    engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
    expected = token_ids(engine, "full", PROMPTS, 60, eos_token_id=None)
    rounds = iter(range(1000))

    def told(self: RowDrafts, longest: int) -> list[int]:
        assert self.text is not None
        turn, text = next(rounds), self.text.text
        row = next(row for row, prompt in enumerate(PROMPTS) if text[: len(prompt)] == prompt)
        follows = expected[row][len(text) - len(PROMPTS[row]) :][: min(longest, 5)]
        return follows if turn % 5 else [(token + 1) % 90 for token in follows]

    monkeypatch.setattr(RowDrafts, "found", told)
    results = engine.generate(PROMPTS, 60, mode="lossless", eos_token_id=None)
    assert [result.token_ids for result in results] == expected
    assert all(0 < result.accepted < result.drafted for result in results)
    assert len({(result.accepted, result.verifications) for result in results}) > 1


def test_ends_and_stop_strings_are_those_of_full_depth(windows: list[int]) -> None:
    engine = perfect_engine()
    whole = token_ids(engine, "full", PROMPTS, 40, eos_token_id=None)
    ends = [whole[0][7], whole[1][11]]
    full = engine.generate(PROMPTS, 40, mode="full", eos_token_id=ends)
    lossless = engine.generate(PROMPTS, 40, mode="lossless", eos_token_id=ends)
    assert [(r.token_ids, r.finish_reason) for r in lossless] == [(r.token_ids, r.finish_reason) for r in full]
    assert all(len(r.draft_depths) == len(r.token_ids) for r in lossless)


@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
def test_no_token_too_many(tokens: int, windows: list[int]) -> None:
    engine = perfect_engine()
    expected = token_ids(engine, "full", PROMPTS, tokens, eos_token_id=None)
    assert token_ids(engine, "lossless", PROMPTS, tokens, eos_token_id=None) == expected


def test_it_works_without_a_plan_and_refuses_what_it_cannot_do() -> None:
    engine = dd.Engine(tiny_model("llama"))
    expected = token_ids(engine, "full", PROMPTS, 12, eos_token_id=None)
    assert token_ids(engine, "lossless", PROMPTS, 12, eos_token_id=None) == expected
    with pytest.raises(DepthDecayError, match="stopping_criteria"):
        engine.generate(PROMPTS, 12, mode="lossless", stopping_criteria=[lambda ids, scores: False])
    for setting, value, complaint in (
        ("lookup", "yes", "lookup is 'yes'"),
        ("lookup", 1, "at least 2"),
        ("lookup", 50, "the prompt has only"),
        ("window", 0, "window is 0"),
        ("window", 16, "from 1 to 15"),
        ("window", True, "window is True"),
    ):
        with pytest.raises(DepthDecayError, match=complaint):
            engine.generate(PROMPTS[:1], 12, mode="lossless", **{setting: value})
    for layers in (1, 2, 3, 4, 5, 30):
        plan = drafting_plan(layers)
        assert plan.depth(5) <= layers


def test_it_is_the_mode_where_no_plan_is_given() -> None:
    model = tiny_model("llama")
    plan = dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3])
    engine = dd.Engine(model, drafter=plan)
    (result,) = engine.generate(PROMPTS[:1], 20, eos_token_id=None)
    assert result.mode == "lossless"
    assert engine.drafting_plan is plan
    assert result.token_ids == token_ids(engine, "full", PROMPTS[:1], 20, eos_token_id=None)[0]
    # Rows would share their windows, and criteria are evaluated at every token.
    assert {r.mode for r in engine.generate(PROMPTS, 4, eos_token_id=None)} == {"full"}
    assert engine.generate(PROMPTS[:1], 4, stopping_criteria=[lambda ids, scores: False])[0].mode == "full"
    assert dd.Engine(model, plan=plan).generate(PROMPTS[:1], 4)[0].mode == "decay"
    with pytest.raises(DepthDecayError, match="layers"):
        dd.Engine(model, drafter=dd.Plan.constant(LAYERS + 3, 5))


def test_windows_are_as_long_as_asked_for(windows: list[int]) -> None:
    (result,) = perfect_engine().generate([PROMPTS[0]], 40, mode="lossless", window=2, lookup=0, eos_token_id=None)
    runs = "".join("x" if depth is None else "d" for depth in result.draft_depths).split("x")
    assert max(map(len, runs)) == 2


def test_sampling_keeps_the_full_models_distribution(windows: list[int]) -> None:
    """Unseeded samples of three tokens compared with full depth: the same frequencies within chance."""
    torch.manual_seed(0)  # unseeded requests draw from it: the same draws in every run of this test
    model = tiny_model("llama", vocab_size=6)
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 4]))
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "eos_token_id": None}
    counts, drafted = [], 0
    for mode in ("full", "lossless"):
        results = [result for _ in range(250) for result in engine.generate([[3, 4, 5]] * 6, 3, mode=mode, **sampled)]
        last = torch.tensor([result.token_ids[2] for result in results])
        counts.append(torch.bincount(last, minlength=6).double())
        drafted += sum(result.drafted for result in results)
    assert drafted > 1000
    mean = (counts[0] + counts[1]) / 2
    square = float((((counts[0] - mean) ** 2 + (counts[1] - mean) ** 2) / mean.clamp(min=1)).sum())
    assert square < 20.5  # 5 degrees of freedom: exceeded by one seed in a thousand


def test_lookup_is_used_and_can_be_switched_off() -> None:
    """A model that repeats itself: what follows is already in the text."""
    engine = perfect_engine()
    prompt = [7, 8, 9, 10, 11, 12] * 4
    for lookup in (True, False):
        (result,) = engine.generate([prompt], 60, mode="lossless", lookup=lookup, eos_token_id=None)
        assert result.token_ids == token_ids(engine, "full", [prompt], 60, eos_token_id=None)[0]
        assert (0 in result.draft_depths) <= lookup


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_rows_of_a_batch_look_up_in_their_own_texts(architecture: str, windows: list[int]) -> None:
    model = tiny_model(architecture)
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
    looping = [[7, 8, 9, 10, 11, 12] * 4, [20, 21, 22] * 5, PROMPTS[0]]
    expected = token_ids(engine, "full", looping, 80, eos_token_id=None)
    found = 0
    for lookup in (True, False):
        results = engine.generate(looping, 80, mode="lossless", lookup=lookup, eos_token_id=None)
        assert [result.token_ids for result in results] == expected
        assert all(result.accepted <= result.drafted for result in results)
        drafted = [sum(depth == 0 for depth in result.draft_depths) for result in results]
        assert sum(drafted) == 0 or lookup
        found += sum(drafted)
    assert found > 0


def test_confidence_ends_a_window() -> None:
    drafter = TrackRecord(StepCosts(0.5, lambda tokens: 1.0))
    assert drafter.goes_on(0.99)
    assert not drafter.goes_on(0.2)
    engine = perfect_engine()
    told: list[float] = []

    def doubtful(self: TrackRecord, sure: float) -> bool:
        told.append(sure)
        return len(told) % 3 != 0  # called after every draft except the last possible one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrackRecord, "window", lambda self: 6)
        patch.setattr(TrackRecord, "goes_on", doubtful)
        (result,) = engine.generate([PROMPTS[0]], 30, mode="lossless", lookup=False, eos_token_id=None)
    assert result.token_ids == token_ids(engine, "full", [PROMPTS[0]], 30, eos_token_id=None)[0]
    # Three drafts, then a stop: four tokens per window.
    assert result.draft_depths[1:9] == [LAYERS - 1] * 3 + [None] + [LAYERS - 1] * 3 + [None]
    assert all(0 < sure <= 1 for sure in told)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts choose among few tokens, even with the tiny vocabularies of these models."""
    for name, value in {"LEAST": 24, "SHARE": 1000, "SPARE": 8, "WORTH": 0.0}.items():
        monkeypatch.setattr(f"depthdecay.speculative.short_head.{name}", value)


@pytest.mark.usefixtures("short", "windows")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_from_a_few_tokens(architecture: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_captures(monkeypatch)
    model = tiny_model(architecture)
    forward = model.get_output_embeddings().forward
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
    expected = token_ids(engine, "full", PROMPTS[:1], 30, eos_token_id=None)
    engine.uses_graphs = graphs
    for _ in range(2):
        assert token_ids(engine, "lossless", PROMPTS[:1], 30, eos_token_id=None) == expected
    assert engine.lanes.short_head is not None
    assert engine.lanes.short_head.weight.shape[0] == 64
    assert model.get_output_embeddings().forward == forward


@pytest.mark.usefixtures("short")
def test_a_short_head_takes_the_texts_own_tokens_in() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = 90
    head = ShortHead.of(LayerStack.of(model), torch.tensor([40, 41]))
    assert head is not None
    assert head.ids[: head.fixed].tolist() == [*range(24), 40, 41, 90]
    head.start([1, 50, 60, 50])
    assert head.ids[head.fixed : head.fixed + 2].tolist() == [50, 60]
    head.add(range(60, 80))
    assert head.ids[head.fixed : head.fixed + 8].tolist() == [50, 60, *range(61, 67)]  # as many as fit
    assert torch.equal(head.weight, model.get_output_embeddings().weight[head.ids])
    hidden = torch.randn(3, model.config.hidden_size)
    with head.in_place():
        assert torch.allclose(model.lm_head(hidden), (hidden @ model.lm_head.weight.T)[:, head.ids])
    head.start([70])
    assert head.ids[head.fixed] == 70
    assert head.is_for(LayerStack.of(model))
    assert not head.is_for(LayerStack.of(model.to(torch.bfloat16)))


def test_small_vocabularies_are_drafted_from_whole() -> None:
    engine = perfect_engine()
    engine.generate([PROMPTS[0]], 4, mode="lossless")
    assert engine.lanes.short_head is None
