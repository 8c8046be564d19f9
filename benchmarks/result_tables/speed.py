"""Decoding speed by shape and batch, each result with its command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from result_tables.results import (
    MISSING,
    Column,
    Result,
    by_machine,
    failure,
    link,
    machine,
    software,
    table,
)

NONE_YET = "None has been recorded yet. `depthdecay bench --json-file benchmarks/results/NAME.json` writes one."
NOTE = (
    "Speed-ups are over our own full depth in the same run. Layer and cost speed-up are the ideal, wall-clock is "
    "measured, realised is wall-clock over cost. A time is that of one step, which yields one token for each sequence "
    "of the batch. [The terms](DESIGN.md#terms) define what each counts."
)


def bench_results(results: list[Result]) -> list[Result]:
    """In table order; rows keyed by method, since a run may lack some."""
    return sorted(
        ({**result, "rows": {row["method"]: row for row in result["rows"]}} for result in results), key=_place_in_table
    )


def _place_in_table(result: Result) -> tuple[Any, ...]:
    """GPUs before CPUs, machine by machine, then from small models and batches to large ones."""
    settings = result["settings"]
    size = result["weight_gb"], result["model"], settings["batch"], settings["new_tokens"]
    return settings["device"] == "cpu", machine(result), *size, result["file"]


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
    ("model", lambda r: link(r, r["model"])),
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
# CPU times say more about other load on the machine than about us; ratios within a run hold.
RATIOS: tuple[Column, ...] = (
    *_WHAT,
    ("our full depth over `generate`", ratio("full against generate")),
    ("our decay over `generate`", ratio("decay against generate")),
    *_SPEEDUPS,
)


def origin(result: Result) -> list[str]:
    """One result's settings and command as a list item, with the reason for every failure."""
    settings = result["settings"]
    weights = "random weights in the real shape" if "--shape" in result["command"].split() else "real weights"
    words = [
        weights,
        settings["dtype"],
        f"prompt of {settings['prompt_tokens']}",
        f"{settings['new_tokens']} new tokens",
        f"median of {settings['rounds']} rounds",
        *software(result),
    ]
    lines = [f"- {link(result)}: {', '.join(words)}", ""]
    lines += [f"  `{result['command']}`", ""]
    for row in result["rows"].values():
        if row.get("error"):
            lines += [f"  {failure(row['title'], row)}", ""]
    return lines


def speed_section(results: list[Result]) -> list[str]:
    """A table for each machine, then the settings and command of each result."""
    if not results:
        return [NONE_YET]
    lines: list[str] = []
    for place, here in by_machine(results):
        on_cpu = here[0]["settings"]["device"] == "cpu"
        kind = (
            "ratios within one run, since times on a CPU are not comparable between runs" if on_cpu else "decoding only"
        )
        lines += [f"**Depth decay**, {place}, {kind}:", "", *table(RATIOS if on_cpu else TIMES, here), ""]
    lines += [NOTE, "", "Commands and settings:", ""]
    for result in results:
        lines += origin(result)
    return lines
