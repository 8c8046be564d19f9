"""Scripts that measure GPUs, tried on a CPU: an hour on the machine they are for is no place to find slips."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, script
from replays import replay_captures

from depthdecay import Engine
from depthdecay.cuda.kernels import gemv
from depthdecay.speculative.chain_lane import Chain


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def measured(name: str, *words: str, **replaced: Any) -> dict[str, Any]:
        file, module = tmp_path / f"{name}.json", script(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, "--device", "cpu", "--json", str(file)])
        for attribute, value in replaced.items():
            monkeypatch.setattr(module, attribute, value)
        module.main()
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return measured


def test_a_step_by_settings_of_inductor(run: Any) -> None:
    found = run("step_profile", "combo_kernels=true,x=16", "--shape", "tiny", "--tokens", "4", "--rounds", "2")
    assert [row["setting"] for row in found["settings"]] == ["ours", "combo_kernels=true,x=16"]
    assert all(row["same"] and len(row["rounds"]) == 2 and row["kernels"] for row in found["settings"])


def test_settings_of_kernels_hold_while_they_are_applied() -> None:
    module = script("kernel_settings")
    settings = module.KernelSettings.of("gemv.AHEAD=16,combo_kernels=true,gemv.96x64=32/2/5/1/64,other=some")
    assert settings.others == {"combo_kernels": True, "other": "some"}
    assert module.KernelSettings.of("ours") == module.KernelSettings()
    weights = [[torch.empty(rows, 64, device="meta") for rows in heights] for heights in ((32, 64), (64, 64))]
    before = [gemv.AHEAD, *map(gemv.tiling, weights)]
    with settings.applied():
        assert [gemv.AHEAD, *map(gemv.tiling, weights)] == [16, (32, 2, 5, 1, 64), before[2]]
    assert [gemv.AHEAD, *map(gemv.tiling, weights)] == before
    with pytest.raises(SystemExit, match="gemv has no constant AHED"):
        module.KernelSettings.of("gemv.AHED=16")


def test_attention_over_long_texts_beside_others(run: Any) -> None:
    words = ["--shapes", "tiny", "--positions", "32", "--dtype", "fp32", "--rounds", "1", "--tokens", "1,3"]
    words.append(varied := "split_attention.SUMMED=64,split_attention.LEVEL=16")
    rows = run("long_attention", *words)["rows"]
    assert [row["way"] for row in rows[:3]] == ["ours", varied, "torch"]
    assert all(row["differs_by"] < 1e-5 for row in rows if row["way"] == "torch")
    assert all("error" in row for row in rows if row["way"] not in ("ours", varied, "torch"))  # no vLLM here


def test_what_exact_batches_cost(run: Any) -> None:
    words = ["cost", "--shape", "tiny", "--rows", "1,3", "--prompt", "9", "--steps", "2", "--rounds", "1"]
    with pytest.warns(UserWarning, match="compile"):
        found = run("exact_batches", *words, "--ways", "plain", "--dtype", "fp32")
    assert [line["rows"] for line in found["lines"]] == [1, 3]


@pytest.mark.slow
def test_sampled_windows_beside_greedy_ones(cache: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_captures(monkeypatch)
    monkeypatch.setattr(Chain, "_time", lambda self, captured: 0.001)

    def with_graphs(*given: Any, **settings: Any) -> Engine:
        engine = Engine(*given, fast=False, compile=False, **settings)
        engine.uses_graphs = True
        return engine

    plan = BENCHMARKS.parent / "src" / "depthdecay" / "data" / "smollm2-135m"
    words = ["--model", "smollm2-135m", "--plan", str(plan), "--widths", "2,4", "--rounds", "1"]
    rows = run("sampled_windows", *words, Engine=with_graphs)["sampled_windows"]
    assert [row["drafts"] for row in rows] == [1, 3] * 4
    assert all(row["greedy_ms"] == row["sampled_ms"] == row["drafts"] + 1 for row in rows)


@pytest.mark.slow
def test_a_plan_on_several_tasks(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    plan = BENCHMARKS.parent / "src" / "depthdecay" / "data" / "smollm2-135m"
    words = ["--model", "smollm2-135m", "--device", "cpu", "--plan", str(plan), "--out", str(tmp_path / "suite")]
    words += ["--speedups", "1.1", "--batch", "2", f"gsm8k:{data},tokens=3,limit=1", "--go-on"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["task_suite.py", *words])
        script("task_suite").main()
    found = json.loads((tmp_path / "suite-gsm8k.json").read_text())
    assert [(row["method"], row["asked_speedup"]) for row in found["rows"]] == [("full", None), ("depthdecay", 1.1)]
    assert found["settings"]["max_new_tokens"] == 3
    assert "suite-gsm8k.json is there" in capsys.readouterr().out


class Parsed(Exception):
    """Raised once a script has read its arguments."""


def test_commands_of_all_figures_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("reproduce")
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser: argparse.ArgumentParser, *words: Any) -> Any:
        parse(parser, *words)
        raise Parsed

    words = {name: str(tmp_path) for name in (*module.NEEDS, "new", "old_commit")}
    names = [figure.name for figure in module.FIGURES]
    assert len(set(names)) == len(names)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    for figure in module.FIGURES:
        name, *arguments = [word.format(**words) for word in figure.command.split()]
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", str(tmp_path / "figure.json")])
        with pytest.raises(Parsed):
            script(Path(name).stem).main()


def test_figures_are_measured_once_and_within_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("reproduce")
    tiny = "long_attention.py --shapes tiny --positions 32 --dtype fp32 --rounds 1 --tokens 1 --device cpu"
    figures = [
        module.Figure("attention", 1, tiny, ""),
        module.Figure("broken", 1, "long_attention.py --shapes none-of-these --device cpu", ""),
        module.Figure("texts", 1, "lossless_texts.py --model {model} --plan {plan}", ""),
        module.Figure("long", 10**6, tiny, ""),
    ]
    monkeypatch.setattr(module, "FIGURES", figures)

    def told() -> list[str]:
        module.main(["--out", str(tmp_path / "out"), "--model", "smollm2-135m", "--seconds", "300"])
        return capsys.readouterr().out.splitlines()

    first, second = told(), told()
    assert first[0].startswith("attention: measured in")
    assert second[0] == "attention: is there already"
    assert "failed after" in first[1]
    assert "none-of-these" in (tmp_path / "out" / "broken.log").read_text()
    assert first[2] == "texts: needs --plan"
    assert first[3].startswith("long: takes about 1000000 s, and ")
    assert json.loads((tmp_path / "out" / "attention.json").read_text())["rows"]
