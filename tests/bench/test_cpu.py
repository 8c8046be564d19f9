"""The CPU benchmark on a tiny model: every row exists, ratios are per round, and a failed peer's row says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS, tiny_model

import depthdecay as dd
from depthdecay.bench import contenders
from depthdecay.bench import cpu as bench_cpu
from depthdecay.bench.cpu import benchmark_precisions, run_cpu_bench
from depthdecay.errors import DepthDecayError
from depthdecay.model.loaded_model import LoadedModel


def load(dtype: str) -> LoadedModel:
    model = tiny_model().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    return LoadedModel(model, None, "tiny", "folder")


def bench(**changes: Any) -> bench_cpu.CpuReport:
    settings: dict[str, Any] = {"new_tokens": 6, "prompt_tokens": 4, "rounds": 2, **changes}
    return run_cpu_bench(load, lambda loaded: dd.Plan.constant(LAYERS, 4), **settings)


def test_every_precision_stands_beside_generate() -> None:
    rows = {row.title: row for row in bench().rows}
    ours = {f"{mode} {precision}" for mode in ("full", "decay") for precision in bench_cpu.PRECISIONS}
    assert rows.keys() == ours | {"generate float32", "generate bfloat16"}
    for title, row in rows.items():
        assert row.error is None, (title, row.error)
        assert row.ms_per_token is not None
        assert row.times_generate is not None
        assert row.ms_by_round[0] > 0
        assert row.times_generate[1] <= row.times_generate[0] <= row.times_generate[2]
    assert rows["generate bfloat16"].times_generate == [1.0, 1.0, 1.0]
    assert rows["full int4"].gigabytes_per_step < rows["full int8"].gigabytes_per_step  # type: ignore[operator]
    assert rows["decay int8"].layer_speedup == pytest.approx(6 * LAYERS / (LAYERS + 5 * 4))
    assert rows["full int8"].realised == pytest.approx(1.0)


def test_a_model_by_name_is_loaded_in_both_number_types(tmp_path: Path) -> None:
    folder, file = save_tiny_chat_model(tmp_path / "model"), tmp_path / "result.json"
    settings: dict[str, Any] = {"new_tokens": 6, "prompt_tokens": 4, "rounds": 1, "precisions": ["bfloat16", "int8"]}
    report = benchmark_precisions(folder, dd.Plan.constant(LAYERS, 4), result_file=file, **settings)
    ours = ["full bfloat16", "decay bfloat16", "full int8", "decay int8"]
    assert [row.title for row in report.rows] == ["generate float32", "generate bfloat16", *ours]
    assert json.loads(file.read_text())["rows"] == report.to_dict()["rows"]


def test_warming_up_takes_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a whole uncounted run of each peer would take minutes."""
    asked: list[int] = []
    whole = contenders.transformers_decoding

    def noted(model: Any, prompts: torch.Tensor, new_tokens: int, **settings: Any) -> contenders.Decode:
        decode = whole(model, prompts, new_tokens, **settings)

        def decode_and_note() -> tuple[float, int | None]:
            asked.append(new_tokens)
            return decode()

        return decode_and_note

    monkeypatch.setattr("depthdecay.bench.cpu.transformers_decoding", noted)
    bench(precisions=("int8",), new_tokens=16, rounds=1)
    assert asked == [4, 4, 16, 16]


def test_one_precision_alone() -> None:
    titles = [row.title for row in bench(precisions=("int8",)).rows]
    assert titles == ["generate float32", "generate bfloat16", "full int8", "decay int8"]


def test_what_fails_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        def decode() -> float:
            raise RuntimeError("out of order")

        return decode

    monkeypatch.setattr(bench_cpu, "decoding", broken)
    rows = {row.title: row for row in bench(precisions=("int8",)).rows}
    assert rows["full int8"].error == "RuntimeError: out of order"
    assert rows["generate float32"].error is None


def test_bad_settings_are_refused() -> None:
    with pytest.raises(DepthDecayError, match="unknown precision 'int2'"):
        bench(precisions=("int2",))
    with pytest.raises(DepthDecayError, match="new_tokens is 1"):
        benchmark_precisions("no/such-model", new_tokens=1)
    with pytest.raises(DepthDecayError, match="exceed the model's context of 256"):
        bench(new_tokens=300)
