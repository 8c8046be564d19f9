"""Calibration: plans that keep their budget or are refused, plans to draft with, and resumed runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import SMALL, token_prompts
from tiny_models import LAYERS, tiny_model

import depthdecay as dd
from depthdecay.calibration.drafted_texts import Drafts
from depthdecay.calibration.drafter import expected
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings
from depthdecay.calibration.goal import Goal
from depthdecay.calibration.run import Calibration
from depthdecay.errors import DepthDecayError
from depthdecay.model.repairs import Repairs
from depthdecay.plan.stored_plans import drafter_of
from depthdecay.speculative.expected_gain import MARGIN, Pace, TrackRecord


def test_calibration_makes_a_plan_that_the_engine_runs(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL)
    made = run.make(Goal(speedup=1.2))
    made.save(tmp_path)
    plan = dd.Plan.load(tmp_path)
    assert plan.repairs
    assert made.figures["promise"]["layer_speedup_with_repairs"] >= 1.2
    assert made.figures["repaired"]["kl"] < made.figures["plain"]["kl"]
    assert len(plan.notes["block_influence"]) == LAYERS
    result = dd.Engine(model, plan=plan).generate([[5, 6, 7]], 16, eos_token_id=None)[0]
    assert result.depths == list(plan.depths(16))
    # The saved plan gives the measured figures on the held-out texts.
    again = Simulator(run.held_out).measure(plan, Repairs.load(tmp_path / "repairs.safetensors"))
    assert again.kl == pytest.approx(made.figures["repaired"]["kl"], rel=1e-3)
    held = {tuple(row) for batch in run.held_out.batches for row in batch.inputs.tolist()}
    fitted = {tuple(row) for part in (run.fit, run.select) for batch in part.batches for row in batch.inputs.tolist()}
    assert not held & fitted


def test_maps_learn_where_there_is_time_for_it(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = Calibration(model, None, token_prompts(), tmp_path, replace(SMALL, learning_minutes=10.0))
    made = run.make(Goal(speedup=1.2))
    learned = made.figures["learned"]
    assert learned["maps"]["kl"] == made.figures["repaired"]["kl"]
    assert min(point["kl"] for point in learned["curve"]) < learned["curve"][0]["kl"]
    assert learned["closed_form"]["kl_on_own_text"] != learned["maps"]["kl_on_own_text"]
    choices = made.plan.notes["calibration"]
    assert choices["KL on text of its own"] == learned["maps"]["kl_on_own_text"] > 0
    assert choices["steps of learning"] == learned["curve"][-1]["step"] > 0
    json.dumps(made.figures, allow_nan=False)
    made.save(tmp_path)
    saved = Repairs.load(tmp_path / "repairs.safetensors")
    again = Simulator(run.held_out).measure(dd.Plan.load(tmp_path), saved)
    assert again.kl == pytest.approx(made.figures["repaired"]["kl"], rel=1e-3)
    alone = Calibration(model, None, token_prompts(), tmp_path / "alone", SMALL).make(Goal(speedup=1.2))
    assert alone.figures["learned"] is None
    assert alone.figures["repaired"]["kl"] == learned["closed_form"]["kl"]


def test_maps_of_a_model_in_float16_do_not_learn(tmp_path: Path) -> None:
    said: list[str] = []
    settings = replace(SMALL, learning_minutes=10.0)
    run = Calibration(tiny_model("llama").half(), None, token_prompts(), tmp_path, settings, say=said.append)
    assert run.make(Goal(speedup=1.2)).figures["learned"] is None
    assert any("maps are not trained in float16" in line for line in said)


def test_a_plan_to_draft_with_is_the_fastest_by_measured_agreement(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL)
    made = run.make(Goal(lossless=True))
    rates = [found["speedup"] for found in made.figures["tried"]]
    chosen = made.figures["drafting"]
    best = max(made.figures["tried"], key=lambda found: found["speedup"])
    assert (chosen["depth"], chosen["cost"]) == (best["depth"], best["cost"])
    assert max(rates) > min(rates)
    only = made.repairs.only({best["depth"]})
    assert best["acceptance"] == pytest.approx(Simulator(Drafts(run.select)).measure(made.plan, only).agreement)
    assert chosen["acceptance"] == pytest.approx(Simulator(Drafts(run.held_out)).measure(made.plan, only).agreement)
    assert expected(5, 1.0, 0.5).speedup > 1.0 > expected(5, 0.2, 0.5).speedup
    assert chosen["pays"] is (chosen["speedup"] > MARGIN)
    # As an engine would decide, once it knows as much.
    for acceptance in (0.2, 0.55, 1.0):
        record = TrackRecord(Pace().costs(0.5), prior=acceptance, depth=5)
        assert record.pays is expected(5, record.acceptance, 0.5).pays
    made.save(tmp_path)
    plan = dd.Plan.load(tmp_path)
    engine = dd.Engine(model, plan=plan)
    assert set(engine.lanes.drafting(engine.repairs).by_depth) == set(made.repairs.at_depth)
    for prompt in token_prompts()[:3]:
        full, lossless = (engine.generate([prompt], 30, mode=m, eos_token_id=None)[0] for m in ("full", "lossless"))
        assert lossless.token_ids == full.token_ids
    assert drafter_of(plan) == plan
    made.save(tmp_path / "lossless")
    assert drafter_of(dd.Plan.load(tmp_path)).folder == tmp_path / "lossless"
    with pytest.raises(DepthDecayError, match="give one of"):
        Goal(lossless=True, speedup=1.2)


def test_a_budget_is_kept_with_its_bound_or_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL)
    loose = run.make(Goal(max_kl=0.5)).figures["promise"]
    assert loose["bound"] <= 0.5
    assert loose["layer_speedup_with_repairs"] > 1
    agreed = run.make(Goal(max_agreement_loss=0.9)).figures["promise"]
    assert agreed["bound"] <= 0.9
    with pytest.raises(DepthDecayError, match=r"no plan for this model keeps .* the nearest is"):
        run.make(Goal(max_kl=1e-9))
    assert not (tmp_path / "plan.json").exists()


def test_an_interrupted_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    rungs: list[str] = []

    def interrupt(message: str) -> None:
        if message.startswith("searching"):
            rungs.append(message)
            if len(rungs) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Calibration(model, None, token_prompts(), tmp_path, SMALL, say=interrupt)
    calls: list[int] = []
    monkeypatch.setattr("depthdecay.calibration.kept_answers.continue_prompts", lambda *a, **k: calls.append(1))
    said: list[str] = []
    run = Calibration(model, None, token_prompts(), tmp_path, SMALL, say=said.append)
    assert not calls
    assert sum(message.startswith("searching") for message in said) == len(run.found.order) - 2
    monkeypatch.undo()
    fresh = Calibration(model, None, token_prompts(), tmp_path / "fresh", SMALL)
    assert fresh.found.order == run.found.order
    # Other settings do not reuse what was kept.
    other = Calibration(model, None, token_prompts(), tmp_path, replace(SMALL, seed=1))
    assert other.found.order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_with_shared_neurons_are_saved_in_any_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("llama").to(dtype)
    run = Calibration(model, None, token_prompts(), tmp_path, replace(SMALL, maps=(FitSettings(8, 2, 0.03),)))
    made = run.make(Goal(speedup=1.2))
    made.save(tmp_path)
    again = Simulator(run.held_out).measure(made.plan, Repairs.load(tmp_path / "repairs.safetensors"))
    assert again.kl == pytest.approx(made.figures["repaired"]["kl"], rel=1e-3)


def test_an_older_plan_does_not_stay_beside_new_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    made = Calibration(model, None, token_prompts(), tmp_path, SMALL).make(Goal(speedup=1.2))
    made.save(tmp_path)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(dd.Plan, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        made.save(tmp_path)
    assert not (tmp_path / "plan.json").exists()
