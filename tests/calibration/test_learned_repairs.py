"""Maps that learn get better, leave the model alone, and keep the best whatever ends them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from calibrations import decaying_plan, random_texts
from tiny_models import tiny_model

import depthdecay as dd
from depthdecay.calibration.continuations import continue_prompts
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings, fit_plan
from depthdecay.calibration.gradient_steps import Learned
from depthdecay.calibration.learned_repairs import LearnedRepairs, LearningSettings
from depthdecay.calibration.recording import Recording
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs

QUICK = LearningSettings(minutes=10, passes=8, rows=8, rate=0.02, own_prompts=4, renewals=2)


def learner(
    settings: LearningSettings = QUICK, architecture: str = "llama", dtype: torch.dtype = torch.float32
) -> LearnedRepairs:
    model = tiny_model(architecture).to(dtype)
    stack, plan = LayerStack.of(model), decaying_plan()
    texts = random_texts(56, 24)
    fit, select = Recording.of(stack, texts[:40]), Recording.of(stack, texts[40:])
    repairs = fit_plan(fit, plan, FitSettings(8, 4, 0.03))
    return LearnedRepairs(stack, plan, repairs, texts[:40], select, settings)


def bits(repairs: Repairs) -> list[torch.Tensor]:
    return [part for maps in repairs.at_depth.values() for repair in maps for part in repair.parts]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_the_kl_on_unseen_text_falls_and_no_weight_changes(architecture: str) -> None:
    learning = learner(architecture=architecture)
    before = {name: value.clone() for name, value in learning.stack.model.state_dict().items()}
    wanted = [parameter.requires_grad for parameter in learning.stack.model.parameters()]
    start = learning.judge()
    repairs, learned = learning.learn()
    repairs.check(learning.plan, learning.stack.hidden_size)
    assert learned.curve[0].judged_loss == start
    assert learned.best < 0.97 * start
    assert learning.select.measure(learning.plan, repairs).kl == learned.best
    for name, value in learning.stack.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [parameter.requires_grad for parameter in learning.stack.model.parameters()] == wanted
    assert all(parameter.grad is None for parameter in learning.stack.model.parameters())


def test_gradients_reach_every_map() -> None:
    learning = learner()
    learning.renewed_every = 1
    learning.loss(0).backward()
    for depth in learning.masters.depths:
        for repair in learning.masters.repairs.at_depth[depth]:
            for part in learning.masters.learned[id(repair)]:
                assert part.grad is not None
                assert float(part.grad.abs().max()) > 0


def test_the_same_seed_gives_the_same_maps_and_another_does_not() -> None:
    first, second = bits(learner().learn()[0]), bits(learner().learn()[0])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    other = bits(learner(replace(QUICK, seed=5)).learn()[0])
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_maps_of_a_model_in_16_bits_learn_in_32() -> None:
    learning = learner(dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.float32 for parameter in learning.masters.parameters)
    repairs, learned = learning.learn()
    assert {part.dtype for part in bits(repairs)} == {torch.bfloat16}
    assert learned.best < learned.curve[0].judged_loss


def test_part_of_the_text_is_the_plans_own() -> None:
    learning = learner()
    assert len(learning.own) == 0
    learning.learn()
    (texts,) = learning.own.texts
    engine = dd.Engine(learning.stack.model, plan=learning.plan, repairs=learning.masters.stored())
    written = continue_prompts(engine, [text.prompt for text in texts], 24, mode="decay")
    full = continue_prompts(engine, [text.prompt for text in texts], 24)
    assert sorted(text.prompt for text in texts) == sorted(learning.prompts)
    assert [len(text.tokens) for text in texts] == [24] * 4
    assert {text.tokens for text in texts} != {text.tokens for text in full}
    assert {text.tokens[:1] for text in texts} == {text.tokens[:1] for text in written}  # the prompt is read in full


def test_a_loss_that_is_not_finite_keeps_the_last_good_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = learner()
    said: list[str] = []
    learning.say = said.append
    loss = learning.loss
    monkeypatch.setattr(learning, "loss", lambda step: loss(step) * (math.nan if step == 9 else 1))
    repairs, learned = learning.learn()
    assert "not a finite number" in said[-1]
    assert "not a finite number" in learned.ended
    assert all(bool(torch.isfinite(part).all()) for part in bits(repairs))
    assert Simulator(learning.select.recording).measure(learning.plan, repairs).kl == learned.best


def test_an_interrupted_run_leaves_the_best_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = learner()
    start = learning.judge()
    loss = learning.loss

    def interrupted(step: int) -> torch.Tensor:
        if step == 9:
            raise KeyboardInterrupt
        return loss(step)

    monkeypatch.setattr(learning, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learning.learn()
    assert learning.judge() < start


def test_time_that_is_up_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    repairs, learned = learner(LearningSettings(minutes=1e-9, rows=8)).learn()
    assert isinstance(learned, Learned)
    assert "the time was up" in learned.ended
    assert bits(repairs)
