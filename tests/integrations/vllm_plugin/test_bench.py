"""The benchmark against stock vLLM: its workloads, and that each way is timed in every round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_every_way_is_measured_in_every_round(stock: Any, tmp_path: Path) -> None:
    """Not the first engine of the process, which would look for a real stdout."""
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


def test_each_way_has_a_process_and_one_that_fails_is_recorded(tiny: str, tmp_path: Path) -> None:
    from depthdecay.integrations.vllm.bench_ways import run_ways

    settings: dict[str, Any] = {
        **{"ways": ["stock", "head", "decay"], "head": "no such folder", "dummy": True, "batches": [2], "rates": [50]},
        **{"new_tokens": 8, "prompt_tokens": 4, "rate_seconds": 0.1, "rounds": 1, "dtype": "float32"},
    }
    written: list[int] = []
    found = run_ways(
        tiny,
        "LlamaForCausalLM",
        8,
        **settings,
        log_folder=tmp_path,
        on_progress=lambda found: written.append(len(found["rows"])),
    )
    assert "failed" in found["engines"]["head"]
    assert "no such folder" in (tmp_path / "head.log").read_text()
    rows = {(row["method"], row["workload"]): row for row in found["rows"]}
    methods = ("stock", "full depth", "1.25x fewer", "1.5x fewer", "1.5x fewer, one depth")
    assert set(rows) == {(method, load) for method in methods for load in ("batch-2", "poisson-50")}
    assert all(row["ms_per_token"] > 0 for row in rows.values())
    assert rows["stock", "batch-2"]["speedup"] == 1
    assert rows["full depth", "batch-2"]["answers_that_differ"] == 0
    assert rows["1.5x fewer", "poisson-50"]["first_token_p95_ms"] > 0
    assert found["engines"]["decay"]["start_seconds"] > 0
    # Handed over figure by figure, so that a run that is cut off keeps them.
    assert set(written) == set(range(len(rows) + 1))


def test_requests_of_the_decay_way_go_no_deeper_than_what_its_server_captures() -> None:
    from depthdecay.integrations.vllm.bench_ways import way_settings
    from depthdecay.integrations.vllm.settings import KEY, server_depth
    from depthdecay.model.repairs import reached_depths

    settings = way_settings("decay", "LlamaForCausalLM", 32, 256, None, None)
    server = server_depth(settings["engine"]["hf_overrides"][KEY], 32)
    captured = set(reached_depths(server.plan)) | {32}
    for asked in settings["methods"].values():
        plan = server.plan_of({KEY: asked})
        assert min(captured) <= min(plan.depths(256))
        assert plan.depths(256)[0] == 32
