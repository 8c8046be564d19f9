"""Which plan an engine uses, given the request and the stored plans."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LAYERS, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from depthdecay import Plan
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DepthSettings, guess_is_meant
from depthdecay.errors import ArgumentError, DepthDecayError, GuessedPlanWarning
from depthdecay.integrations.transformers.applied import applied
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.plan.file import EMBEDDED_MODEL, EMBEDDED_PLAN


@pytest.fixture(scope="module")
def smollm2() -> LayerStack:
    """The embedded model without weights: its shape is enough to choose a plan."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    with torch.device("meta"):
        return LayerStack.of(LlamaForCausalLM(LlamaConfig(num_hidden_layers=30, vocab_size=64, **shape)))


def test_a_speed_up_of_the_embedded_model_takes_its_calibrated_plan(smollm2: LayerStack) -> None:
    plan = DepthSettings(speedup="1.1").choose(smollm2, EMBEDDED_MODEL)
    assert plan is not None
    assert plan.repairs
    assert plan.notes["calibration"]["agreement"] > 0.8
    repairs = Repairs.of_plan(plan)
    assert repairs is not None
    repairs.check(plan, 576)
    assert sum(file.stat().st_size for file in EMBEDDED_PLAN.iterdir()) < 1_000_000


def test_a_speed_up_of_a_calibrated_plan_is_over_its_own_horizon(smollm2: LayerStack) -> None:
    """However short the answer, a few tokens at full depth must not make the plan look too slow."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short = DepthSettings(speedup="1.1", new_tokens=16).choose(smollm2, EMBEDDED_MODEL)
    assert short == DepthSettings(speedup="1.1", new_tokens=500).choose(smollm2, EMBEDDED_MODEL)
    assert short is not None
    assert short.schedule.to_dict()["horizon"] == 128
    over = DepthSettings(speedup="1.1", over_tokens=64).choose(smollm2, EMBEDDED_MODEL)
    assert over is not None
    assert over.schedule.to_dict()["horizon"] == 64


def test_what_no_calibrated_plan_reaches_is_guessed_with_a_warning(smollm2: LayerStack) -> None:
    with pytest.warns(UserWarning, match="does not reach 2x"):
        guessed = DepthSettings(speedup="2").choose(smollm2, EMBEDDED_MODEL)
    assert guessed is not None
    assert guessed.repairs is None


@pytest.mark.parametrize("settings", [{"alpha": 0.99}, {"speedup": 1.1, "core_head": 3}, {"speedup": 1.1}])
def test_other_models_and_shaped_plans_are_made_by_rule(smollm2: LayerStack, settings: dict[str, Any]) -> None:
    name = "another" if settings == {"speedup": 1.1} else EMBEDDED_MODEL
    with pytest.warns(UserWarning, match="^layers are dropped from the middle outwards, by guess"):
        plan = DepthSettings(**settings).choose(smollm2, name)
    assert plan is not None
    assert plan.repairs is None


def test_full_depth_by_rule_is_no_guess(smollm2: LayerStack) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DepthSettings(alpha=1).choose(smollm2, EMBEDDED_MODEL) is not None


@pytest.mark.filterwarnings("ignore:layers are dropped")
def test_a_plan_by_rule_goes_over_the_answer(smollm2: LayerStack) -> None:
    plan = DepthSettings(speedup=1.25, new_tokens=40).choose(smollm2, "another")
    assert plan == Plan.for_speedup(30, 1.25, over_tokens=40)


def test_a_stored_plan_is_taken_as_it_is_and_its_neighbours_are_found(tmp_path: Path) -> None:
    stack = LayerStack.of(tiny_model())
    main, faster = Plan.decay(LAYERS, 0.99, drop_order=(3, 4)), Plan.decay(LAYERS, 0.9, drop_order=(4, 3, 5))
    main.save(tmp_path)
    faster.save(tmp_path / "speedup-1.2")
    assert DepthSettings(tmp_path).choose(stack, None) == main
    assert DepthSettings(main).choose(stack, None) is main
    chosen = DepthSettings(str(tmp_path), speedup="1.2").choose(stack, None)
    assert chosen is not None
    assert chosen.ladder == faster.ladder
    assert DepthSettings().choose(stack, EMBEDDED_MODEL) is None


def test_default_is_the_embedded_models_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Plan.load("default") == Plan.load(EMBEDDED_PLAN)
    own = Plan.decay(LAYERS, 0.99)
    own.save("default")
    assert Plan.load("default") == own


@pytest.mark.parametrize(
    ("settings", "said", "parameters"),
    [
        ({"plan": "p", "alpha": 0.9}, "plan and alpha were given together", ("plan", "alpha")),
        ({"alpha": 0.9, "speedup": 1.2}, "alpha and speedup were given together", ("alpha", "speedup")),
        ({"warmup_tokens": 3}, "warmup_tokens was given without a decay", ("warmup_tokens", "alpha", "speedup")),
        ({"plan": "p", "speedup": 1.2, "core_head": 1}, "core_head was given with plan", ("core_head", "plan")),
        ({"over_tokens": 3}, "was given without it", ("over_tokens", "speedup")),
        ({"over_tokens": 0, "speedup": 1.1}, "over_tokens is 0", ("over_tokens",)),
        ({"speedup": 0.5}, "speedup is 0.5; expected a number of at least 1", ("speedup",)),
        ({"alpha": 0.9, "min_layers": 0}, "min_layers is 0", ("min_layers",)),
    ],
)
def test_contradictions_are_refused_by_python_names(
    settings: dict[str, Any], said: str, parameters: tuple[str, ...]
) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        DepthSettings(**settings)
    assert caught.value.parameters == parameters


def test_a_plan_that_is_not_there_is_refused() -> None:
    with pytest.raises(DepthDecayError, match="no plan at"):
        DepthSettings("no/such/plan.json").stored()


def test_a_guessed_plan_is_warned_of_once_by_whoever_decodes_with_it(tmp_path: Path) -> None:
    model = tiny_model()
    guess = Plan.for_speedup(LAYERS, 1.25, over_tokens=32)
    for plan in (guess, Plan.decay(LAYERS, 0.95), guess.save(tmp_path / "plan.json")):
        with pytest.warns(GuessedPlanWarning, match="by guess: expect much lower quality") as told:
            Engine(model, plan=plan).generate([[5, 6]], 4)
        assert len(told) == 1
    with pytest.warns(GuessedPlanWarning) as told, applied(model, guess):
        pass
    assert [warning.filename for warning in told] == [__file__]


def test_what_was_measured_or_loses_nothing_is_not_warned_of() -> None:
    model = tiny_model()
    guess = Plan.for_speedup(LAYERS, 1.25, over_tokens=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(model, plan=guess, mode="lossless")
        Engine(model, plan=Plan.decay(LAYERS, 0.95, drop_order=[4, 3, 5, 2]))
        Engine(model, plan=replace(guess, notes={"calibration": {}}))
        Engine(model, plan=Plan.decay(LAYERS, 1))
        with guess_is_meant():
            Engine(model, plan=guess)
