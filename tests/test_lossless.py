"""Lossless mode: the full model's answer, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.errors import DepthDecayError
from depthdecay.lossless import Pace, drafting_plan
from depthdecay.windows import Drafter, StepCosts, expected_tokens, found_again

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "seed": 5, "temperature": 0.7, "top_p": 0.9},
    "penalised": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of changing length instead of those that pay: random weights draft badly."""
    lengths: list[int] = []

    def window(self: Drafter) -> int:
        lengths.append((1, 5, 3, 0, 7)[len(lengths) % 5])
        return lengths[-1]

    asked: list[float] = []

    def goes_on(self: Drafter, sure: float) -> bool:
        asked.append(sure)
        return len(asked) % 7 != 0

    monkeypatch.setattr(Drafter, "window", window)
    monkeypatch.setattr(Drafter, "goes_on", goes_on)
    return lengths


def token_ids(engine: dd.Engine, mode: str, prompts: list[list[int]], tokens: int, **settings: Any) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, tokens, mode=mode, **settings)]


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


def perfect_engine() -> dd.Engine:
    """Its shallow pass is the full one: layer 3 does nothing."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    return dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))


def test_drafts_that_are_right_are_kept(windows: list[int]) -> None:
    engine = perfect_engine()
    (result,) = engine.generate([PROMPTS[0]], 40, mode="lossless", eos_token_id=None, lookup=False)
    assert result.acceptance == 1.0
    assert result.accepted == result.drafted > 20
    assert len(result.token_ids) == len(result.depths) == len(result.draft_depths) == 40
    assert set(result.depths) == {LAYERS}
    assert result.draft_depths.count(LAYERS - 1) == result.accepted
    assert result.draft_depths[0] is None
    # The prompt gives one token, every verification one more, every accepted draft another.
    assert 1 + result.verifications + result.accepted == 40
    assert result.layers_executed == result.verifications * LAYERS + result.drafted * (LAYERS - 1)
    assert result.passes_per_token == pytest.approx(result.layers_executed / (40 * LAYERS))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_rows_advance_by_different_amounts(
    architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right for one row and wrong for another, many times over, until columns must be given back."""
    engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
    expected = token_ids(engine, "full", PROMPTS, 60, eos_token_id=None)
    rounds = iter(range(1000))

    def told(self: Any, sampler: Any, last: torch.Tensor, indices: list[int], drafts: int, *_: Any) -> torch.Tensor:
        turn = next(rounds)
        rows = []
        for row, index in enumerate(indices):
            text = (expected[row] + [0] * 20)[index + 1 : index + 1 + drafts]
            rows.append(text if (turn + row) % 3 else [(token + 1) % 90 for token in text])
        return torch.tensor(rows)

    monkeypatch.setattr("depthdecay.lossless.LosslessDecoder.draft", told)
    results = engine.generate(PROMPTS, 60, mode="lossless", eos_token_id=None)
    assert [result.token_ids for result in results] == expected
    assert len({result.accepted for result in results}) > 1 or len({result.verifications for result in results}) > 1


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
    with pytest.raises(DepthDecayError, match="lookup"):
        engine.generate(PROMPTS, 12, mode="lossless", lookup="yes")
    for layers in (1, 2, 3, 4, 5, 30):
        plan = drafting_plan(layers)
        assert plan.depth(5) <= layers


def test_sampling_keeps_the_full_models_distribution(windows: list[int]) -> None:
    """Unseeded draws of three tokens against those of full depth: the same frequencies within chance."""
    model = tiny_model("llama", vocab_size=6)
    engine = dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 4]))
    counts = []
    for mode in ("full", "lossless"):
        results = engine.generate([[3, 4, 5]] * 1500, 3, mode=mode, do_sample=True, temperature=1.0, eos_token_id=None)
        last = torch.tensor([result.token_ids[2] for result in results])
        counts.append(torch.bincount(last, minlength=6).double())
    mean = (counts[0] + counts[1]) / 2
    square = float((((counts[0] - mean) ** 2 + (counts[1] - mean) ** 2) / mean.clamp(min=1)).sum())
    assert square < 20.5  # 5 degrees of freedom: once in a thousand runs


def test_the_expected_gain() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(1.0, 4) == 5
    costs = StepCosts(0.5, lambda tokens: 1.0 + 0.1 * (tokens - 1))
    assert costs.rate(0.9, 0) == 1
    assert costs.rate(0.9, 3) == pytest.approx(expected_tokens(0.9, 3) / (1.5 + 1.3))
    simulated = torch.rand((20000, 3), generator=torch.Generator().manual_seed(0)) < 0.9
    assert float(simulated.long().cumprod(1).sum(1).double().mean()) + 1 == pytest.approx(
        expected_tokens(0.9, 3), rel=0.01
    )


def test_a_drafter_learns_and_stops() -> None:
    good = Drafter(StepCosts(0.3))
    for _ in range(50):
        count = good.window()
        good.saw(count, count)
    assert good.window() >= 8
    bad = Drafter(StepCosts(0.6))
    drafted = 0
    for _ in range(400):
        count = bad.window()
        drafted += count
        bad.saw(count, 0)
    assert drafted <= 12  # of 400 tokens: what it cost to find out stays under 3%
    # Text that becomes easy is noticed.
    for _ in range(1200):
        count = bad.window()
        bad.saw(count, count)
    assert bad.window() > 4


def test_lookup_finds_what_followed_before() -> None:
    text = [1, 2, 3, 4, 5, 9, 9, 2, 3]
    assert found_again(text, 3) == [4, 5, 9]
    assert found_again([1, 2, 3, 7, 1, 2, 3, 8, 2, 3], 2) == [8, 2]  # the latest place
    assert found_again([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], 1) == [3]  # the longest end
    assert found_again([1, 2, 3], 4) == []
    assert found_again([], 4) == []


def test_lookup_is_used_and_can_be_switched_off() -> None:
    """A model that repeats itself: what follows is in the text already."""
    engine = perfect_engine()
    prompt = [7, 8, 9, 10, 11, 12] * 4
    for lookup in (True, False):
        (result,) = engine.generate([prompt], 60, mode="lossless", lookup=lookup, eos_token_id=None)
        assert result.token_ids == token_ids(engine, "full", [prompt], 60, eos_token_id=None)[0]
        assert (0 in result.draft_depths) <= lookup


def test_costs_come_from_what_was_timed() -> None:
    pace = Pace()
    assert pace.costs(0.7).draft == 0.7
    assert 1.0 <= pace.costs(0.7).verify(4) < 1.1
    pace.saw("verify 1", 0.010)
    pace.saw("draft", 0.006)
    pace.saw("verify 5", 0.014)
    costs = pace.costs(0.7)
    assert costs.draft == pytest.approx(0.6)
    assert costs.verify(5) == pytest.approx(1.4)
    assert costs.verify(3) == pytest.approx(1.2)
    assert costs.verify(1) == 1.0


class Replay:
    """Stands in for a CUDA graph: runs the recorded pass."""

    def __init__(self, decoder: Any, depth: int, size: int, bucket: int) -> None:
        self.decoder, self.depth, self.size, self.bucket = decoder, depth, size, bucket

    def replay(self) -> None:
        self.decoder.go_to(self.depth)
        with self.decoder._decoding_layout(self.bucket), self.decoder._shared_layers():
            self.decoder._columns(self.size, self.bucket)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_graph_path_says_the_same(architecture: str, windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets, padded windows and the device's clock, without a GPU."""
    from depthdecay.lossless_graphs import LosslessGraphDecoder

    monkeypatch.setattr("depthdecay.cache.BUCKET", 16)
    monkeypatch.setattr(LosslessGraphDecoder, "_capture", lambda self, *key: Replay(self, *key))
    engine = dd.Engine(tiny_model(architecture), plan=dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5]))
    expected = [token_ids(engine, "full", prompts, 30, eos_token_id=None) for prompts in (PROMPTS[:1], PROMPTS)]
    engine.uses_graphs = True
    for prompts, tokens in zip((PROMPTS[:1], PROMPTS), expected, strict=True):
        for settings in ({}, {"lookup": False}):
            assert token_ids(engine, "lossless", prompts, 30, eos_token_id=None, **settings) == tokens
        kept = engine._kept_lossless
        shorter = [prompt[1:] for prompt in prompts]
        engine.generate(shorter, 20, mode="lossless", eos_token_id=None)  # graphs and cache are used again
        assert engine._kept_lossless is kept
        again = token_ids(engine, "lossless", prompts, 30, eos_token_id=None)
        assert again == tokens


def test_confidence_ends_a_window() -> None:
    drafter = Drafter(StepCosts(0.5, lambda tokens: 1.0))
    assert drafter.goes_on(0.99)
    assert not drafter.goes_on(0.2)
    engine = perfect_engine()
    told: list[float] = []

    def doubtful(self: Drafter, sure: float) -> bool:
        told.append(sure)
        return len(told) % 3 != 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "window", lambda self: 6)
        patch.setattr(Drafter, "goes_on", doubtful)
        (result,) = engine.generate([PROMPTS[0]], 30, mode="lossless", lookup=False, eos_token_id=None)
    assert result.token_ids == token_ids(engine, "full", [PROMPTS[0]], 30, eos_token_id=None)[0]
    # Three drafts, then doubt: four tokens a window.
    assert result.draft_depths[1:9] == [LAYERS - 1] * 3 + [None] + [LAYERS - 1] * 3 + [None]
    assert all(0 < sure <= 1 for sure in told)
