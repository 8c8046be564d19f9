"""Training improves maps, leaves the model unchanged, and keeps the best maps however it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibrations import SMALL, decaying_plan, random_texts, token_prompts
from spoken_models import plain_spoken
from tiny_models import tiny_model

import depthdecay as dd
from depthdecay.calibration import learned_repairs, own_questions, text_batches
from depthdecay.calibration.continuations import continue_prompts
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings, fit_plan
from depthdecay.calibration.goal import Goal
from depthdecay.calibration.learned_repairs import LearnedRepairs, LearningSettings
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.run import Calibration
from depthdecay.calibration.time_budget import TimeBudget
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs

QUICK = LearningSettings(minutes=10, passes=8, rows=8, rate=0.02, own_share=0.1, renewals=2)


def learner(
    settings: LearningSettings = QUICK, architecture: str = "llama", dtype: torch.dtype = torch.float32
) -> LearnedRepairs:
    model = tiny_model(architecture).to(dtype)
    stack, plan = LayerStack.of(model), decaying_plan()
    texts = random_texts(56, 24)
    fit, select = Recording.of(stack, texts[:40]), Recording.of(stack, texts[40:])
    repairs = fit_plan(fit, plan, FitSettings(8, 4, 0.03))
    return LearnedRepairs(stack, plan, repairs, texts[:40], select, settings)


def best_of(learning: LearnedRepairs) -> float:
    return min(kl for _, kl in learning.curve)


def bits(repairs: Repairs) -> list[torch.Tensor]:
    return [part for maps in repairs.at_depth.values() for repair in maps for part in repair.parts]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_the_kl_on_unseen_text_falls_and_no_weight_changes(architecture: str) -> None:
    learning = learner(architecture=architecture)
    before = {name: value.clone() for name, value in learning.stack.model.state_dict().items()}
    wanted = [parameter.requires_grad for parameter in learning.stack.model.parameters()]
    repairs = learning.learn()
    repairs.check(learning.plan, learning.stack.hidden_size)
    assert learning.curve[0][0] == 0
    assert best_of(learning) < 0.97 * learning.curve[0][1]
    assert learning.select.measure(learning.plan, repairs).kl == best_of(learning)
    assert learning.ended == "all steps were made"
    for name, value in learning.stack.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [parameter.requires_grad for parameter in learning.stack.model.parameters()] == wanted
    assert all(parameter.grad is None for parameter in learning.stack.model.parameters())


def test_gradients_reach_every_map() -> None:
    learning = learner()
    learning.loss(0).backward()
    for part in bits(learning.masters.gradients().only(set(learning.masters.depths))):
        assert float(part.abs().max()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_any_step_the_maps_are_those_given(dtype: torch.dtype) -> None:
    masters = learner(dtype=dtype).masters
    given = bits(masters.repairs)
    for made in (masters.maps(), masters.stored()):
        assert all(torch.equal(one, other) for one, other in zip(bits(made), given, strict=True))
    assert [row.learned.dim() for row in masters.rows.values()] == [2, 1]  # matrices, which decay, and biases


def test_the_same_seed_gives_the_same_maps_and_another_does_not() -> None:
    first, second = bits(learner().learn()), bits(learner().learn())
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    other = bits(learner(replace(QUICK, seed=5)).learn())
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_maps_of_a_model_in_16_bits_learn_in_32() -> None:
    learning = learner(dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.float32 for parameter in learning.masters.parameters)
    assert {part.dtype for part in bits(learning.learn())} == {torch.bfloat16}
    assert best_of(learning) < learning.curve[0][1]


def test_part_of_the_text_is_the_plans_own() -> None:
    learning = learner()
    assert len(learning.own) == 0
    learning.learn()
    assert learning.renewals_made == QUICK.renewals
    (texts,) = learning.own.texts
    engine = dd.Engine(learning.stack.model, plan=learning.plan, repairs=learning.masters.stored())
    written = continue_prompts(engine, [text.prompt for text in texts], 24, mode="decay")
    full = continue_prompts(engine, [text.prompt for text in texts], 24)
    assert sorted(text.prompt for text in texts) == sorted(learning.prompts)
    assert [len(text.tokens) for text in texts] == [24] * 4
    assert {text.tokens for text in texts} != {text.tokens for text in full}
    assert {text.tokens[:1] for text in texts} == {text.tokens[:1] for text in written}  # the prompt runs at full depth


def test_its_own_text_has_its_share_of_the_steps_however_few_texts_it_is() -> None:
    learning = learner(replace(QUICK, own_share=0.25))
    learning.loss(0)
    drawn = [learning._texts_of(step) for step in range(40)]
    assert len(learning.own) == 2
    assert [texts is learning.own for texts, _ in drawn] == [step % 4 == 3 for step in range(40)]
    given = [number for texts, number in drawn if texts is learning.given]
    assert all(sorted(given[start : start + 5]) == list(range(5)) for start in range(0, 30, 5))  # each once per pass


def test_text_is_renewed_by_time_where_that_ends_before_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = learner(replace(QUICK, renewals=4))
    now = learning.started
    monkeypatch.setattr(learned_repairs.time, "monotonic", lambda: now)
    due = []
    for share in (0.0, 0.1, 0.3, 0.35, 0.6, 0.8, 1.2):
        now = learning.started + share * 60 * learning.settings.minutes
        due.append(learning._is_renewal_due(0))
        learning.renewals_made += due[-1]
    assert due == [True, False, True, False, True, True, False]


def test_a_loss_that_is_not_finite_keeps_the_last_good_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = learner()
    said: list[str] = []
    learning.say = said.append
    loss = learning.loss
    monkeypatch.setattr(learning, "loss", lambda step: loss(step) * (math.nan if step == 9 else 1))
    repairs = learning.learn()
    assert "not a finite number" in said[-1]
    assert "not a finite number" in learning.ended
    assert all(bool(torch.isfinite(part).all()) for part in bits(repairs))
    assert Simulator(learning.select.recording).measure(learning.plan, repairs).kl == best_of(learning)


def test_an_interrupt_ends_the_learning_with_the_best_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = learner()
    loss = learning.loss

    def interrupted(step: int) -> torch.Tensor:
        if step == 30:
            raise KeyboardInterrupt
        return loss(step)

    monkeypatch.setattr(learning, "loss", interrupted)
    repairs = learning.learn()
    assert learning.ended == "the user interrupted step 31 of 48"
    assert len(learning.curve) == 6  # judged before the first step, and after every sixth
    assert learning.select.measure(learning.plan, repairs).kl == best_of(learning) < learning.curve[0][1]


def test_an_interrupt_before_anything_is_judged_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = learner()

    def interrupted() -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(learning, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learning.learn()


def test_time_that_is_up_ends_it() -> None:
    learning = learner(replace(QUICK, minutes=1e-9))
    assert bits(learning.learn())
    assert "the time was up" in learning.ended


def test_text_of_the_models_own_is_joined_in_once_for_all_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_repairs, "WRITING", 0.5)
    monkeypatch.setattr(learned_repairs, "MOST_TEXT", 400)
    monkeypatch.setattr(text_batches, "MOST_ROWS_ELSEWHERE", 8)
    monkeypatch.setattr(own_questions, "QUESTION_TOKENS", 24)
    loaded = plain_spoken(tmp_path / "model")
    prompts = [f"question number {number}?" for number in range(60)]
    settings = replace(SMALL, learning_minutes=2.0, variety=0.0)
    run = Calibration(loaded.model, loaded.tokenizer, prompts, tmp_path / "plan", settings)
    figures = run.make(Goal(speedup=1.2)).figures["learned"]
    assert run.own_texts is not None
    assert sum(len(text.tokens) for text in run.own_texts) >= 400
    assert max(len(text.tokens) for text in run.own_texts) <= run.settings.new_tokens
    assert figures["learned_from"] == {
        "texts": len(run.fit_texts) + len(run.own_texts),
        "of_its_own": len(run.own_texts),
    }
    unseen = {text.prompt for text in run.held_out_texts}
    assert not unseen & {text.prompt for text in run.own_texts}
    assert run.spare_prompts
    assert {tuple(prompt) for prompt in run.spare_prompts} & {text.prompt for text in run.own_texts}
    before = run.own_texts
    run.make(Goal(speedup=1.1))
    assert run.own_texts is before


def test_plans_share_the_time_that_is_left_to_learn_in(tmp_path: Path) -> None:
    said: list[str] = []
    settings = replace(SMALL, learning_minutes=0.5)
    run = Calibration(tiny_model("llama"), None, token_prompts(), tmp_path, settings, say=said.append)
    assert learned_repairs._minutes_to_learn(run) == 0.5
    run.time, run.plans_left = TimeBudget(1.0), 4
    assert learned_repairs._minutes_to_learn(run) == pytest.approx(0.2, rel=0.01)
    run.time = TimeBudget(0.0)
    assert run.make(Goal(speedup=1.2)).figures["learned"] is None
    assert "no time is left to train maps" in said
