from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved_llamas import save_llama
from tiny_models import tiny_model
from typer.testing import CliRunner

from depthdecay.cli import app
from depthdecay.cpu import kernel_library


def findings(*words: str) -> dict[str, dict[str, str]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert done.exit_code == 0, done.output
    return {found["name"]: found for found in json.loads(done.stdout)}


def test_the_machine() -> None:
    found = findings()
    assert {"versions", "compiled passes on the CPU", "cache folder", "extras"} <= found.keys()
    assert "CUDA" in found or "CUDA graphs" in found
    assert "torch" in found["versions"]["detail"]


def test_no_compiler_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise kernel_library.Unavailable("there is no C++ compiler (c++, g++ or clang++)")

    monkeypatch.setattr(kernel_library, "find_compiler", none)
    told = findings()["compiled passes on the CPU"]
    assert told["verdict"] == "slow"
    assert "no C++ compiler" in told["detail"]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "taken" / "cache"))
    assert findings()["cache folder"]["verdict"] == "slow"


def test_a_model_of_the_plain_form(tmp_path: Path) -> None:
    save_llama(tmp_path)
    found = findings("--model", str(tmp_path), "--device", "cpu")
    assert "LlamaForCausalLM, 2 layers" in found["model"]["detail"]
    assert found["compiled passes"]["verdict"] == "fast"
    assert found["calibrated plan"]["verdict"] == "slow"


def test_a_form_that_compiled_passes_do_not_take(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    found = findings("--model", str(tmp_path), "--device", "cpu")
    assert found["compiled passes"]["verdict"] == "slow"
    assert "own forward" in found["compiled passes"]["detail"]


def test_lines_for_people() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "versions" in done.stdout
