"""Writes the README's tables from the files in benchmarks/results; with --check only says whether they are stale."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- results:start -->", "<!-- results:end -->"
NONE_YET = "No results have been recorded yet. `depthdecay bench --json benchmarks/results/NAME.json` writes one."
NOTE = (
    "Speed-ups are against our own full depth in the same run. Layer and cost speed-up are the ideal, wall-clock is "
    "measured, realised is wall-clock over cost. A time is that of one step, which yields one token for each sequence "
    "of the batch. [The terms](docs/DESIGN.md#terms) say what each counts."
)
MISSING = "–"

Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]


class TablesError(Exception):
    """A sentence on what is wrong with a file."""


def read_results(folder: Path) -> list[Result]:
    """Every bench result of a folder, with the name of its file, in the order of the tables."""
    results = []
    for file in sorted(folder.glob("*.json")):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TablesError(f"{file.name} cannot be read as JSON: {error}") from None
        if not isinstance(result, dict) or not {"model", "settings", "rows", "command", "machine"} <= result.keys():
            print(f"{file.name} is no result of depthdecay bench and is left out", file=sys.stderr)
            continue
        # By method, since a run may have left some out.
        result["rows"] = {row["method"]: row for row in result["rows"]}
        results.append({**result, "file": file.name})
    return sorted(results, key=_place_in_table)


def _place_in_table(result: Result) -> tuple[Any, ...]:
    """GPUs before CPUs, machine by machine, then from small models and batches to large ones."""
    settings = result["settings"]
    size = result["weight_gb"], result["model"], settings["batch"], settings["new_tokens"]
    return settings["device"] == "cpu", machine(result), *size, result["file"]


def machine(result: Result) -> str:
    """What the run was on. A CPU run is named by its CPU also where a GPU stood by."""
    facts = result["machine"]
    if result["settings"]["device"] == "cuda":
        return str(facts.get("gpu", "CUDA GPU"))
    kind = "" if result["settings"]["device"] == "cpu" else f" ({result['settings']['device']})"
    return f"{facts['cpu']}, {facts['cores']} cores{kind}"


def figure(method: str, name: str, form: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        row = result["rows"].get(method)
        if row is None:
            return MISSING
        if row.get("error"):
            return "failed"
        return MISSING if row.get(name) is None else form.format(row[name])

    return show


def ratio(name: str) -> Callable[[Result], str]:
    return lambda result: f"{result['ratios'][name]:.2f}x" if name in result["ratios"] else MISSING


def bandwidth_shares(result: Result) -> str:
    shares = (figure(method, "bandwidth_share", "{:.0%}")(result) for method in ("full", "decay"))
    return " / ".join(shares)


_WHAT: tuple[Column, ...] = (
    ("model", lambda r: f"[{r['model']}](benchmarks/results/{r['file']})"),
    ("batch", lambda r: str(r["settings"]["batch"])),
)
_SPEEDUPS: tuple[Column, ...] = (
    ("layer speed-up (ideal)", figure("decay", "layer_speedup", "{:.3f}x")),
    ("cost speed-up (ideal)", figure("decay", "cost_speedup", "{:.3f}x")),
    ("wall-clock speed-up (measured)", figure("decay", "wall_clock_speedup", "{:.3f}x")),
    ("realised", figure("decay", "realised", "{:.1%}")),
)
TIMES: tuple[Column, ...] = (
    *_WHAT,
    ("`generate`, ms/token", figure("generate", "ms_per_token", "{:.2f}")),
    ("`generate`, compiled static cache, ms/token", figure("generate-static", "ms_per_token", "{:.2f}")),
    ("our full depth, ms/token", figure("full", "ms_per_token", "{:.2f}")),
    ("our decay, ms/token", figure("decay", "ms_per_token", "{:.2f}")),
    ("share of copy bandwidth, full / decay", bandwidth_shares),
    *_SPEEDUPS,
)
# The time of a CPU run says more about what else the machine was doing than about us; within a run, ratios hold.
RATIOS: tuple[Column, ...] = (
    *_WHAT,
    ("our full depth against `generate`", ratio("full against generate")),
    ("our decay against `generate`", ratio("decay against generate")),
    *_SPEEDUPS,
)


def table(columns: tuple[Column, ...], results: list[Result]) -> list[str]:
    lines = ["| " + " | ".join(heading for heading, _ in columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return lines + ["| " + " | ".join(show(result) for _, show in columns) + " |" for result in results]


def origin(result: Result) -> list[str]:
    """One result's conditions and command, as an item of a list, with the reason of every failure."""
    settings, versions = result["settings"], result.get("versions", {})
    weights = "random weights in the true shape" if "--shape" in result["command"].split() else "real weights"
    words = [
        weights,
        settings["dtype"],
        f"prompt of {settings['prompt_tokens']}",
        f"{settings['new_tokens']} new tokens",
        f"median of {settings['rounds']} rounds",
        *(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions),
    ]
    if result.get("commit"):
        words.append(f"commit {result['commit']}")
    lines = [f"- [{result['file']}](benchmarks/results/{result['file']}): {', '.join(words)}", ""]
    lines += [f"  `{result['command']}`", ""]
    for row in result["rows"].values():
        if row.get("error"):
            lines += [f"  {row['title']} failed: {' '.join(row['error'].split())[:200]}", ""]
    return lines


def make_section(results: list[Result]) -> str:
    """All that stands between the markers."""
    if not results:
        return NONE_YET
    lines: list[str] = []
    for place in dict.fromkeys(map(machine, results)):
        here = [result for result in results if machine(result) == place]
        on_cpu = here[0]["settings"]["device"] == "cpu"
        kind = (
            "ratios within one run, since times on a CPU are not comparable between runs" if on_cpu else "decoding only"
        )
        lines += [f"**{place}**, {kind}:", "", *table(RATIOS if on_cpu else TIMES, here), ""]
    lines += [NOTE, "", "The commands, and what each ran with:", ""]
    for result in results:
        lines += origin(result)
    return "\n".join(lines).strip()


def put_section(text: str, section: str) -> str:
    """The text with the section between its markers."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise TablesError(f"expected one {START} and, behind it, one {END}")
    before, rest = text.split(START)
    return f"{before}{START}\n{section}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the tables are stale")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        text = options.readme.read_text(encoding="utf-8")
        wanted = put_section(text, make_section(read_results(options.results)))
    except (TablesError, OSError) as error:
        print(f"make_tables: {error}", file=sys.stderr)
        return 2
    if wanted == text:
        return 0
    if options.check:
        print(f"{options.readme.name}: the tables of results are stale; run: make docs", file=sys.stderr)
        return 1
    options.readme.write_text(wanted, encoding="utf-8")
    print(f"{options.readme.name}: tables of results written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
