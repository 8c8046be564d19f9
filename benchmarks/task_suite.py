"""A plan on several tasks, by one loaded model: what `depthdecay eval` measures, a result file for each task.

python benchmarks/task_suite.py --model M --plan PLAN --out FOLDER/NAME [--speedups 1.1,1.25,1.5] [--batch 400]
TASK[:DATA][,OPTION=VALUE …] …

as in  gsm8k:test.jsonl  humaneval:HumanEval.jsonl.gz  bbh:bbh,limit=50,tokens=256  squad:squad.jsonl.gz,limit=500

Options of a task: limit (for bbh of each subtask), batch, tokens, speedups (with + between them). Results are
FOLDER/NAME-TASK.json, each with paired intervals against full depth. A run that was cut off, repeated with --go-on,
leaves tasks that have a result as they are, and goes on behind the batches that are done. A task that fails is told at
the end, behind the others.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from depthdecay import load
from depthdecay.errors import failure
from depthdecay.evaluation.evaluate import evaluate
from depthdecay.evaluation.report import EvaluationReport
from depthdecay.evaluation.task import TaskOptions, open_task
from depthdecay.result_files import require_writable


def asked(words: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `evaluate` is given for one task; its data are read now, so that a missing file is noticed at once."""
    named, *options = words.split(",")
    task, _, data = named.partition(":")
    given = dict(option.split("=", 1) for option in options)
    limit = given.pop("limit", None)
    found: dict[str, Any] = {
        "task": open_task(task, TaskOptions(data or None, None if limit is None else int(limit))),
        "batch": int(given.pop("batch", arguments.batch)),
        "speedups": [float(one) for one in given.pop("speedups", arguments.speedups.replace(",", "+")).split("+")],
        "result_file": f"{arguments.out}-{task}.json",
    }
    if "tokens" in given:
        found["max_new_tokens"] = int(given.pop("tokens"))
    if given:
        raise SystemExit(f"{task} has no option {next(iter(given))}; there are limit, batch, tokens and speedups")
    require_writable(found["result_file"])
    return found


def points(difference: dict[str, Any]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * difference[name] for name in ("value", "low", "high")))


def lines(report: EvaluationReport) -> list[str]:
    told = []
    for row in report.rows:
        words = [f"{report.task:10} {row.title:18} {row.accuracy:6.1%} of {row.n}"]
        if row.difference_to_full is not None:
            words += [points(row.difference_to_full)]
        for name, measure in row.measures.items():
            words += [f"{name} {measure['mean']:.1%}"]
            words += [points(measure["difference_to_full"])] if "difference_to_full" in measure else []
        speeds = [row.layer_speedup, row.cost_speedup, row.wall_clock_speedup]
        words += ["layers, cost, wall " + ", ".join("–" if speed is None else f"{speed:.3f}x" for speed in speeds)]
        told.append("  ".join(words))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", metavar="TASK[:DATA][,OPTION=VALUE …]")
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--out", required=True, metavar="FOLDER/NAME")
    parser.add_argument("--speedups", default="1.1,1.25,1.5")
    parser.add_argument("--methods", default="full,depthdecay")
    parser.add_argument("--batch", type=int, default=400)
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    arguments = parser.parse_args()
    tasks = [asked(words, arguments) for words in arguments.tasks]
    loaded = load(arguments.model, device=arguments.device, dtype=arguments.dtype)
    failed = []
    for one in tasks:
        started, file = time.perf_counter(), Path(one["result_file"])
        if arguments.go_on and file.exists():
            print(f"{file.name} is there", flush=True)
            continue
        try:
            report = evaluate(loaded, plan=arguments.plan, methods=arguments.methods.split(","), **one)
        except Exception as error:  # the others may still be measured
            failed.append(f"{file.name}: {failure(error)}")
            continue
        print(
            "\n".join(lines(report)), f"{file.name} after {time.perf_counter() - started:.0f} s", sep="\n", flush=True
        )
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
