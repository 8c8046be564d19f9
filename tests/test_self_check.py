"""`check` passes on sound models and detects each kind of fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from tiny_ggufs import FAMILIES, save_tiny_gguf
from tiny_models import tiny_model
from tokenizers import normalizers, pre_tokenizers
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay import Plan
from depthdecay import self_check as check_module
from depthdecay.cli import app
from depthdecay.errors import DepthDecayError
from depthdecay.model import gguf_tokenizer
from depthdecay.model.gguf_fields import TokenizerFields
from depthdecay.self_check import (
    CheckRow,
    check_gguf_tokenizer,
    check_model,
    default_plan,
    model_state,
    state_differences,
)


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
    assert result.stdout.endswith("all 7 checks passed\n")
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
    assert result.stdout.endswith("✗ one thing  was wrong\n1 of 1 checks failed\n")


# The tokenizer of a GGUF file


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_tokenizer_as_its_file_says_passes(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    file = save_tiny_gguf(tmp_path / "model.gguf", family)
    result = CliRunner().invoke(app, ["check", "-m", str(file), "--device", "cpu", "--new-tokens", "4", "--json"])
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 11
    assert all(row["passed"] for row in rows), rows
    assert result.exit_code == 0


def _without_bos(loaded: Any) -> None:
    loaded.tokenizer.add_bos_token = False


def _with_eos(loaded: Any) -> None:
    loaded.tokenizer.add_eos_token = True


def _another_bos(loaded: Any) -> None:
    loaded.tokenizer.bos_token = "<unk>"


def _one_end(loaded: Any) -> None:
    loaded.model.generation_config.eos_token_id = 1


def _another_token(loaded: Any) -> None:
    loaded.tokenizer.add_tokens(["an added one"])


def _another_template(loaded: Any) -> None:
    loaded.tokenizer.chat_template = "{{ messages[0]['content'] }}"


def _two_bos(loaded: Any) -> None:
    loaded.tokenizer.chat_template = "{{ bos_token }}" + loaded.tokenizer.chat_template


def _another_split(loaded: Any) -> None:
    loaded.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)


def _a_space_first(loaded: Any) -> None:
    loaded.tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )


@pytest.mark.parametrize(
    ("fault", "row", "said"),
    [
        (_without_bos, "special tokens are the file's", "the file wants BOS and no EOS"),
        (_with_eos, "special tokens are the file's", "the file wants BOS and no EOS"),
        (_another_bos, "special tokens are the file's", "bos_token_id is 3, in the file 2"),
        (_one_end, "special tokens are the file's", "'<end_of_turn>' does not end an answer"),
        (_another_token, "vocabulary equals the file's", "tokens, in the file"),
        (_another_template, "chat template is the file's", "not the file's"),
        (_two_bos, "chat template is the file's", "begins with 2 BOS"),
        (_another_split, "text is tokenized as the file says", "12345678"),
        (_a_space_first, "text is tokenized as the file says", "The capital of France is"),
    ],
)
def test_a_tokenizer_that_is_not_the_files_fails(
    fault: Callable[[Any], None], row: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    loaded = dd.load(str(save_tiny_gguf(tmp_path / "model.gguf", "gemma3")), device="cpu")
    rows = {row.name: row for row in check_gguf_tokenizer(loaded)}
    assert all(row.passed for row in rows.values()), rows
    fault(loaded)
    rows = {row.name: row for row in dd.check(loaded, new_tokens=2)}
    assert not rows[row].passed
    assert said in rows[row].detail


def test_the_command_fails_where_prompts_lack_their_bos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with transformers' own conversion: every decoding check passes, on the wrong prompts."""
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(tmp_path / "cache"))
    right = gguf_tokenizer.make_tokenizer

    def without_bos(fields: TokenizerFields) -> Any:
        return right(replace(fields, adds_bos=False))

    monkeypatch.setattr(gguf_tokenizer, "make_tokenizer", without_bos)
    file = save_tiny_gguf(tmp_path / "model.gguf", "llama-spm")
    result = CliRunner().invoke(app, ["check", "-m", str(file), "--device", "cpu", "--new-tokens", "4"])
    assert result.exit_code == 1
    assert "✗ special tokens are the file's" in result.stdout
    assert result.stdout.count("✗") == 1


def test_bad_values_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(DepthDecayError, match="new_tokens is 0"):
        dd.check("no/such-model", new_tokens=0)
    with pytest.raises(DepthDecayError, match="no plan at"):
        dd.check("no/such-model", "no-such-plan.json")


def test_the_embedded_model_passes() -> None:
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--new-tokens", "6"])
    assert result.exit_code == 0, result.output
