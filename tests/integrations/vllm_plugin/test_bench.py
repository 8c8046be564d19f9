"""The bench beside stock vLLM: what it asks for, and that every way has its time and its ratio in each round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from depthdecay.cli import app
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm.bench import SLOTS, Workload


def test_the_mix_is_24_requests_of_unequal_length_over_8_slots() -> None:
    mix = Workload.named("mix", 128, 32)
    assert (len(mix.answers), mix.slots) == (24, SLOTS)
    assert (min(mix.answers), max(mix.answers)) == (32, 128)
    assert len(set(mix.answers)) == 24
    assert list(mix.answers) != sorted(mix.answers)
    assert Workload.named("batch-16", 128, 32).answers == (128,) * 16
    with pytest.raises(DepthDecayError, match="unknown workload 'batch-9'; known are batch-1, batch-16, mix"):
        Workload.named("batch-9", 128, 32)


def test_every_way_is_measured_in_every_round(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--workloads", "batch-1,mix", "--new-tokens", "8", "--prompt-tokens", "4", "--rounds", "2"]
    ran = CliRunner().invoke(app, ["bench-vllm", *words, "--alpha", "0.9", "--json", str(file)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(file.read_text())["vllm_rows"]
    assert {row["workload"]: row["tokens"] for row in found} == {
        "batch-1": 8,
        "mix": sum(Workload.named("mix", 8, 4).answers),
    }
    for row in found:
        assert (len(row["seconds"]), len(row["ratios"])) == (2, 2)
        assert min(row["ratios"]) <= row["speedup"] <= max(row["ratios"])
    rows = {row["method"]: row for row in found if row["workload"] == "batch-1"}
    assert list(rows) == ["stock", "full depth", "1.25x fewer", "1.5x fewer", "alpha 0.9"]
    assert rows["stock"]["ratios"] == [1, 1]
    assert rows["full depth"]["layer_speedup"] == 1 < rows["1.25x fewer"]["layer_speedup"]
