"""The README's tables and docs/RESULTS.md say what the result files say, and notice when they no longer do."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[2] / "benchmarks" / "make_tables.py"
_SPEC = importlib.util.spec_from_file_location("make_tables", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
sys.path.append(str(_FILE.parent))  # as where the script is run
make_tables: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_tables)
NONE_YET = importlib.import_module("result_tables.front").NONE_YET
NO_SPEEDS = importlib.import_module("result_tables.speed").NONE_YET
pictures = importlib.import_module("result_tables.pictures")
NO_ANSWERS = importlib.import_module("result_tables.quality").NO_ANSWERS

PLAN = "decay: alpha 0.99, warmup tokens 2, min layers 4, horizon 256, 32 layers down to 10, drops 15, 16, …"
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
        | {"dtype": "bfloat16", "device": device, "plan": PLAN},
        "rows": [
            row("generate", ms_per_token=21.512, tokens_per_second=46.486),
            row("generate-static", ms_per_token=7.049, tokens_per_second=141.86),
            row("full", ms_per_token=4.184, bandwidth_share=0.741, tokens_per_second=239.01),
            row("decay", **decay, wall_clock_speedup=1.6274, realised=0.98142, tokens_per_second=388.95),
        ],
        "ratios": {"full against generate": 5.1415, "decay against generate": 8.367},
    }
    return {**made, **changes}


def calibration(speedup: float = 1.1, **promise: Any) -> dict[str, Any]:
    made = {key: result()[key] for key in ("commit", "machine", "versions")}
    fidelity = {"kl": 0.0037239, "agreement": 0.9912, "perplexity": 1.0856, "full_perplexity": 1.08153}
    about_kl = {"measure": "mean KL to the full model, in nats a token", "budget": None, "bound": 0.0042607}
    return made | {
        "command": "depthdecay calibrate --speedup 1.1 --also 1.5",
        "model": "a-model",
        "promise": about_kl
        | {"asked_speedup": speedup, "layer_speedup": 1.1089, "cost_speedup": 1.0842, "prompts": 128, "tokens": 25131}
        | promise,
        "repaired": fidelity,
        "plain": fidelity | {"kl": 0.33705},
        "choices": {"rank": 512, "neurons a layer": 256, "seconds": 150.3, "new tokens": 200}
        | {"calibration prompts": 512, "calibration tokens": 100657},
    }


def difference(value: float, p: float | None) -> dict[str, Any]:
    return {"value": value, "low": value - 0.02, "high": value + 0.02, "p": p}


def answered(method: str, speedup: float | None, accuracy: float, **figures: Any) -> dict[str, Any]:
    made = {"method": method, "asked_speedup": speedup, "accuracy": accuracy, "difference_to_full": None}
    made |= {"layer_speedup": 1.0, "cost_speedup": 1.0, "wall_clock_speedup": None, "measures": {}, "group_mean": None}
    return made | figures


def evaluation(task: str = "gsm8k", device: str = "cuda", **changes: Any) -> dict[str, Any]:
    """In the schema of evaluate/report.py, as far as the tables read it."""
    made = {key: result()[key] for key in ("commit", "machine", "versions")}
    ours = {"layer_speedup": 1.1214, "cost_speedup": 1.0931, "wall_clock_speedup": 1.081}
    return (
        made
        | {
            "command": f"depthdecay eval --task {task}",
            "model": "a-model",
            "task": task,
            "settings": {"questions": 800, "asked": "0-shot chat", "max_new_tokens": 512, "over_tokens": 256}
            | {"batch": 64, "dtype": "bfloat16", "device": device},
            "rows": [
                answered("full", None, 0.5),
                answered("depthdecay", 1.1, 0.4925, difference_to_full=difference(-0.0075, 0.31), **ours),
                answered("shortgpt", 1.1, 0.125, difference_to_full=difference(-0.375, 1.2e-60), layer_speedup=1.12),
            ],
            "comparisons": [{"speedup": 1.1, "method": "depthdecay", "peer": "shortgpt"} | difference(0.3675, 3.4e-55)],
        }
        | changes
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    (tmp_path / "results").mkdir()
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    paths = ["--readme", str(folder / "README.md"), "--document", str(folder / "RESULTS.md")]
    paths += ["--results", str(folder / "results")]
    return int(make_tables.main([*paths, *arguments]))


def add(folder: Path, name: str, content: Any) -> None:
    (folder / "results" / name).write_text(json.dumps(content), encoding="utf-8")


def lines(folder: Path, name: str = "README.md") -> list[str]:
    return (folder / name).read_text(encoding="utf-8").splitlines()


def cells(folder: Path, name: str = "README.md", start: str = "| [") -> list[list[str]]:
    tables = [line for line in lines(folder, name) if line.startswith(start)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]


def test_without_results_it_says_so(folder: Path) -> None:
    assert run(folder) == 0
    assert NONE_YET in lines(folder)
    assert NO_SPEEDS in lines(folder, "RESULTS.md")
    assert not list(folder.glob("*.svg"))
    assert lines(folder)[0] == "# Title"
    assert lines(folder)[-1] == "The end."


def test_a_gpu_row_holds_times_and_both_kinds_of_speedup(folder: Path) -> None:
    add(folder, "h200.json", result())
    assert run(folder) == 0
    link = "[llama-2-7b](../benchmarks/results/h200.json)"
    times = ["21.51", "7.05", "4.18", "2.57", "74% / 80%"]
    assert cells(folder, "RESULTS.md") == [[link, "1", *times, "1.669x", "1.658x", "1.627x", "98.1%"]]
    assert "  `depthdecay bench --shape llama-2-7b --device cuda`" in lines(folder, "RESULTS.md")


def test_the_readme_has_tokens_a_second_of_gpus_at_batch_1(folder: Path) -> None:
    add(folder, "h200.json", result())
    add(folder, "batch.json", result(batch=16))
    add(folder, "cpu.json", result(device="cpu"))
    assert run(folder) == 0
    link = "[llama-2-7b](benchmarks/results/h200.json)"
    assert cells(folder) == [[link, "46", "142", "239", "389", "1.67x", "**1.63x**"]]


def test_a_cpu_row_holds_ratios_only(folder: Path) -> None:
    add(folder, "cpu.json", result(device="cpu"))
    assert run(folder) == 0
    link = "[llama-2-7b](../benchmarks/results/cpu.json)"
    assert cells(folder, "RESULTS.md") == [[link, "1", "5.14x", "8.37x", "1.669x", "1.658x", "1.627x", "98.1%"]]
    assert not [line for line in lines(folder, "RESULTS.md") if "ms/token" in line]
    assert NONE_YET in lines(folder)


def test_rows_go_by_device_size_and_batch(folder: Path) -> None:
    for number, (model, batch) in enumerate([("llama-2-70b", 1), ("llama-2-7b", 16), ("llama-2-13b", 1)]):
        add(folder, f"{number}.json", result(model, batch=batch))
    add(folder, "z.json", result("llama-2-7b"))
    add(folder, "a.json", result("smollm2-0.135b", device="cpu"))
    assert run(folder) == 0
    names = [(row[0].split("]")[0].strip("["), row[1]) for row in cells(folder, "RESULTS.md")]
    gpu = [("llama-2-7b", "1"), ("llama-2-7b", "16"), ("llama-2-13b", "1"), ("llama-2-70b", "1")]
    assert names == [*gpu, ("smollm2-0.135b", "1")]


def test_failed_and_missing_methods_are_told_apart(folder: Path) -> None:
    rows = [row for row in result()["rows"] if row["method"] != "generate"]
    rows[0] = {"method": "generate-static", "title": "the static way", "ms_per_token": None, "error": "out of\nmemory"}
    add(folder, "h200.json", result(rows=rows))
    assert run(folder) == 0
    assert cells(folder, "RESULTS.md")[0][2:4] == ["–", "failed"]
    assert "  the static way failed: out of memory" in lines(folder, "RESULTS.md")


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
    assert NONE_YET in lines(folder)
    add(folder, "other.json", {"command": "python script.py", "machine": {}, "versions": {}, "figures": []})
    assert run(folder) == 0
    assert capsys.readouterr().err == ""  # a script's own result, which some document quotes


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


def test_a_calibrated_plan_stands_beside_plain_dropping_with_its_bound_and_command(folder: Path) -> None:
    add(folder, "b.json", calibration(1.5))
    add(folder, "a.json", calibration(1.1))
    assert run(folder) == 0
    first, second = cells(folder, "RESULTS.md")
    speeds = ["1.109x", "1.084x"]
    fidelity = ["0.00372 (at most 0.00426)", "99.1%", "1.086 / 1.082", "0.337"]
    assert first == ["[1.1x](../benchmarks/results/a.json)", *speeds, *fidelity, "–", "512 / 256", "150"]
    assert second[0] == "[1.5x](../benchmarks/results/b.json)"
    assert lines(folder, "RESULTS.md").count("`depthdecay calibrate --speedup 1.1 --also 1.5`") == 1


def test_a_plan_to_draft_with_is_told_by_what_it_should_bring(folder: Path) -> None:
    add(folder, "draft.json", calibration(4.0) | {"drafting": {"speedup": 1.3712}})
    assert run(folder) == 0
    ((asked, *_),) = cells(folder, "RESULTS.md")
    assert asked == "[drafter: 1.37x expected](../benchmarks/results/draft.json)"


def test_a_bound_on_agreement_stands_with_the_agreement(folder: Path) -> None:
    asked = {"measure": "share of tokens on which plan and full model differ", "budget": 0.02, "bound": 0.0103}
    add(folder, "a.json", calibration(1.13, **asked))
    assert run(folder) == 0
    (cell,) = cells(folder, "RESULTS.md")
    assert cell[0] == "[disagreement up to 0.02](../benchmarks/results/a.json)"
    assert cell[3:5] == ["0.00372", "99.1% (at least 99.0%)"]


def test_answers_stand_against_full_depth_and_each_peer(folder: Path) -> None:
    add(folder, "a.json", evaluation())
    assert run(folder) == 0
    (full,) = cells(folder, "RESULTS.md", "| full")
    (ours,) = cells(folder, "RESULTS.md", "| depthdecay")
    (peer,) = cells(folder, "RESULTS.md", "| shortgpt")
    assert full == ["full", "50.0%", "–", "–", "1.000x", "1.000x", "–", "–", "–"]
    speeds = ["1.121x", "1.093x", "1.081x"]
    assert ours == ["depthdecay 1.1x", "49.2%", "-0.8 [-2.8, +1.2]", "0.31", *speeds, "–", "–"]
    assert peer[:4] == ["shortgpt 1.1x", "12.5%", "-37.5 [-39.5, -35.5]", "1.2e-60"]
    assert peer[-2:] == ["+36.8 [+34.8, +38.8]", "3.4e-55"]
    assert "`depthdecay eval --task gsm8k`" in lines(folder, "RESULTS.md")


def test_the_synthetic_answers_have_the_fields_of_real_ones() -> None:
    from depthdecay.evaluation.report import EvaluationReport, EvaluationRow

    made = evaluation()
    provenance = {"command", "commit", "machine", "versions"}
    assert made.keys() == {field.name for field in fields(EvaluationReport)} | provenance
    assert made["rows"][0].keys() <= {field.name for field in fields(EvaluationRow)}


def test_times_of_a_cpu_are_not_shown(folder: Path) -> None:
    add(folder, "a.json", evaluation(device="cpu"))
    assert run(folder) == 0
    (ours,) = cells(folder, "RESULTS.md", "| depthdecay")
    assert ours[4:7] == ["1.121x", "1.093x", "–"]
    assert any("bfloat16 on Any CPU, 16 cores" in line for line in lines(folder, "RESULTS.md"))


def test_measures_and_subtasks_are_shown_where_a_task_has_them(folder: Path) -> None:
    scored = answered("full", None, 0.5, measures={"f1": {"mean": 0.615}}, group_mean=0.432)
    add(folder, "a.json", evaluation("squad", rows=[scored], comparisons=[]))
    assert run(folder) == 0
    (full,) = cells(folder, "RESULTS.md", "| full")
    assert full[-2:] == ["61.5%", "43.2%"]
    assert any("| f1 | mean of subtasks |" in line for line in lines(folder, "RESULTS.md"))


@pytest.mark.parametrize(("task", "difference"), [("gsm8k", "+1.44"), ("bbh", "+0.66"), ("squad", None)])
def test_the_paper_stands_beside_the_tasks_that_it_reports(folder: Path, task: str, difference: str | None) -> None:
    add(folder, "a.json", evaluation(task))
    assert run(folder) == 0
    paper = cells(folder, "RESULTS.md", "| Llama-2 7B")
    assert [row[3] for row in paper] == ([] if difference is None else [difference])


def test_without_answers_one_line_says_so(folder: Path) -> None:
    add(folder, "a.json", calibration())
    assert run(folder) == 0
    assert NO_ANSWERS in lines(folder, "RESULTS.md")


def test_the_readme_tells_what_decay_costs_beside_the_best_peer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    middling = answered("middle-out", 1.1, 0.25)
    add(folder, "a.json", evaluation(rows=[*evaluation()["rows"], middling]))
    add(folder, "untimed.json", evaluation(rows=[answered("full", None, 0.6), answered("depthdecay", 1.1, 0.6)]))
    add(folder, "other.json", evaluation("squad"))
    add(folder, "cpu.json", evaluation(device="cpu", machine={"cpu": "Any CPU", "cores": 2}))
    add(folder, "b.json", calibration())
    assert run(folder) == 0
    assert not capsys.readouterr().err
    (cell,) = cells(folder, start="| 1.")
    assert cell == ["1.1x", "**1.08x**", "49.2%", "-0.8 points [-2.8, +1.2]", "25.0% (middle-out)"]
    assert any("Full depth gets 50.0% right." in line for line in lines(folder))


def texts(date: str = "2026-11-16", differ: int = 0) -> dict[str, Any]:
    rows = [
        {"method": "full", "tokens_per_second": 660.6, "speedup": 1.0, "tokens_per_verification": None},
        {"method": "lossless, learned head", "tokens_per_second": 1244.4, "speedup": 1.88},
        {"method": "lossless, learned head and lookup", "tokens_per_second": 1266.1, "speedup": 1.914},
    ]
    counted = {"prompts": 40, "answers_that_differ": differ, "tokens_per_verification": 2.5}
    rows = [{**counted, "tokens": 5000, "accepted": 3000} | row for row in rows]
    settings = {"new_tokens": 128, "temperature": 0.0, "dtype": "bfloat16", "device": "cuda"}
    made = {key: result()[key] for key in ("commit", "machine", "versions")}
    report = {"settings": settings, "lossless_rows": rows}
    drawn = {**settings, "temperature": 0.7, "top_p": 0.9, "cut_off": "after 40 of 80 prompts"}
    return made | {
        "model": "Qwen2.5-Coder-1.5B-Instruct",
        "command": "c",
        "date": date,
        "lossless_texts": {"gsm8k": report, "chat": {**report, "settings": drawn}},
    }


def test_the_readme_shows_the_newest_lossless_run_with_its_differences(folder: Path) -> None:
    add(folder, "old.json", texts("2026-11-15", differ=3))
    add(folder, "new.json", texts())
    few = texts("2026-12-01", differ=5)
    del few["lossless_texts"]["chat"]
    add(folder, "few.json", few)  # newer, but not on all kinds of text
    assert run(folder) == 0
    (cell,) = cells(folder, start="| GSM8K")
    assert cell == ["GSM8K (school maths)", "661", "1266", "**1.91x**", "0 of 40"]
    assert not cells(folder, start="| chat")  # sampled
    document = (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert "| gsm8k | 40 | 661 | 1.880x, 2.50 tokens per window, 60% drafted |" in document
    assert "| chat, sampled at temperature 0.7 and top-p 0.9, cut off after 40 of 80 prompts | 40 |" in document


def test_pictures_lie_beside_the_document_and_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xml.etree import ElementTree

    add(folder, "texts.json", texts())
    add(folder, "bench.json", result("qwen2.5-1.5b"))
    add(folder, "depth.json", result())
    assert run(folder) == 0
    said = {}
    for name in ("speed.svg", "depth.svg"):
        drawn = ElementTree.fromstring((folder / name).read_text(encoding="utf-8"))
        said[name] = " / ".join("".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text"))
    for words in ("transformers generate / 46", "generate, compiled / 142", "1,266 (1.91x)", "all 40 lossless answers"):
        assert words in said["speed.svg"]
    assert "256 tokens of 32 layers" in said["depth.svg"]
    add(folder, "texts.json", texts(differ=2))
    capsys.readouterr()
    assert run(folder, "--check") == 1
    assert "speed.svg: " in capsys.readouterr().err
    assert run(folder) == 0
    assert "2 of 40 lossless answers differ" in (folder / "speed.svg").read_text(encoding="utf-8")


def test_the_picture_draws_the_depths_that_the_engine_runs() -> None:
    from depthdecay import Plan

    plan = Plan.decay(32, "0.99", warmup_tokens=2, min_layers=4)
    depths = pictures.plan_depths(PLAN.replace("down to 10", "down to 4"), 256)
    assert depths == list(plan.depths(256))
    assert min(pictures.plan_depths(PLAN, 256)) == 10
    assert pictures.plan_depths("full: 28 layers down to 28", 256) is None


def test_check_looks_at_both_documents(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(folder, "h200.json", result())
    assert run(folder) == 0
    add(folder, "a.json", calibration())
    before = lines(folder, "RESULTS.md")
    capsys.readouterr()
    assert run(folder, "--check") == 1
    assert capsys.readouterr().err.startswith("RESULTS.md: ")
    assert lines(folder, "RESULTS.md") == before
    assert run(folder) == 0
    assert run(folder, "--check") == 0
    (folder / "RESULTS.md").unlink()
    assert run(folder, "--check") == 1


def test_lossless_rows_stand_with_their_differences_and_the_costs_of_passes(folder: Path) -> None:
    from depthdecay.bench.lossless_report import Divergence, LosslessReport, LosslessRow
    from depthdecay.bench.step_costs import StepCostReport

    about = {key: result()[key] for key in ("commit", "machine", "versions")}
    settings = {"prompts": 3, "new_tokens": 64, "dtype": "bfloat16", "device": "cuda"}
    drafted = LosslessRow("lossless, calibrated", 3, 100, 1.0, 100.0, 1.4216, 80, 60, 0.75, 2.5, 0.625)
    drafted.answers_that_differ, drafted.differences = 1, [Divergence(2, 17, -0.0625, 0.125, 0.01)]
    rows = [
        LosslessRow("full", 3, 100, 1.4, 70.3, 1.0),
        drafted,
        LosslessRow("transformers generate", error="no\nroom"),
    ]
    report = LosslessReport("a-model", settings, rows).to_dict()
    add(folder, "lossless.json", about | {"command": "depthdecay bench --mode lossless"} | report)
    speedups = [{"depth": 16, "acceptance": p, "drafts": 4, "speedup": 1.5} for p in (0.8, 0.9)]
    steps = StepCostReport("llama-2-7b", settings, 3.9671, {"16": 0.5}, {"2": 1.01, "4": 1.031}, speedups).to_dict()
    add(folder, "steps.json", about | {"command": "depthdecay bench --mode lossless --shape llama-2-7b"} | steps)
    assert run(folder) == 0
    full, ours = cells(folder, "RESULTS.md", "| full") + cells(folder, "RESULTS.md", "| lossless")
    assert full == ["full", "3", "70", "1.000x", "–", "–", "–", "–", "0 of 3"]
    assert ours[:4] == ["lossless, calibrated", "3", "100", "1.422x"]
    assert ours[4:] == ["1.600x", "75.0%", "2.50", "0.625", "1 of 3, margin ≤ 0.062"]
    ((_, prompts, failed, *_),) = cells(folder, "RESULTS.md", "| transformers")
    assert (prompts, failed) == ("0", "failed")
    assert "transformers generate failed: no room" in lines(folder, "RESULTS.md")
    (costs,) = cells(folder, "RESULTS.md", "| 16 layers")
    assert costs == ["16 layers", "0.500", "1.50x (4)", "1.50x (4)"]
    assert "A full-depth step takes 3.967 ms. A verification costs 1.010 for 2, 1.031 for 4 tokens." in lines(
        folder, "RESULTS.md"
    )


def test_precisions_of_a_cpu_stand_as_ratios_with_their_range(folder: Path) -> None:
    from depthdecay.bench.cpu import CpuReport, CpuRow

    settings = {"new_tokens": 64, "prompt_tokens": 32, "rounds": 3, "threads": 2}
    rows = [
        CpuRow("full int4", 5.8, bandwidth_share=0.56, times_generate=[8.28, 7.52, 9.1], times_llama=[1.69, 1.5, 19.0]),
        CpuRow("llama.cpp", error="not installed"),
    ]
    report = CpuReport("smollm2-135m", settings, 12.0, rows).to_dict()
    about = {key: result(device="cpu")[key] for key in ("commit", "machine", "versions")}
    add(folder, "cpu.json", about | {"command": "depthdecay bench --device cpu"} | report)
    assert run(folder) == 0
    (ours,) = cells(folder, "RESULTS.md", "| full int4")
    assert ours[:4] == ["full int4", "8.28x (7.52–9.10)", "1.69x (1.50–19.00)", "56%"]
    ((_, failed, *_),) = cells(folder, "RESULTS.md", "| llama.cpp")
    assert failed == "failed"


def test_the_plug_in_stands_beside_stock_vllm_with_its_range(folder: Path) -> None:
    from depthdecay.integrations.vllm.bench import VllmRow

    settings = {"new_tokens": 128, "prompt_tokens": 32, "rounds": 3, "threads": 1, "dtype": "float32"}
    row = VllmRow("mix", "alpha 0.99", 1920, ratios=[1.41, 1.35, 1.52], speedup=1.41, layer_speedup=1.5151)
    about = {key: result(device="cpu")[key] for key in ("commit", "machine", "versions")}
    about |= {"model": "a-model", "command": "depthdecay bench-vllm", "settings": settings}
    add(folder, "vllm.json", about | {"vllm_rows": [asdict(row)]})
    assert run(folder) == 0
    (found,) = cells(folder, "RESULTS.md", "| 24 requests")
    assert found == ["24 requests of unequal length, 8 at a time", "alpha 0.99", "1.515x", "1.41x (1.35–1.52)"]


def test_ways_to_start_vllm_have_a_table_and_what_their_engines_took(folder: Path) -> None:
    settings = {"new_tokens": 256, "prompt_tokens": 32, "rounds": 3, "dtype": "bfloat16", "prompts": None}
    rows = [
        {"workload": "batch-16", "method": "stock", "ms_per_token": 5.25, "speedup": 1.0, "answers": ["a", "b"]},
        {"workload": "batch-2", "method": "our head", "ms_per_token": 3.0, "speedup": 1.5, "acceptance": 0.5},
        {"workload": "poisson-8", "method": "stock", "ms_per_token": 6, "speedup": None, "first_token_p95_ms": 31.4},
    ]
    rows[0]["answers_that_differ"] = 1
    steps = {"decayed, replayed": 97, "decayed, no graph": 3}
    engines = {
        "stock": {"start_seconds": 66.2, "graph_gib": 0.5, "runner": "v2", "async_scheduling": True, "steps": steps},
        "suffix": {"failed": "ImportError: not installed"},
    }
    about = {key: result(device="cuda")[key] for key in ("commit", "machine", "versions")}
    about |= {"model": "llama-2-7b", "command": "depthdecay bench-vllm --ways stock", "settings": settings}
    add(folder, "ways.json", about | {"vllm_ways": {"rows": rows, "engines": engines}})
    assert run(folder) == 0
    first, second = cells(folder, "RESULTS.md", "| batch-")
    assert first == ["batch-2", "our head", "3.00", "1.50x", "–", "50.0%", "–"]
    assert second == ["batch-16", "stock", "5.25", "1.00x", "–", "–", "1 of 2"]
    (third,) = cells(folder, "RESULTS.md", "| poisson-8")
    assert third[4:5] == ["31"]
    text = lines(folder, "RESULTS.md")
    assert (
        "- stock: started in 66 s, graphs take 0.50 GiB, model runner v2, async scheduling, 97.0% of steps replayed"
        in text
    )
    assert "- suffix: failed: ImportError: not installed" in text
