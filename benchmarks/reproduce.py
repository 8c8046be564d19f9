"""Measure the GPU's figures again, one command after the other, within a time limit.

python benchmarks/reproduce.py --out FOLDER [--model M] [--plan PLAN] [--data FOLDER] [--old SRC --old-commit C]
[--seconds 580] [NAME …]
python benchmarks/reproduce.py --list

Each figure is a command of its own that writes FOLDER/NAME.json (its output is in FOLDER/NAME.log). Figures that have
been measured to the end at this commit are skipped, and so are those that would not fit into the seconds left: the same
command, repeated, goes on. Where something is missing that a figure needs, it says so and measures the others.

The folder of --data has gsm8k/test.jsonl, mtbench/question.jsonl, bbh/ and HumanEval.jsonl.gz; --plan holds a learned
drafter of --model; --old is the source folder of the tree to compare with. Copy the results to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from depthdecay.result_files import provenance

HERE = Path(__file__).parent
NEEDS = ("model", "plan", "data", "old")  # the options that a command may contain

TEXTS = (
    "gsm8k=gsm8k:{{data}}/gsm8k/test.jsonl,limit={gsm8k} mtbench={{data}}/mtbench/question.jsonl,limit={chat} "
    "humaneval=humaneval:{{data}}/HumanEval.jsonl.gz,limit={code} bbh=bbh:{{data}}/bbh,limit={bbh}"
)
LOSSLESS = "lossless_texts.py --model {model} --plan {plan} "
TREES = (
    "compare_trees.py shapes --old {{old}} --old-commit {{old_commit}} --new {{new}} --shape {shape} --batches 1 "
    "--modes full --new-tokens 128 --rounds 5"
)


@dataclass(frozen=True)
class Figure:
    name: str
    seconds: float  # about, on an H200
    command: str  # of a script beside this one, without its result file
    shows: str

    @property
    def needs(self) -> list[str]:
        return [option for option in NEEDS if f"{{{option}}}" in self.command]


FIGURES = (
    Figure("step-profile-qwen2.5-1.5b", 40, "step_profile.py --shape qwen2.5-1.5b --rounds 4", "a step by kernels"),
    Figure("trees-exact-qwen2.5-1.5b", 75, TREES.format(shape="qwen2.5-1.5b"), "full depth against another tree"),
    Figure("trees-exact-llama-2-7b", 75, TREES.format(shape="llama-2-7b"), "the same"),
    Figure("trees-exact-llama-2-13b", 90, TREES.format(shape="llama-2-13b"), "the same"),
    Figure("long-attention", 40, "long_attention.py", "attention behind 8,192 and 32,768 positions"),
    Figure(
        "lossless-texts",
        220,
        LOSSLESS
        + f"-n 128 {TEXTS.format(gsm8k=40, chat=80, code=40, bbh=40)} "
        + f"languages={HERE}/prompts_german_chinese.jsonl "
        + "mtbench-sampled={data}/mtbench/question.jsonl,temperature=0.7",
        "lossless mode with and without lookup, on six kinds of text",
    ),
    Figure(
        "lossless-texts-256-tokens",
        300,
        LOSSLESS
        + f"-n 256 --lookup on {TEXTS.format(gsm8k=200, chat=80, code=164, bbh=100)} "
        + "seeded=gsm8k:{data}/gsm8k/test.jsonl,limit=100,temperature=0.7",
        "answers that differ from full depth's, greedy and seeded",
    ),
    Figure(
        "lossless-texts-fp32",
        60,
        LOSSLESS + "--dtype fp32 -n 64 gsm8k=gsm8k:{data}/gsm8k/test.jsonl,limit=24",
        "lossless mode in float32",
    ),
    Figure(
        "sampled-windows", 45, "sampled_windows.py --model {model} --plan {plan}", "sampled windows beside greedy ones"
    ),
    Figure(
        "exact-batches",
        160,
        "exact_batches.py count --model {model} --prompts {data}/gsm8k/test.jsonl --count 200 --tokens 128 --plain 20",
        "answers that depend on their neighbours",
    ),
    Figure(
        "exact-batches-cost",
        90,
        "exact_batches.py cost --shape llama-2-7b --rows 1,64 --rounds 2",
        "what exact batches cost",
    ),
    Figure(
        "own-text-speed",
        90,
        "own_text_speed.py --model {model} --tokens 700000 --seconds 60",
        "how fast the model writes text of its own",
    ),
)


def is_done(file: Path, commit: str) -> bool:
    """Whether the figure was measured to the end with this source; scripts also save what they have on the way."""
    done = file.with_suffix(".done")
    return file.is_file() and done.is_file() and done.read_text(encoding="utf-8") == commit


def measure(figure: Figure, words: dict[str, str], out: Path, seconds: float) -> str:
    """Run one figure's command; returns how it ended."""
    file = out / f"{figure.name}.json"
    script, *arguments = [word.format(**words) for word in figure.command.split()]
    command = [sys.executable, str(HERE / script), *arguments, "--json", str(file)]
    started = time.monotonic()
    with (out / f"{figure.name}.log").open("w", encoding="utf-8") as log:
        try:
            ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"cut off after {seconds:.0f} s"
    took = f"{time.monotonic() - started:.0f} s"
    if ended.returncode:
        return f"failed after {took}, see {figure.name}.log"
    file.with_suffix(".done").write_text(words["commit"], encoding="utf-8")
    return f"measured in {took}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of --list; by default all")
    parser.add_argument("--list", action="store_true")
    for option in (*NEEDS, "old-commit", "out"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--new", default=str(HERE.parent / "src"), help="the source folder to compare with --old")
    parser.add_argument("--seconds", type=float, default=580.0)
    arguments = parser.parse_args(words)
    unknown = set(arguments.names) - {figure.name for figure in FIGURES}
    if unknown:
        parser.error(f"there is no figure {min(unknown)}; --list names them")
    chosen = [figure for figure in FIGURES if not arguments.names or figure.name in arguments.names]
    if arguments.list:
        for figure in chosen:
            needs = ", ".join(f"--{option}" for option in figure.needs)
            print(f"{figure.name:28} about {figure.seconds:3.0f} s  {figure.shows}{f' ({needs})' if needs else ''}")
        return
    if arguments.out is None:
        parser.error("--out is missing: the folder for results")
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in vars(arguments).items() if isinstance(value, str)}
    given = {"commit": json.dumps(provenance()["commit"]), "old_commit": "unknown", **given}
    ends = time.monotonic() + arguments.seconds
    for figure in chosen:
        left, missing = ends - time.monotonic(), [option for option in figure.needs if option not in given]
        if is_done(out / f"{figure.name}.json", given["commit"]):
            outcome = "is there already"
        elif missing:
            outcome = f"needs --{' and --'.join(missing)}"
        elif left < figure.seconds:
            outcome = f"takes about {figure.seconds:.0f} s, and {max(0.0, left):.0f} s are left"
        else:
            outcome = measure(figure, given, out, left)
        print(f"{figure.name}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
