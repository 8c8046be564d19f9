"""The drafter that the package ships for the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

import depthdecay as dd
from depthdecay.calibration.head_fit import HeadFit
from depthdecay.calibration.head_states import StatesOfTexts
from depthdecay.model.layers import LayerStack
from depthdecay.model.prompts import token_ids
from depthdecay.plan.file import EMBEDDED_MODEL, SHIPPED_PLANS
from depthdecay.plan.plan import Plan
from depthdecay.plan.stored_plans import plan_with_head, shipped_plan
from depthdecay.speculative.draft_head import head_of
from depthdecay.speculative.expected_gain import LEARNED, Pace

# Nothing was trained on these.
QUESTIONS = (
    "Explain to a child why the moon seems to change its shape.",
    "Write a short letter to a neighbour who plays the drums at night.",
    "A farmer has 12 cows and buys 7 more, then sells 5. How many cows are left? Explain each step.",
)


def shipped_drafter() -> Plan:
    shipped = shipped_plan(EMBEDDED_MODEL)
    assert shipped is not None
    plan = plan_with_head(shipped)
    assert plan is not None
    return plan


def test_it_is_small_and_lies_next_to_the_calibrated_plan() -> None:
    plan = shipped_drafter()
    assert plan.folder == SHIPPED_PLANS / EMBEDDED_MODEL / "lossless"
    assert plan.only_drafts
    assert 0.3 < plan.notes["drafter"]["right"][0] < 1
    head = head_of(plan)
    assert head is not None
    assert head.shape.is_portable(plan.num_layers)
    assert sum(file.stat().st_size for file in (SHIPPED_PLANS).rglob("*") if file.is_file()) < 6_000_000


@pytest.mark.slow
def test_lossless_answers_are_the_full_models_own(
    cache: Path, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for timed in ("saw_draft", "saw_verification"):  # on a busy machine, drafting may seem not to pay
        monkeypatch.setattr(Pace, timed, lambda *_: None)
    engine = dd.Engine(dd.load(EMBEDDED_MODEL))
    for question in QUESTIONS:
        full = engine.generate(question, 48, mode="full", do_sample=False)[0]
        lossless = engine.generate(question, 48, mode="lossless", lookup=0, do_sample=False)[0]
        assert lossless.token_ids == full.token_ids
        assert set(lossless.draft_depths) == {LEARNED, None}


@pytest.mark.slow
def test_it_is_right_about_a_third_of_the_tokens_or_more(cache: Path) -> None:
    loaded = dd.load(EMBEDDED_MODEL)
    engine, stack, head = dd.Engine(loaded), LayerStack.of(loaded.model), head_of(shipped_drafter())
    assert head is not None
    answers = [engine.generate(question, 96, mode="full", do_sample=False)[0] for question in QUESTIONS]
    prompts = [token_ids(loaded.tokenizer, question, {}, 49152) for question in QUESTIONS]
    texts = [(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    states = StatesOfTexts(stack, [head.shape], texts, rows=3, longest=320, room=2**30)
    assert HeadFit(stack, head).judge(states, 1).right[0] > 0.33
