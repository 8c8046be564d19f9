"""The README's tables say what the result files say, and notice when they no longer do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[1] / "benchmarks" / "make_tables.py"
_SPEC = importlib.util.spec_from_file_location("make_tables", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
make_tables: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_tables)

README = "# Title\n\n<!-- results:start -->\nold\n<!-- results:end -->\n\nThe end.\n"


def row(method: str, **figures: Any) -> dict[str, Any]:
    return {"method": method, "title": f"the {method} way", "error": None, **figures}


def result(model: str = "llama-2-7b", device: str = "cuda", batch: int = 1, **changes: Any) -> dict[str, Any]:
    decay = {"ms_per_token": 2.571, "bandwidth_share": 0.801, "layer_speedup": 1.6691, "cost_speedup": 1.6582}
    made = {
        "command": f"depthdecay bench --shape {model} --device {device}",
        "commit": "0123abc",
        "machine": {"cpu": "Any CPU", "cores": 16} | ({"gpu": "NVIDIA H200"} if device == "cuda" else {}),
        "versions": {"torch": "2.13.0", "transformers": "5.22.0"},
        "model": model,
        "weight_gb": float(model.rsplit("-", 1)[1].removesuffix("b")) * 2,
        "settings": {"new_tokens": 256, "prompt_tokens": 32, "batch": batch, "rounds": 3}
        | {"dtype": "bfloat16", "device": device},
        "rows": [
            row("generate", ms_per_token=21.512),
            row("generate-static", ms_per_token=7.049),
            row("full", ms_per_token=4.184, bandwidth_share=0.741),
            row("decay", **decay, wall_clock_speedup=1.6274, realised=0.98142),
        ],
        "ratios": {"full against generate": 5.1415, "decay against generate": 8.367},
    }
    return {**made, **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    (tmp_path / "results").mkdir()
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    paths = ["--readme", str(folder / "README.md"), "--results", str(folder / "results")]
    return int(make_tables.main([*paths, *arguments]))


def add(folder: Path, name: str, content: Any) -> None:
    (folder / "results" / name).write_text(json.dumps(content), encoding="utf-8")


def lines(folder: Path) -> list[str]:
    return (folder / "README.md").read_text(encoding="utf-8").splitlines()


def cells(folder: Path) -> list[list[str]]:
    tables = [line for line in lines(folder) if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]


def test_without_results_it_says_so(folder: Path) -> None:
    assert run(folder) == 0
    assert make_tables.NONE_YET in lines(folder)
    assert lines(folder)[0] == "# Title"
    assert lines(folder)[-1] == "The end."


def test_a_gpu_row_holds_times_and_both_kinds_of_speedup(folder: Path) -> None:
    add(folder, "h200.json", result())
    assert run(folder) == 0
    link = "[llama-2-7b](benchmarks/results/h200.json)"
    times = ["21.51", "7.05", "4.18", "2.57", "74% / 80%"]
    assert cells(folder) == [[link, "1", *times, "1.669x", "1.658x", "1.627x", "98.1%"]]
    assert "  `depthdecay bench --shape llama-2-7b --device cuda`" in lines(folder)


def test_a_cpu_row_holds_ratios_only(folder: Path) -> None:
    add(folder, "cpu.json", result(device="cpu"))
    assert run(folder) == 0
    link = "[llama-2-7b](benchmarks/results/cpu.json)"
    assert cells(folder) == [[link, "1", "5.14x", "8.37x", "1.669x", "1.658x", "1.627x", "98.1%"]]
    assert not [line for line in lines(folder) if "ms/token" in line]


def test_rows_go_by_device_size_and_batch(folder: Path) -> None:
    for number, (model, batch) in enumerate([("llama-2-70b", 1), ("llama-2-7b", 16), ("llama-2-13b", 1)]):
        add(folder, f"{number}.json", result(model, batch=batch))
    add(folder, "z.json", result("llama-2-7b"))
    add(folder, "a.json", result("smollm2-0.135b", device="cpu"))
    assert run(folder) == 0
    names = [(row[0].split("]")[0].strip("["), row[1]) for row in cells(folder)]
    gpu = [("llama-2-7b", "1"), ("llama-2-7b", "16"), ("llama-2-13b", "1"), ("llama-2-70b", "1")]
    assert names == [*gpu, ("smollm2-0.135b", "1")]


def test_failed_and_missing_methods_are_told_apart(folder: Path) -> None:
    rows = [row for row in result()["rows"] if row["method"] != "generate"]
    rows[0] = {"method": "generate-static", "title": "the static way", "ms_per_token": None, "error": "out of\nmemory"}
    add(folder, "h200.json", result(rows=rows))
    assert run(folder) == 0
    assert cells(folder)[0][2:4] == ["–", "failed"]
    assert "  the static way failed: out of memory" in lines(folder)


def test_check_writes_nothing_and_tells_by_its_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(folder, "h200.json", result())
    assert run(folder, "--check") == 1
    assert "make docs" in capsys.readouterr().err
    assert lines(folder) == README.splitlines()
    assert run(folder) == 0
    assert run(folder, "--check") == 0
    add(folder, "h200.json", result(commit="4567def"))
    assert run(folder, "--check") == 1


def test_other_files_are_left_out_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(folder, "other.json", {"some": "figures"})
    assert run(folder) == 0
    assert "other.json" in capsys.readouterr().err
    assert make_tables.NONE_YET in lines(folder)


@pytest.mark.parametrize(
    ("readme", "content", "words"),
    [
        ("no markers", "{}", "results:start"),
        (README, "{", "bad.json"),
    ],
)
def test_bad_files_are_refused_on_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], readme: str, content: str, words: str
) -> None:
    (folder / "README.md").write_text(readme, encoding="utf-8")
    if readme == README:
        (folder / "results" / "bad.json").write_text(content, encoding="utf-8")
    assert run(folder) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
