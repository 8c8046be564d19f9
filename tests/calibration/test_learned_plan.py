from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spoken_models import plain_spoken
from tiny_models import tiny_model

import depthdecay as dd
from depthdecay.calibration import own_questions, own_text, text_batches
from depthdecay.calibration.calibrate import figures_of
from depthdecay.calibration.learned_drafter import DrafterSettings
from depthdecay.calibration.own_text import write_own_text
from depthdecay.errors import ArgumentError, PlanMismatchError
from depthdecay.speculative.draft_head import HEAD_FILE


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for a training of seconds."""
    small = DrafterSettings(epochs=2, drafts=2, rows=8, longest=48, first_layers=(0,), most_text=1200)
    monkeypatch.setattr(DrafterSettings, "for_device", classmethod(lambda cls, device: small))
    monkeypatch.setitem(write_own_text.__kwdefaults__, "answer_tokens", 24)
    monkeypatch.setattr(text_batches, "MOST_ROWS_ELSEWHERE", 8)
    monkeypatch.setattr(own_questions, "QUESTION_TOKENS", 24)


def test_a_drafter_without_any_prompts(tmp_path: Path, little_text: None) -> None:
    loaded = plain_spoken(tmp_path / "model")
    lines: list[str] = []
    plan = dd.calibrate(loaded, None, tmp_path / "plan", lossless=True, progress=lines.append)
    assert plan.draft_head == HEAD_FILE
    assert plan.schedule.final_depth == plan.num_layers
    assert {file.name for file in (tmp_path / "plan").iterdir()} >= {HEAD_FILE, "report.html"}
    assert not (tmp_path / "plan" / ".work").exists()
    figures = figures_of(plan)["drafter"]
    assert figures["tokens_written"] > 0
    assert figures["head"]["learned"]["curve"][0]["training_loss"] is None
    assert "Draft accuracy" in (tmp_path / "plan" / "report.html").read_text(encoding="utf-8")
    assert any("writes training text" in line for line in lines)
    assert any("training a head" in line for line in lines)
    engine = dd.Engine(loaded, plan=tmp_path / "plan", mode="lossless")
    answer = engine.generate([[5, 6, 7]], 20, lookup=0)[0]
    assert answer.token_ids == engine.generate([[5, 6, 7]], 20, mode="full")[0].token_ids
    assert answer.drafted > 0
    # The plan does nothing but draft, so nobody needs to ask for lossless mode.
    assert dd.Engine(loaded, plan=tmp_path / "plan").generate([[5, 6, 7]], 4)[0].mode == "lossless"


class Interrupted(Exception):
    """Simulates Ctrl-C at a progress message."""


def test_too_little_time_for_a_head_gives_a_drafter_of_layers(
    tmp_path: Path, little_text: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "LEAST_TOKENS", 1200)
    monkeypatch.setattr(own_text._Writing, "answer_tokens_a_second", lambda self: 1.0)
    loaded = plain_spoken(tmp_path / "model")
    lines: list[str] = []

    def make(progress: Callable[[str], None]) -> dd.Plan:
        effort = {"fit_prompts": 8, "held_out_prompts": 4, "new_tokens": 8, "width": 1, "repair_rank": 2}
        return dd.calibrate(loaded, None, tmp_path / "plan", lossless=True, minutes=10, progress=progress, **effort)

    def interrupt(line: str) -> None:
        if line.startswith("looking for layers"):
            raise Interrupted

    instead = r"at 1 tokens/s the model needs 20 minutes .*; the drafter uses the model's own layers instead"
    with pytest.warns(UserWarning, match=instead), pytest.raises(Interrupted):
        make(interrupt)
    with pytest.warns(UserWarning, match=instead):
        plan = make(lines.append)
    assert "resuming with the texts of an interrupted run" in lines
    assert not any("writes" in line for line in lines)
    assert plan.draft_head is None
    assert plan.repairs
    assert figures_of(plan)["drafting"]["depth"] < plan.num_layers
    assert not (tmp_path / "plan" / ".work").exists()
    engine = dd.Engine(loaded, plan=tmp_path / "plan", mode="lossless")
    full = engine.generate([[5, 6, 7]], 20, mode="full")[0]
    assert engine.generate([[5, 6, 7]], 20, lookup=0)[0].token_ids == full.token_ids


def test_ctrl_c_saves_the_best_drafter_so_far(tmp_path: Path, little_text: None) -> None:
    loaded = plain_spoken(tmp_path / "model")
    lines: list[str] = []

    def make(progress: Callable[[str], None]) -> dd.Plan:
        return dd.calibrate(loaded, None, tmp_path / "plan", lossless=True, progress=progress)

    def interrupt(line: str) -> None:
        lines.append(line)
        if line.startswith("training a head") and sum(one.startswith("training a head") for one in lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(interrupt)
    assert lines[-1] == f"the best drafter so far is in {tmp_path / 'plan'}"
    assert (tmp_path / "plan" / ".work").is_dir()
    engine = dd.Engine(loaded, plan=tmp_path / "plan", mode="lossless")
    answer = engine.generate([[5, 6, 7]], 20, lookup=0)[0]
    assert answer.drafted > 0
    assert answer.token_ids == engine.generate([[5, 6, 7]], 20, mode="full")[0].token_ids
    assert make(lines.append).notes["drafter"]["expected_speedup"] >= 1  # resumed and finished
    assert not (tmp_path / "plan" / ".work").exists()


def test_a_trained_head_is_trained_further(tmp_path: Path, little_text: None) -> None:
    loaded = plain_spoken(tmp_path / "model")
    first = dd.calibrate(loaded, None, tmp_path / "plan", lossless=True)
    second = dd.calibrate(
        loaded, [[5, 6, 7], [9, 8]], tmp_path / "more", lossless=True, start=tmp_path / "plan", seed=1
    )
    before, after = (figures_of(plan)["drafter"]["head"] for plan in (first, second))
    assert "closed_form" in before
    assert after["trained_before"]["kl"] < before["closed_form"]["kl"]
    assert after["shape"] == before["shape"]
    assert after["vocabulary"] == before["vocabulary"]
    assert "trained before" in (tmp_path / "more" / "report.html").read_text(encoding="utf-8")
    again = dd.calibrate(loaded, None, tmp_path / "plan", lossless=True, start=tmp_path / "plan")  # in its own folder
    assert "trained_before" in figures_of(again)["drafter"]["head"]


def test_what_cannot_be_trained_further_is_refused(tmp_path: Path, little_text: None) -> None:
    loaded = plain_spoken(tmp_path / "model")
    dd.Plan.full(loaded.model.config.num_hidden_layers).save(tmp_path / "empty")
    with pytest.raises(ArgumentError, match="a plan without a learned drafter"):
        dd.calibrate(loaded, None, tmp_path / "plan", lossless=True, start=tmp_path / "empty")
    for goal in ({"speedup": 1.1}, {"lossless": True, "drafter": "layers"}):
        with pytest.raises(ArgumentError, match="start is for a learned drafter"):
            dd.calibrate(loaded, None, tmp_path / "plan", start=tmp_path / "empty", **goal)
    dd.calibrate(loaded, None, tmp_path / "plan", lossless=True)
    other = replace(loaded, model=tiny_model(hidden_size=48))
    with pytest.raises(PlanMismatchError, match="hidden size"):
        dd.calibrate(other, None, tmp_path / "other", lossless=True, start=tmp_path / "plan")


def test_an_unknown_drafter(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected one of learned, layers"):
        dd.calibrate("nowhere", None, tmp_path, lossless=True, drafter="eagle")


def test_the_plan_tells_what_was_measured(tmp_path: Path, little_text: None) -> None:
    loaded = plain_spoken(tmp_path / "model")
    dd.calibrate(loaded, ["Hello there", "What is it?"], tmp_path / "plan", lossless=True)
    notes: dict[str, Any] = json.loads((tmp_path / "plan" / "plan.json").read_text(encoding="utf-8"))["notes"][
        "drafter"
    ]
    assert 0 <= notes["right"][0] <= 1
    assert notes["expected_speedup"] >= 1
