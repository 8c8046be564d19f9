"""`check` passes on sound models, and sees each fault that it is there to see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from tiny_models import tiny_model
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay import Plan
from depthdecay import self_check as check_module
from depthdecay.cli import app
from depthdecay.errors import DepthDecayError
from depthdecay.self_check import CheckRow, check_model, default_plan, model_state, state_differences


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_sound_models_pass(architecture: str) -> None:
    rows = list(check_model(tiny_model(architecture), new_tokens=10))
    assert len(rows) == 7
    assert all(row.passed for row in rows), rows


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_the_default_plan_fits_every_number_of_layers(num_layers: int) -> None:
    plan = default_plan(num_layers)
    if num_layers == 1:
        assert plan is None
    else:
        assert plan is not None
        assert plan.depth(0) == num_layers
        assert plan.depth(check_module.NEW_TOKENS) < num_layers


def test_a_model_of_one_layer_is_checked_at_full_depth() -> None:
    rows = list(check_model(tiny_model("llama", num_hidden_layers=1), new_tokens=4))
    assert all(row.passed for row in rows)


def test_a_wrong_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
        return [*right(model, prompt, new_tokens)[:-1], -1]

    right = check_module.reference
    monkeypatch.setattr(check_module, "reference", wrong)
    rows = {row.name: row for row in check_model(tiny_model(), new_tokens=5)}
    row = rows["full depth equals generate"]
    assert not row.passed
    assert "token 4" in row.detail
    assert rows["batch equals single"].passed


def test_a_wrapper_that_does_not_restore_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = check_module.applied

    @contextmanager
    def careless(model: Any, plan: Plan, **settings: Any) -> Iterator[Any]:
        with honest(model, plan, **settings) as account:
            yield account
        model.model.layers[3].forward = model.model.layers[3].forward

    monkeypatch.setattr(check_module, "applied", careless)
    row = list(check_model(tiny_model(), new_tokens=4))[-1]
    assert not row.passed
    assert "layers.3" in row.detail


@pytest.mark.parametrize("change", ["weight", "configuration", "attribute", "hook", "training"])
def test_state_differences_sees(change: str) -> None:
    model = tiny_model()
    before = model_state(model)
    assert state_differences(before, model_state(model)) == []
    if change == "weight":
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
    elif change == "configuration":
        model.config.use_cache = False
    elif change == "attribute":
        model.model.extra = 1
    elif change == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    else:
        model.model.layers[0].train()
    assert state_differences(before, model_state(model))


def test_command_passes_and_says_where_and_in_what(tmp_path: Path) -> None:
    model = save_tiny_chat_model(tmp_path)
    result = CliRunner().invoke(app, ["check", "-m", model, "--device", "cpu", "--new-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert "float32 on cpu" in result.stdout
    assert result.stdout.count("✓") == 7
    report = json.loads(
        CliRunner().invoke(app, ["check", "-m", model, "--new-tokens", "4", "--alpha", "0.9", "--json"]).stdout
    )
    assert report["passed"]
    assert report["plan"]["schedule"]["alpha"] == "0.9"


def test_command_fails_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "reference", lambda *_: [0])
    result = CliRunner().invoke(app, ["check", "-m", save_tiny_chat_model(tmp_path), "--new-tokens", "4"])
    assert result.exit_code == 1
    assert "✗" in result.stdout


def test_python_gets_the_rows_that_the_command_shows(tmp_path: Path) -> None:
    model = save_tiny_chat_model(tmp_path)
    shown = json.loads(CliRunner().invoke(app, ["check", "-m", model, "--new-tokens", "4", "--json"]).stdout)
    told: list[CheckRow] = []
    rows = dd.check(model, new_tokens=4, device="cpu", progress=told.append)
    assert [asdict(row) for row in rows] == shown["rows"]
    assert told == rows
    plan = Plan.decay(8, 0.9).save(tmp_path / "plan.json")
    assert dd.check(dd.load(model, device="cpu"), plan, new_tokens=4)[-2].detail == "8 down to 5 layers"


def test_a_model_by_name_is_checked_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(check_module, "check_model", lambda model, *_, **__: seen.append(model.dtype) or iter(()))
    model = save_tiny_chat_model(tmp_path, dtype=torch.bfloat16)
    dd.check(model, device="cpu")
    dd.check(model, device="cpu", dtype="bf16")
    assert seen == [torch.float32, torch.bfloat16]


def test_the_command_only_calls_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = CheckRow("one thing", False, "was wrong")
    monkeypatch.setattr(check_module, "check", lambda *_, progress, **__: progress(row) or [row])
    result = CliRunner().invoke(app, ["check", "-m", save_tiny_chat_model(tmp_path), "--new-tokens", "4"])
    assert result.exit_code == 1
    assert result.stdout.endswith("✗ one thing  was wrong\n")


def test_bad_values_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(DepthDecayError, match="new_tokens is 0"):
        dd.check("no/such-model", new_tokens=0)
    with pytest.raises(DepthDecayError, match="no plan at"):
        dd.check("no/such-model", "no-such-plan.json")


def test_the_embedded_model_passes() -> None:
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--new-tokens", "6"])
    assert result.exit_code == 0, result.output
