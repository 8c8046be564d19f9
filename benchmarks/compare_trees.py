"""Whether a change made anything slower: compares two source trees on one machine.

python benchmarks/compare_trees.py shapes --old OLD/src --new src [--batches 1,16,64] [--serving 64] [--json FILE]

  shapes    random weights in a real shape: batches at full depth and with a plan, then a closed loop of requests
  serving   only the closed loop
  lossless  prompts one by one, at full depth, lossless, and lossless with prompt lookup: --model, --plan and --prompts
  cpu       the embedded model in 4 bits on the CPU: --prompts one by one, then the closed loop

Each tree runs in its own process. They take turns (old new, new old, ...), so that one waits while the other measures
and both see the same machine load. Compilation and graph capture come before the rounds, also in turns. Ratios are of
times measured close together, new over old: above 1 is slower. The JSON says whether answers match, not what they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trees.figures import TREES, Row, columns, compared, cpu_summary, lossless_summary, told

from depthdecay.result_files import require_writable, write_result

WORKER = Path(__file__).parent / "trees" / "worker.py"

MODES = ("full", "decay")
WARM_UPS = 6  # prompts, as in `depthdecay bench --mode lossless`
CHUNK = 5  # prompts per turn
PATHS = re.compile(r"(/[^\s/]+)+/")


class Tree:
    """A worker process, seen from the driver."""

    def __init__(self, name: str, source: str, environment: dict[str, str]) -> None:
        self.name, self.warnings = name, set[str]()
        folder = str(Path(source).resolve())
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **environment}
        command, pipe = [sys.executable, str(WORKER), folder], subprocess.PIPE
        self.process: Any = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def send(self, do: str, **asked: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of the {self.name} tree exited with code {self.process.wait()}")
        said = json.loads(line)
        if "error" in said:
            raise SystemExit(f"the {self.name} tree failed:\n{said['error']}")
        for warning in set(said["warnings"]) - self.warnings:
            print(f"the {self.name} tree warns: {warning}", flush=True)
        self.warnings |= set(said["warnings"])
        return said["said"]

    def told_warnings(self) -> list[str]:
        return [PATHS.sub("", warning) for warning in sorted(self.warnings)]

    def ask(self, do: str, **asked: Any) -> Any:
        self.send(do, **asked)
        return self.receive()


class Comparison:
    """Both trees, their measurements, and the result file."""

    def __init__(self, arguments: argparse.Namespace, trees: dict[str, Tree], summarise: Callable[..., Any]) -> None:
        self.arguments, self.trees, self.summarise = arguments, trees, summarise
        self.rows: list[Row] = []
        hidden = ("command", "old", "new", "old_commit", "new_commit", "json")
        self.settings = {name: named(value) for name, value in vars(arguments).items() if name not in hidden}
        given = {name: getattr(arguments, f"{name}_commit") for name in TREES}
        self.commits = {name: given[name] or commit_of(getattr(arguments, name)) for name in TREES}
        self.started = time.perf_counter()

    def turns(self, number: int) -> list[Tree]:
        """Both trees, in alternating order."""
        return [self.trees[name] for name in (TREES if number % 2 == 0 else TREES[::-1])]

    def both(self, do: str, **asked: Any) -> Any:
        """Runs something unmeasured in both trees at the same time; returns the new tree's reply."""
        for tree in self.trees.values():
            tree.send(do, **asked)
        return [self.trees[name].receive() for name in TREES][-1]

    def measure(self, turn: int, number: int, do: str, row: Row, **asked: Any) -> None:
        """One measurement, or a list of them, from each tree."""
        for tree in self.turns(turn):
            said = tree.ask(do, **asked)
            for one in said if isinstance(said, list) else [said]:
                self.rows.append({**row, "tree": tree.name, "round": number, **one})

    def save(self) -> None:
        """Called after every round, since the next one may be cut short."""
        trees = {name: {"commit": self.commits[name], "warnings": self.trees[name].told_warnings()} for name in TREES}
        command = f"python benchmarks/compare_trees.py {shlex.join(map(named, sys.argv[1:]))}"
        told = {"command": command, "commit": self.commits["new"], "settings": self.settings, "trees": trees}
        seconds = round(time.perf_counter() - self.started, 1)
        print(f"{seconds:6.1f} s, {len(self.rows)} measurements", flush=True)
        figures = {"seconds": seconds, "summary": self.summarise(self.rows), "rounds": columns(self.rows)}
        if self.arguments.json:
            write_result(self.arguments.json, told | figures)


def named(value: Any) -> Any:
    """A path shortened to its last part, to keep local paths out of the results."""
    if not isinstance(value, str) or "/" not in value:
        return value
    option, equals, path = value.rpartition("=")
    there = Path(path).is_absolute() or Path(path).parent.is_dir()  # not a Hub id
    return option + equals + Path(path).name if there else value


def commit_of(source: str) -> str | None:
    """The commit of a folder that git tracks. An untracked copy inside another checkout has none."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=source, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "depthdecay"):
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("-changed" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def run_batches(comparison: Comparison) -> None:
    arguments = comparison.arguments
    size = {name: getattr(arguments, name) for name in ("prompt_tokens", "new_tokens", "speedup")}
    modes = arguments.modes.split(",")
    for batch in map(int, arguments.batches.split(",")):
        for tree in comparison.turns(0):
            comparison.settings["plan"] = tree.ask("open_batch", batch=batch, **size)
            for mode in modes:
                tree.ask("batch", mode=mode, new_tokens=arguments.new_tokens)  # compiles and captures
        for number in range(arguments.rounds):
            for mode in modes:
                row = {"kind": "batch", "batch": batch, "mode": mode}
                comparison.measure(number, number, "batch", row, mode=mode, new_tokens=arguments.new_tokens)
            comparison.save()
        comparison.both("close")


def open_serving(comparison: Comparison, prefill_tokens: int) -> Callable[[int, int], None]:
    """Opens and warms up the batchers of both trees; the returned function runs one round."""
    arguments = comparison.arguments
    at_a_time, tokens = arguments.serving, arguments.serving_tokens
    size = {"concurrency": at_a_time, "prompt": arguments.serving_prompt, "tokens": tokens}
    asked = {"speedup": arguments.serving_speedup, "prefill_tokens": prefill_tokens}
    for tree in comparison.turns(0):
        comparison.settings["serving_plan"] = tree.ask("open_serving", **size, **asked)
        for mode in MODES:
            tree.ask("serving", mode=mode, requests=at_a_time, **size)  # captures the graphs

    def run(turn: int, number: int) -> None:
        for place, mode in enumerate(MODES):
            row = {"kind": "serving", "at_a_time": at_a_time, "mode": mode}
            requests = arguments.serving_requests or 2 * at_a_time
            comparison.measure(turn + place, number, "serving", row, mode=mode, requests=requests, **size)

    return run


def shapes(comparison: Comparison) -> None:
    arguments = comparison.arguments
    names = ("shape", "device", "dtype")
    comparison.settings |= comparison.both("shape", **{name: getattr(arguments, name) for name in names})
    if arguments.command == "shapes":
        run_batches(comparison)
    if arguments.serving:
        run = open_serving(comparison, prefill_tokens=1024)
        for number in range(arguments.serving_rounds):
            run(number, number)
            comparison.save()


def single_prompts(comparison: Comparison) -> None:
    arguments, embedded = comparison.arguments, comparison.arguments.command == "cpu"
    if embedded:
        ways, model = ["full", "decay", "lossless", "lookup"], {"model": None, "device": "cpu", "quantize": "int4"}
        # The same plan for both trees, so that only the code differs.
        plan = str(Path(arguments.old).resolve() / "depthdecay" / "data" / "smollm2-135m")
    else:
        ways, plan = ["full", "lossless", "lookup"], arguments.plan
        model = {name: getattr(arguments, name) for name in ("model", "device", "dtype")}
    comparison.settings |= {name: named(value) for name, value in model.items()} | comparison.both("load", **model)
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[: arguments.limit]]
    size = {"new_tokens": arguments.new_tokens, "unending": embedded}
    for tree in comparison.turns(0):
        said = tree.ask("open_prompts", texts=texts, plan=plan, embedded=embedded)
        comparison.settings["plan"] = said["plan"]
        # Short to long, so that graphs are captured for every length before anything is timed.
        order = sorted(range(len(texts)), key=said["lengths"].__getitem__)
        warm_ups = 2 if embedded else WARM_UPS
        warm = [order[place * (len(order) - 1) // (warm_ups - 1)] for place in range(warm_ups)]
        for way in ways:
            tree.ask("answers", ways=[way], prompts=warm, **size)
    run = open_serving(comparison, prefill_tokens=128) if embedded and arguments.serving else None
    each = range(len(texts))
    if embedded:  # CPUs are disturbed more by other work, so the trees alternate with every answer
        turns = [([way], [prompt]) for prompt in each for way in ways]
    else:
        turns = [(ways, list(each[first : first + CHUNK])) for first in each[::CHUNK]]
    for number in range(arguments.rounds):
        for turn, (some, prompts) in enumerate(turns):
            comparison.measure(number + turn, number, "answers", {}, ways=some, prompts=prompts, **size)
        if run:
            run(number + len(turns), number)
        comparison.save()


COMMANDS = {"shapes": shapes, "serving": shapes, "lossless": single_prompts, "cpu": single_prompts}
SUMMARIES = {"shapes": compared, "serving": compared, "lossless": lossless_summary, "cpu": cpu_summary}
RANDOM = {"shape": "llama-2-7b", "device": "auto", "dtype": "bf16"}
BATCHES = {
    "modes": ",".join(MODES),
    "batches": "1,16,64",
    "prompt_tokens": 32,
    "new_tokens": 256,
    "speedup": "1.669",
    "rounds": 6,
}
LOOP = {"serving": 64, "serving_requests": 0, "serving_prompt": 32, "serving_tokens": 128, "serving_speedup": "1.5"}
MODEL = {"model": "", "plan": "", "device": "auto", "dtype": "bf16"}
DEFAULTS: dict[str, Row] = {  # "": required
    "shapes": RANDOM | BATCHES | LOOP | {"serving": 0, "serving_rounds": 8},
    "serving": RANDOM | LOOP | {"serving_rounds": 8},
    "lossless": MODEL | {"prompts": "", "limit": 40, "new_tokens": 128, "rounds": 3},
    "cpu": {"prompts": "", "limit": 5, "new_tokens": 96, "rounds": 8}
    | LOOP
    | {"serving": 32, "serving_requests": 48, "serving_tokens": 32},
}
HELP = {
    "prompts": 'a file of lines {"prompt": "..."}',
    "modes": "which modes to run in batches: full, decay",
    "limit": "how many prompts to use",
    "plan": "the plan to draft with",
    "serving": "concurrent requests; 0: no closed loop",
    "serving_requests": "requests per round; 0: twice the concurrent ones",
}


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, defaults in DEFAULTS.items():
        add = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter).add_argument
        for tree in TREES:
            add(f"--{tree}", required=True, metavar="DIR", help="the folder that contains its depthdecay/")
            add(f"--{tree}-commit", help="its commit, if git cannot tell")
        add("--json", metavar="FILE")
        for option, value in defaults.items():
            flag, about = f"--{option.replace('_', '-')}", HELP.get(option, " ")
            add(flag, type=type(value), default=value, required=value == "", help=about)
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    if arguments.json:
        require_writable(arguments.json)
    summarise = SUMMARIES[arguments.command]
    with ExitStack() as stack:
        # Separate caches for 4-bit weights: one tree must not read what the other wrote.
        cache = stack.enter_context(tempfile.TemporaryDirectory()) if arguments.command == "cpu" else None
        caches = {name: {"DEPTHDECAY_CACHE": f"{cache}/{name}"} if cache else {} for name in TREES}
        trees = {name: Tree(name, getattr(arguments, name), caches[name]) for name in TREES}
        for tree in trees.values():
            stack.enter_context(tree.process)
        comparison = Comparison(arguments, trees, summarise)
        COMMANDS[arguments.command](comparison)
    for line in summarise(comparison.rows):
        print(f"{told(line)}: {line['verdict']}")


if __name__ == "__main__":
    main()
