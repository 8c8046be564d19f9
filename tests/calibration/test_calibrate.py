"""`dd.calibrate` from Python: the same folder as from the command, and bad values refused before a model is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved_model import save_tiny_chat_model
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay.calibration import calibrate as module
from depthdecay.calibration.calibrate import DEFAULT_MAX_KL, figures_of
from depthdecay.cli import app
from depthdecay.engine.engine import Engine
from depthdecay.errors import ArgumentError

QUESTIONS = [f"what is {i} and {i + 3}?" for i in range(40)]
LITTLE: dict[str, Any] = {
    **{"fit_prompts": 8, "held_out_prompts": 4, "new_tokens": 8, "width": 1, "repair_rank": 2, "repair_neurons": 0},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(QUESTIONS))
    return file


def command(tiny: str, prompts: Path, out: Path) -> list[str]:
    effort = [word for name, value in LITTLE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["calibrate", "-m", tiny, "--device", "cpu", "--prompts", str(prompts), "--out", str(out), *effort]


def untimed(file: Path) -> str:
    """A file's content without timings."""
    return re.sub(r'"seconds": [\d.]+', '"seconds": 0', file.read_text())


def test_python_makes_the_folder_that_the_command_makes(tiny: str, prompts: Path, tmp_path: Path) -> None:
    typed, called = tmp_path / "typed", tmp_path / "called"
    result = CliRunner().invoke(app, [*command(tiny, prompts, typed), "--speedup", "1.2", "--also", "1.1"])
    assert result.exit_code == 0, result.output
    said: list[str] = []
    loaded = dd.load(tiny, device="cpu")
    plan = dd.calibrate(loaded, QUESTIONS, called, speedup=1.2, also=[1.1], progress=said.append, **LITTLE)
    assert "making a plan for 1.1x" in said
    names = sorted(str(file.relative_to(typed)) for file in typed.rglob("*") if file.is_file())
    assert names == sorted(str(file.relative_to(called)) for file in called.rglob("*") if file.is_file())
    for name in names:
        if name.endswith("plan.json"):
            assert untimed(typed / name) == untimed(called / name)
        elif name.endswith(".safetensors"):
            theirs, ours = load_file(typed / name), load_file(called / name)  # by name: the order is not stable
            assert theirs.keys() == ours.keys()
            assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert plan == dd.Plan.load(called)
    assert dd.Engine(loaded.model, loaded.tokenizer, plan).generate("hello", 8)[0].mode == "decay"
    assert json.loads(untimed(typed / "calibration.json")) == json.loads(untimed(called / "calibration.json"))
    assert figures_of(plan)["repaired"]["kl"] == plan.notes["calibration"]["kl"]


def test_text_is_written_with_the_files_own_weights(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where quantized weights are the model's own, as the embedded model's are, they write the same text sooner."""
    loaded = dd.load(tiny, device="cpu")
    monkeypatch.setattr(type(loaded), "quantize_as_filed", lambda self: "int8")
    opened: list[str | None] = []
    made = Engine.__init__

    def noted(self: Engine, *given: Any, **settings: Any) -> None:
        opened.append(settings.get("quantize"))
        made(self, *given, **settings)

    monkeypatch.setattr(Engine, "__init__", noted)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    dd.calibrate(loaded, QUESTIONS, tmp_path / "out", speedup=1.2, **LITTLE)
    assert opened
    assert set(opened) == {"int8"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())


@pytest.mark.parametrize(("quantize", "in_4_bits"), [("int4", True), ("int8", False), (None, False)])
def test_a_head_for_int4_weights_is_judged_with_int4_matrices(
    quantize: str | None, in_4_bits: bool, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def learn_plan(*_given: Any, **named: Any) -> None:
        assert named["in_4_bits"] is in_4_bits
        raise Asked

    monkeypatch.setattr("depthdecay.calibration.calibrate.learn_plan", learn_plan)
    with pytest.raises(Asked):
        dd.calibrate(tiny, None, tmp_path / "out", lossless=True, quantize=quantize, device="cpu")


MORE = ("--also", "1.1, 1.5", "--no-variety", "--learn", "7.5")


def test_the_command_only_calls_it(tiny: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def noted(*given: Any, **named: Any) -> dd.Plan:
        called.append((given, named))
        raise dd.DepthDecayError("that is enough")

    monkeypatch.setattr(module, "calibrate", noted)
    result = CliRunner().invoke(app, [*command(tiny, prompts, tmp_path / "out"), *MORE])
    assert result.exit_code == 2
    ((given, named),) = called
    assert given == (tiny, str(prompts), str(tmp_path / "out"))
    assert LITTLE.items() <= named.items()
    assert named["learn"] == 7.5
    assert named["also"] == ["1.1", " 1.5"]
    assert named["variety"] is False
    assert named["device"] == "cpu"


def test_the_help_tells_the_default_goal() -> None:
    assert f"{DEFAULT_MAX_KL})." in CliRunner().invoke(app, ["calibrate", "--help"]).stdout


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"max_kl": 0.1, "speedup": 1.2}, "give one of max_kl, max_agreement_loss and speedup"),
        ({"speedup": 1}, "speedup has the value 1;"),
        ({"also": ["1.1", "x"]}, "also is 'x'"),
        ({"fit_prompts": 3}, "fit_prompts is 3"),
        ({"seed": True}, "seed is True"),
        ({"minutes": 0}, "minutes is 0"),
        ({"learn": -1}, "learn is -1; expected a number of minutes"),
        ({"learn": float("nan")}, "learn is nan"),
        ({"quantize": "int3"}, "quantize is 'int3'"),
        ({"task": "gsm8k"}, "prompts is a list"),
    ],
)
def test_bad_values_are_refused_by_pythons_names_before_a_model_is_loaded(
    given: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(dd.DepthDecayError, match=re.escape(complaint)) as caught:
        dd.calibrate("no/such-model", QUESTIONS, tmp_path / "out", **given)
    assert "--" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_is_never_rounded_for_good(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="give it by name"):
        dd.calibrate(dd.load(tiny, device="cpu"), QUESTIONS, tmp_path / "out", quantize="int8")
    with pytest.raises(dd.DepthDecayError, match="already loaded"):
        dd.calibrate(dd.load(tiny, device="cpu"), QUESTIONS, tmp_path / "out", dtype="bf16")


def test_a_plan_without_a_folder_has_no_figures() -> None:
    with pytest.raises(dd.DepthDecayError, match="no file of figures"):
        figures_of(dd.Plan.full(8))


def test_an_interrupted_command_says_how_to_go_on(
    tiny: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "calibrate", interrupted)
    result = CliRunner().invoke(app, command(tiny, prompts, tmp_path / "out"))
    assert result.exit_code == 130
    assert result.stderr == "depthdecay: interrupted; the same command resumes where it stopped\n"
