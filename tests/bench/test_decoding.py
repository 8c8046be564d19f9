"""The benchmark's arithmetic and its error reporting; never its speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay.bench.decoding import DecodingReport, DecodingRow, depth_to_measure, plan_to_measure, run_bench
from depthdecay.bench.model_shapes import SHAPES, random_model
from depthdecay.cli import app
from depthdecay.cli.bench_tables import _FIGURES, _HEADINGS, _table
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DepthSettings
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.result_files import write_result

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report() -> DecodingReport:
    model = random_model("tiny", CPU, torch.float32)
    model.generation_config.eos_token_id = 7
    plan = dd.Plan.for_speedup(8, 1.5, over_tokens=24)
    made = run_bench(
        model, "tiny", plan, new_tokens=24, prompt_tokens=5, rounds=2, methods=["generate", "full", "decay"]
    )
    assert model.generation_config.eos_token_id == 7  # removed for the run, then restored
    return made


def test_layers_are_counted_and_costs_follow_from_bytes(report: DecodingReport) -> None:
    rows = {row.method: row for row in report.rows}
    plan = dd.Plan.for_speedup(8, 1.5, over_tokens=24)
    assert rows["full"].layers_executed == rows["generate"].layers_executed == 8 * 24
    assert rows["decay"].layers_executed == plan.layers_executed(24)
    stack = LayerStack.of(random_model("tiny", CPU, torch.float32))
    layer, head = stack.layer_bytes()[0], stack.head_bytes()
    read = sum(plan.depth(i) * layer + head for i in range(1, 24)) / 23
    assert rows["decay"].cost_speedup == pytest.approx((8 * layer + head) / read)
    assert rows["full"].cost_speedup == 1


def test_realised_is_wall_clock_over_cost(report: DecodingReport) -> None:
    decay = next(row for row in report.rows if row.method == "decay")
    assert decay.wall_clock_speedup is not None
    assert decay.cost_speedup is not None
    assert decay.realised == pytest.approx(decay.wall_clock_speedup / decay.cost_speedup)
    assert decay.ms_per_token is not None
    assert decay.ms_min is not None
    assert decay.ms_max is not None
    assert decay.ms_min <= decay.ms_per_token <= decay.ms_max


def test_a_peer_that_fails_leaves_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("tiny", CPU, torch.float32)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(model, "generate", broken)
    made = run_bench(model, "tiny", dd.Plan.decay(8, 0.9), new_tokens=6, rounds=1, methods=["generate", "full"])
    assert made.rows[0].error == "RuntimeError: no such kernel"
    assert made.rows[0].ms_per_token is None
    assert made.rows[1].error is None


def test_a_text_that_ends_early_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Engine.generate

    def shorter(engine: Engine, prompts: Any, max_new_tokens: int, **settings: Any) -> Any:
        return whole(engine, prompts, max_new_tokens - (engine.plan is not None), **settings)

    monkeypatch.setattr(Engine, "generate", shorter)
    model = random_model("tiny", CPU, torch.float32)
    made = run_bench(model, "tiny", dd.Plan.decay(8, 0.9), new_tokens=6, rounds=1, methods=["full", "decay"])
    assert made.rows[0].error is None
    assert made.rows[1].error == "DepthDecayError: decoding ended after 5 of 6 tokens"
    assert made.rows[1].wall_clock_speedup is None


def test_longer_than_the_context_is_refused() -> None:
    model = random_model("tiny", CPU, torch.float32)
    with pytest.raises(DepthDecayError, match=r"480 and 33 new tokens make 513.*512"):
        run_bench(model, "tiny", dd.Plan.decay(8, 0.9), prompt_tokens=480, new_tokens=33, methods=["full"])


def test_true_shapes() -> None:
    """Parameters of the real models, in billions, from the shapes alone."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "qwen2.5-1.5b": 1.54}
    for shape, billions in sizes.items():
        settings = dict(SHAPES[shape])
        config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(DepthDecayError, match="llama-9"):
        random_model("llama-9", CPU, torch.float32)
    with pytest.raises(DepthDecayError, match="quick"):
        run_bench(random_model("tiny", CPU, torch.float32), "tiny", dd.Plan.decay(8, 0.9), methods=["quick"])


def test_python_gets_what_the_command_shows(tmp_path: Path) -> None:
    typed, called = tmp_path / "typed.json", tmp_path / "called.json"
    words = ["bench", "--shape", "tiny", "--device", "cpu", "--new-tokens", "8", "--rounds", "1", "--json", str(typed)]
    assert CliRunner().invoke(app, words).exit_code == 0
    report = dd.benchmark(shape="tiny", device="cpu", new_tokens=8, rounds=1, result_file=called)
    theirs, ours = (json.loads(file.read_text()) for file in (typed, called))
    assert ours["settings"] == theirs["settings"] == report.settings
    assert [row["layers_executed"] for row in ours["rows"]] == [row["layers_executed"] for row in theirs["rows"]]
    assert report.rows[-1].layer_speedup >= 1.25  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:layers are dropped")
def test_a_model_may_be_loaded_and_a_plan_be_described() -> None:
    loaded = LoadedModel(random_model("tiny", CPU, torch.float32), None, "mine", "folder")
    settings: dict[str, Any] = {"new_tokens": 4, "prompt_tokens": 4, "rounds": 1, "methods": ["full", "decay"]}
    report = dd.benchmark(loaded, dd.Plan.constant(8, 4), **settings)
    assert report.model == "mine"
    assert report.settings["plan"] == dd.Plan.constant(8, 4).describe()
    report = dd.benchmark(loaded, DepthSettings(alpha=0.9), **settings)
    assert report.settings["plan"] == dd.Plan.decay(8, 0.9).describe()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"model": "x", "shape": "tiny"}, "shape and model were given together"),
        ({"shape": "llama-9"}, "unknown shape 'llama-9'"),
        ({"model": "no/such-model", "new_tokens": 1}, "new_tokens is 1"),
        ({"model": "no/such-model", "batch": 0}, "batch is 0"),
        ({"model": "no/such-model", "methods": ["warp"]}, "unknown method 'warp'"),
        ({"model": "no/such-model", "plan": "no-such-plan.json"}, "no plan at"),
        ({"model": "no/such-model", "result_file": "/no/such/folder/x.json"}, "cannot write"),
    ],
)
def test_bad_values_are_refused_by_pythons_names_before_a_model_is_made(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DepthDecayError, match=complaint) as caught:
        dd.benchmark(**given)
    assert "--" not in str(caught.value)


def test_the_usual_speedup_may_be_averaged_over_other_tokens(tmp_path: Path) -> None:
    words = ["bench", "--shape", "tiny", "--device", "cpu", "--new-tokens", "8", "--rounds", "1", "--methods", "decay"]
    target = tmp_path / "r.json"
    assert CliRunner().invoke(app, [*words, "--over", "64", "--json", str(target)]).exit_code == 0
    made = dd.Plan.for_speedup(8, "1.25", over_tokens=64)
    assert json.loads(target.read_text())["settings"]["plan"] == made.describe()


def test_the_embedded_model_is_benched_by_its_own_plan() -> None:
    loaded = dd.load(device="cpu")
    plan = plan_to_measure(depth_to_measure(None, 128), loaded)
    assert plan.repairs is not None
    assert plan.layer_speedup(128) >= 1.25
    other = LoadedModel(loaded.model, None, "other", "folder")
    assert plan_to_measure(depth_to_measure(None, 128), other).repairs is None


def test_command_writes_a_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = Path("results", "tiny.json")  # a missing folder is created
    command = [
        "bench",
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--new-tokens",
        "8",
        "--rounds",
        "1",
        "--json",
        str(target),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "realised" in result.output
    assert "\n  range of rounds " in result.output
    written = json.loads(target.read_text())
    assert {"command", "commit", "machine", "versions", "rows", "settings"} <= written.keys()
    assert str(tmp_path) not in target.read_text()  # no local path in the result
    assert [row["method"] for row in written["rows"]] == ["generate", "full", "decay"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "llama-9"], "llama-9"),
        (["--shape", "tiny", "--model", "x"], "--model"),
        (["--shape", "tiny", "--new-tokens", "1"], "--max-new-tokens"),
        (["--shape", "tiny", "--batch", "0"], "--batch"),
        (["--shape", "tiny", "--methods", "warp"], "warp"),
        (["--shape", "tiny", "--speedup", "9"], "9"),
        (["--shape", "tiny", "--prompt-tokens", "500"], "context holds 512"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_place_that_is_not_there_is_refused_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("depthdecay.bench.decoding.load_model_or_shape", lambda *_, **__: pytest.fail("measured first"))
    (tmp_path / "file").touch()
    places = (str(tmp_path / "absent" / "x.json"), "two/levels/x.json", "file/x.json", "", ".", "a\0b", "x" * 300)
    for place in places:
        with pytest.raises(DepthDecayError) as caught:
            write_result(place, {})
        assert "\n" not in str(caught.value)
    for place in places[:3]:
        result = CliRunner().invoke(app, ["bench", "--shape", "tiny", "--device", "cpu", "--json", place])
        assert result.exit_code == 2
        assert "folder that exists" in result.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_table_of_a_large_model_fits_80_columns() -> None:
    row = DecodingRow("", "", 38.256, 38.25, 38.99, 8.1, 4321.1, 0.91, 20480, 1.254, 1.251, 1.249, 0.998, 141.2, 123.4)
    report = DecodingReport(
        "llama-2-70b", {}, 4000.0, 137.9, [DecodingRow(**{**vars(row), "method": m}) for m in _HEADINGS]
    )
    console = Console(width=80)
    with console.capture() as capture:
        console.print(_table(report))
    lines = capture.get().rstrip().splitlines()
    assert len(lines) == 2 + len(_FIGURES)  # two heading lines, and no row is wrapped
    assert all(any(line.startswith(label) for line in lines) for label in _FIGURES)
