"""Windows in one compiled call on a CPU: the same tokens, drafts and records as pass by pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from draft_heads import random_head
from tiny_models import tiny_model

import depthdecay as dd
from depthdecay.engine.result import Result
from depthdecay.speculative import expected_gain
from depthdecay.speculative.compiled_lane import UNREAD, CompiledLane
from depthdecay.speculative.expected_gain import LEARNED, StepCosts, TrackRecord
from depthdecay.speculative.head_text import PlacedHead
from depthdecay.speculative.prompt_lookup import Lookup

PROMPT = [5, 17, 3, 88, 41, 9, 60, 23]
TOKENS = 120
PLAIN: dict[str, Any] = {"do_sample": False, "eos_token_id": -1}


@pytest.fixture(autouse=True)
def _has_compiler() -> None:
    if not dd.Engine(tiny_model("llama")).stack.has_compiled_pass:
        pytest.skip("no compiler here")


def model_and_answer(architecture: str = "llama") -> tuple[Any, list[int]]:
    """A model and its greedy answer, in which one token is frequent."""
    model = tiny_model(architecture)
    (full,) = dd.Engine(model).generate([PROMPT], TOKENS, mode="full", **PLAIN)
    return model, full.token_ids


def drafts_often(monkeypatch: pytest.MonkeyPatch, answer: list[int], weight: float = 8.0) -> int:
    """Let heads of any kind say the answer's most frequent token often enough to be right now and then."""
    frequent = max(set(answer), key=answer.count)
    made = PlacedHead.__init__

    def biased(self: PlacedHead, *given: Any) -> None:
        made(self, *given)
        self.bias = torch.zeros(len(self.head.vocabulary))
        self.bias[self.head.vocabulary == frequent] = weight

    monkeypatch.setattr(PlacedHead, "__init__", biased)
    return frequent


def always_drafts(monkeypatch: pytest.MonkeyPatch, count: int, *, goes_on_above: float, verified_above: float) -> None:
    """Take decisions from these numbers and not from the clock."""
    monkeypatch.setattr(TrackRecord, "window", lambda self: count)
    monkeypatch.setattr(TrackRecord, "next_pays_above", property(lambda self: goes_on_above))
    monkeypatch.setattr(TrackRecord, "verified_above", property(lambda self: verified_above))
    monkeypatch.setattr(TrackRecord, "likelihood", lambda self, confidence: confidence_range(confidence))
    monkeypatch.setattr(TrackRecord, "likelihoods", lambda self: list(expected_gain.FIRST_SHARES))


def confidence_range(confidence: float) -> float:
    return expected_gain.FIRST_SHARES[sum(bound <= confidence for bound in expected_gain.CONFIDENCES)]


def lossless(model: Any, tokens: int = TOKENS, prompt: list[int] = PROMPT, **engine: Any) -> Result:
    """With a random head over part of the vocabulary, and no lookup."""
    head = random_head(model, vocabulary=70)
    (result,) = dd.Engine(model, draft_head=head, **engine).generate(
        [prompt], tokens, mode="lossless", lookup=0, **PLAIN
    )
    return result


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("count", "goes_on_above"), [(1, 1.0), (4, 0.0), (5, 0.4)])
def test_the_windows_are_those_of_single_passes(
    architecture: str, count: int, goes_on_above: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, answer = model_and_answer(architecture)
    drafts_often(monkeypatch, answer)
    always_drafts(monkeypatch, count, goes_on_above=goes_on_above, verified_above=-1.0)
    ours = lossless(model)
    with monkeypatch.context() as patch:
        patch.setattr(CompiledLane, "supports", staticmethod(lambda *given: False))
        plain = lossless(model)
    assert ours.token_ids == plain.token_ids == answer
    assert 0 < ours.accepted < ours.drafted
    for name in ("drafted", "accepted", "verifications", "layer_passes", "draft_depths"):
        assert getattr(ours, name) == getattr(plain, name), name


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    (full,) = dd.Engine(model, quantize=quantize).generate([PROMPT], TOKENS, mode="full", **PLAIN)
    drafts_often(monkeypatch, full.token_ids)
    always_drafts(monkeypatch, 3, goes_on_above=0.0, verified_above=-1.0)
    result = lossless(model, quantize=quantize)
    assert result.token_ids == full.token_ids
    assert 0 < result.accepted < result.drafted
    assert result.exact


def test_drafts_that_are_not_worth_it_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    model, answer = model_and_answer()
    frequent = drafts_often(monkeypatch, answer)
    records: list[tuple[int, int, int]] = []
    saw = TrackRecord.saw

    def noted(self: TrackRecord, drafted: int, accepted: int, *more: Any) -> None:
        records.append((drafted, accepted, more[2]))
        saw(self, drafted, accepted, *more)

    monkeypatch.setattr(TrackRecord, "saw", noted)
    always_drafts(monkeypatch, 1, goes_on_above=1.0, verified_above=2.0)
    result = lossless(model)
    assert result.token_ids == answer
    assert (result.drafted, result.accepted, result.verifications) == (0, 0, TOKENS - 1)
    # All the same, the drafter's record says how many of them were right.
    drafted = TOKENS - 2  # the last token needs no draft
    assert len(records) == drafted
    assert {seen[0] for seen in records} == {1}
    assert all(accepted == missed for _, accepted, missed in records)
    assert 0 < sum(accepted for _, accepted, _ in records) <= answer.count(frequent)


def test_some_drafts_of_a_window_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, answer = model_and_answer()
    drafts_often(monkeypatch, answer)
    always_drafts(monkeypatch, 6, goes_on_above=0.1, verified_above=0.4)
    result = lossless(model)
    assert result.token_ids == answer
    assert 0 < result.accepted < result.drafted


def test_after_a_pause_the_head_has_read_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pauses, drafts are those of a head that saw everything: short ones, and longer than its buffer."""
    model, answer = model_and_answer()
    drafts_often(monkeypatch, answer)
    always_drafts(monkeypatch, 2, goes_on_above=0.0, verified_above=-1.0)
    for pause in (3, 20, UNREAD + 20):
        ours, plain = (
            after_a_pause(monkeypatch, model, pause, supports)
            for supports in (CompiledLane.supports, lambda *given: False)
        )
        assert (ours.drafted, ours.accepted) == (plain.drafted, plain.accepted)
        assert ours.draft_depths == plain.draft_depths


def after_a_pause(monkeypatch: pytest.MonkeyPatch, model: Any, pause: int, supports: Any) -> Result:
    """Four windows of two drafts, a pause of so many steps, and then windows again."""
    windows = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(CompiledLane, "supports", staticmethod(supports))
        patch.setattr(TrackRecord, "window", lambda self: 0 if 4 <= next(windows) < 4 + pause else 2)
        return lossless(model, 150)


def test_lookup_and_a_head_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, answer = model_and_answer()
    drafts_often(monkeypatch, answer)
    always_drafts(monkeypatch, 3, goes_on_above=0.0, verified_above=-1.0)
    head = random_head(model, vocabulary=70)
    text = [*PROMPT, *answer]
    turns = itertools.cycle(
        (0, 0, 0, 3, 0, 0, 1, 0, 0, 0, 0, 5)
    )  # drafts that lookup finds, the last of them wrong now and then

    def after(self: Lookup, longest: int) -> list[int]:
        place, turn = len(self.text), next(turns)
        found = text[place : place + min(turn, longest)]
        return [*found[:-1], (found[-1] + 1) % 97] if turn == 5 and found else found

    monkeypatch.setattr(Lookup, "after", after)
    (result,) = dd.Engine(model, draft_head=head).generate([PROMPT], TOKENS, mode="lossless", **PLAIN)
    assert result.token_ids == answer
    assert {0, LEARNED} <= set(result.draft_depths)


def test_layers_draft_before_a_compiled_verification() -> None:
    model = tiny_model("llama")
    engine = dd.Engine(model, plan=dd.Plan.constant(model.config.num_hidden_layers, 6))
    (full,) = engine.generate([PROMPT], TOKENS, mode="full", **PLAIN)
    (result,) = engine.generate([PROMPT], TOKENS, mode="lossless", lookup=0, **PLAIN)
    assert result.token_ids == full.token_ids
    assert result.drafted > 0


def test_what_needs_other_passes_keeps_them() -> None:
    model = tiny_model("llama")
    engine = dd.Engine(model, draft_head=random_head(model))
    settings = {"do_sample": True, "temperature": 0.8, "seed": 3, "eos_token_id": -1}
    answers = [engine.generate([PROMPT], 40, mode=mode, **settings)[0].token_ids for mode in ("full", "lossless")]
    assert answers[0] == answers[1]


def test_a_record_charges_for_right_drafts_that_were_left_out() -> None:
    record = TrackRecord(StepCosts(0.1), depth=LEARNED)
    other = TrackRecord(StepCosts(0.1), depth=LEARNED)
    record.saw(1, 1, (0.2,), cost=1.1, missed=1)
    other.saw(1, 1, (0.2,), cost=1.1)
    assert record.acceptance == other.acceptance
    assert record.drag > other.drag


def test_thresholds_follow_costs() -> None:
    cheap = TrackRecord(StepCosts(0.1))
    dear = TrackRecord(StepCosts(0.1, lambda tokens: 0.7 + 0.3 * tokens))
    assert cheap.verified_above == 0
    assert dear.verified_above == pytest.approx(0.3 * dear.best_rate)
    for record in (cheap, dear):
        assert record.goes_on(record.next_pays_above + 1e-6)
        assert not record.goes_on(record.next_pays_above)
