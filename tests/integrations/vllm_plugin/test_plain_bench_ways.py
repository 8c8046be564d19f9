"""How the ways of `bench-vllm --ways` are run, resumed and compared, with processes that stand in for vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from depthdecay.cli import app
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import bench_ways
from depthdecay.integrations.vllm.bench_engine import Measurement, arrivals
from depthdecay.integrations.vllm.bench_ways import run_ways, way_settings

QUICK: dict[str, Any] = {"batches": [1, 4], "rates": [3], "new_tokens": 8, "rounds": 1}

# Answers each cell of its job with 2 ms per token, 1 ms for decay. What it does after the first cell is up to a test.
CHILD = r"""
import json, sys, time
job = json.load(open(sys.argv[1]))
out = open(sys.argv[2], "a")
def say(entry):
    out.write(json.dumps(entry) + "\n"); out.flush()
say({"engine": {"start_seconds": 1.0, "todo": job["todo"]}})
for method, kind, size in job["todo"]:
    row = {"method": method, "workload": f"{kind}-{size:g}", "ms_per_token": 2.0 if method == "stock" else 1.0}
    row["tokens_per_second"] = 500
    say({"row": row | {"answers": ["a", "b" if method == "stock" else "c"]}})
    %s
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(after_a_cell: str) -> None:
        (tmp_path / "stand_in.py").write_text(CHILD % after_a_cell)

    monkeypatch.setattr(bench_ways, "_CHILD", "stand_in")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    use("pass")
    return use


def run(ways: list[str], **settings: Any) -> dict[str, Any]:
    return run_ways("folder", "LlamaForCausalLM", 32, ways=ways, **{**QUICK, **settings})


def test_ways_are_compared_with_stock(child: Any) -> None:
    found = run(["stock", "decay"])
    assert len(found["rows"]) == 3 + 4 * 3
    by_name = {(row["method"], row["workload"]): row for row in found["rows"]}
    assert by_name["1.5x fewer", "batch-4"]["speedup"] == 2
    assert by_name["full depth", "poisson-3"]["answers_that_differ"] == 1
    assert by_name["stock", "poisson-3"]["answers_that_differ"] == 0


def test_some_methods_of_decay_may_be_left_out(child: Any) -> None:
    found = run(["stock", "decay", "decay-v1"], methods=["full depth", "1.5x fewer"], rates=[], batches=[1])
    assert [row["method"] for row in found["rows"]] == [
        *("stock", "full depth", "1.5x fewer"),
        *("full depth, first model runner", "1.5x fewer, first model runner"),
    ]


def test_what_a_run_that_was_cut_off_has_measured_is_not_measured_again(child: Any) -> None:
    child("sys.exit('RuntimeError: out of memory in /a/folder/of/this/machine.py')")
    before = run(["stock", "decay"])
    assert [row["method"] for row in before["rows"]] == ["stock", "full depth"]
    assert before["engines"]["decay"]["failed"] == "RuntimeError: out of memory in machine.py"
    child("pass")
    found = run(["stock", "decay"], before=before)
    assert found["engines"]["stock"]["todo"] == [["stock", "batch", 4], ["stock", "poisson", 3]]
    assert len({(row["method"], row["workload"]) for row in found["rows"]}) == len(found["rows"]) == 15
    assert not any("failed" in engine for engine in found["engines"].values())
    assert run(["stock", "decay"], before=found) == found


def test_a_way_that_hangs_is_stopped_and_the_next_one_runs(child: Any) -> None:
    child("time.sleep(60 if job['way'] == 'ngram' else 0)")
    found = run(["ngram", "stock"], way_timeout=2)
    assert found["engines"]["ngram"]["failed"] == "stopped after 2 s"
    assert [row["method"] for row in found["rows"]] == ["n-gram drafts", "stock", "stock", "stock"]


@pytest.mark.parametrize(
    ("ways", "message"),
    [(["stok"], "unknown way 'stok'"), (["head"], "needs --head"), (["engine"], "give --plan")],
)
def test_ways_that_lack_something_are_refused(ways: list[str], message: str) -> None:
    with pytest.raises(DepthDecayError, match=message):
        run(ways)


def test_a_resumed_run_needs_the_file_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["depthdecay.cli.bench_vllm"], "check_version", lambda: None)
    file = tmp_path / "result.json"
    words = ["bench-vllm", "--ways", "stock", "--shape", "tiny", "--resume"]
    refused = CliRunner().invoke(app, words)
    assert "--resume needs --json-file" in refused.stderr
    file.write_text("{}")
    refused = CliRunner().invoke(app, [*words, "--json-file", str(file)])
    assert "is not a result of bench-vllm --ways" in refused.stderr
    file.write_text(json.dumps({"model": "tiny", "settings": {"new_tokens": 9}, "vllm_ways": {}}))
    refused = CliRunner().invoke(app, [*words, "--json-file", str(file)])
    assert "was measured with other settings" in refused.stderr


def test_the_command_writes_a_result_file_and_shows_it(
    child: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["depthdecay.cli.bench_vllm"], "check_version", lambda: None)
    file = tmp_path / "result.json"
    words = [
        "bench-vllm",
        "--ways",
        "stock, decay",
        "--shape",
        "llama-2-7b",
        "--batches",
        "1",
        "--json-file",
        str(file),
    ]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert "started in 1.0 s" in ran.stdout
    written = json.loads(file.read_text())
    assert (written["model"], written["settings"]["plan"]) == ("llama-2-7b", None)
    assert len(written["vllm_ways"]["rows"]) == 5
    assert {path.name for path in (tmp_path / "result.logs").iterdir()} == {"stock.log", "decay.log"}
    ran = CliRunner().invoke(app, [*words, "--resume"])
    assert "decay: already measured" in ran.stderr


def test_the_server_captures_the_depths_of_all_methods() -> None:
    settings = way_settings("decay", "LlamaForCausalLM", 32, 256, None, None, {"graph_depths": 4})
    assert settings["engine"]["hf_overrides"]["depth_decay"]["graph_depths"] == 4
    other = way_settings("decay-v1", "LlamaForCausalLM", 32, 256, None, None)
    assert not settings["methods"].keys() & other["methods"].keys()


def test_arrivals_are_the_same_for_every_way_and_at_least_eight() -> None:
    due, lengths = arrivals(50, 2, 64)
    assert (due, lengths) == arrivals(50, 2, 64)
    assert due == sorted(due)
    assert 60 < len(due) < 140
    assert min(lengths) >= 16
    assert max(lengths) <= 64
    assert len(arrivals(0.5, 1, 64)[0]) == 8


class _Echo:
    """Answers with the prompt and then some; accepts every other draft."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.drafted = 0

    def answer(self, prompts: list[list[int]], tokens: int, depth: Any) -> list[list[int]]:
        self.asked += prompts
        self.drafted += 2
        return [[*prompt, *range(tokens)][:tokens] for prompt in prompts]

    def draft_counts(self) -> tuple[int, int]:
        return self.drafted, self.drafted // 2


def test_given_prompts_are_taken_in_turn_and_drafts_are_counted_without_the_warm_up() -> None:
    job = {"prompts": [[5], [6], [7]], "new_tokens": 4, "rounds": 3}
    runner = _Echo()
    row = Measurement(job, runner, 10).batch_row("our head", 1, None)
    assert runner.asked == [[5], [5], [5], [6], [6], [7], [7]]
    assert len(set(row["answers"])) == 3
    assert (row["drafted"], row["acceptance"]) == (12, 0.5)
