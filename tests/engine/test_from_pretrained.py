"""The library opens a model the same way as the command line: weights, plan, drafter, mode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS, tiny_model
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay.cli import app
from depthdecay.errors import ArgumentError
from depthdecay.plan.file import EMBEDDED_PLAN

PROMPT = "Why is the sky blue?"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def told(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["generate", PROMPT, "--json", "--device", "cpu", "-n", "24", *words])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ()),
        ({"mode": "full"}, ("--mode", "full")),
        ({"speedup": 1.1}, ("--speedup", "1.1")),
        ({"plan": "default"}, ("--plan", "default")),
        ({"plan": "default", "mode": "lossless"}, ("--plan", "default", "--mode", "lossless")),
        ({"alpha": 0.995, "warmup_tokens": 4}, ("--alpha", "0.995", "--warmup-tokens", "4")),
        ({"quantize": "none"}, ("--quantize", "none")),
    ],
)
def test_the_embedded_model_answers_as_on_the_command_line(
    cache: Path, settings: dict[str, object], words: tuple[str, ...]
) -> None:
    engine = dd.Engine.from_pretrained(device="cpu", **settings)  # type: ignore[arg-type]
    (result,) = engine.generate(PROMPT, 24)
    answer = told(*words)
    assert (result.token_ids, result.depths, result.mode) == tuple(answer[x] for x in ("token_ids", "depths", "mode"))


def test_a_loaded_model_brings_its_tokenizer_bits_and_drafter(cache: Path) -> None:
    loaded = dd.load(device="cpu")
    engine = dd.Engine(loaded)
    assert engine.tokenizer is loaded.tokenizer
    assert engine.plan is None
    assert engine.drafting_plan == dd.Plan.load(EMBEDDED_PLAN)
    assert getattr(engine.stack, "rounded", None) is not None  # the file's own 4-bit blocks
    assert engine.generate(PROMPT, 8)[0].token_ids == dd.Engine.from_pretrained().generate(PROMPT, 8)[0].token_ids


def test_plans_beside_another_are_found(tiny: str, tmp_path: Path) -> None:
    main, drafter = dd.Plan.decay(LAYERS, 0.9), dd.Plan.constant(LAYERS, 6)
    main.save(tmp_path)
    drafter.save(tmp_path / "lossless")
    assert dd.Engine.from_pretrained(tiny, plan=tmp_path, device="cpu").plan == main
    lossless = dd.Engine.from_pretrained(tiny, plan=tmp_path, mode="lossless", device="cpu")
    assert lossless.drafting_plan == drafter
    assert lossless.generate("hello", 8)[0].mode == "lossless"


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [({"speedup": 0.2}, "speedup"), ({"mode": "lossy"}, "mode"), ({"plan": "p", "alpha": 0.9}, "alpha")],
)
def test_bad_values_are_refused_before_the_model_is_loaded(
    settings: dict[str, object], parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthdecay.model.load.load", lambda *_, **__: pytest.fail("the model was loaded first"))
    with pytest.raises(ArgumentError) as caught:
        dd.Engine.from_pretrained("some/model", **settings)  # type: ignore[arg-type]
    assert parameter in caught.value.parameters


def test_plans_take_a_model_in_any_form(tiny: str) -> None:
    loaded = dd.load(tiny, device="cpu")
    expected = dd.Plan.decay(LAYERS, 0.97)
    for form in (loaded, loaded.model, dd.Engine(loaded), LAYERS):
        assert dd.Plan.decay(form, 0.97) == expected
        assert dd.Plan.for_speedup(form, 1.2) == dd.Plan.for_speedup(LAYERS, 1.2)
    assert dd.Plan.decay(tiny_model("gpt2"), 0.97) == expected
    with pytest.raises(dd.DepthDecayError, match="num_layers is 'eight'"):
        dd.Plan.decay("eight", 0.97)
