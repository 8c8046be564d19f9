"""The README's tables: decoding speed, and speed without loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from result_tables.results import (
    MISSING,
    Column,
    Result,
    TablesError,
    by_machine,
    failure,
    machine,
    software,
    table,
)

START, END = "<!-- results:start -->", "<!-- results:end -->"
NONE_YET = "No results have been recorded yet. `depthdecay bench --json benchmarks/results/NAME.json` writes one."
NOTE = (
    "Speed-ups are against our own full depth in the same run. Layer and cost speed-up are the ideal, wall-clock is "
    "measured, realised is wall-clock over cost. A time is that of one step, which yields one token for each sequence "
    "of the batch. [The terms](docs/DESIGN.md#terms) say what each counts."
)


def bench_results(results: list[Result]) -> list[Result]:
    """In the order of the tables; rows by method, since a run may have left some out."""
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


def origin(result: Result) -> list[str]:
    """One result's conditions and command, as an item of a list, with the reason of every failure."""
    settings = result["settings"]
    weights = "random weights in the true shape" if "--shape" in result["command"].split() else "real weights"
    words = [
        weights,
        settings["dtype"],
        f"prompt of {settings['prompt_tokens']}",
        f"{settings['new_tokens']} new tokens",
        f"median of {settings['rounds']} rounds",
        *software(result),
    ]
    lines = [f"- [{result['file']}](benchmarks/results/{result['file']}): {', '.join(words)}", ""]
    lines += [f"  `{result['command']}`", ""]
    for row in result["rows"].values():
        if row.get("error"):
            lines += [f"  {failure(row['title'], row)}", ""]
    return lines


def drafted(result: Result, lookup: bool) -> Result | None:
    """The row of the drafter that ran on all prompts, the last one of them."""
    rows = [row for row in result["lossless_rows"] if row["method"].startswith("lossless") and row["speedup"]]
    rows = [row for row in rows if row["method"].endswith("lookup") == lookup]
    return next((row for row in reversed(rows) if row["prompts"] == result["settings"]["prompts"]), None)


def drafted_speed(lookup: bool) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        row = drafted(result, lookup)
        return MISSING if row is None else f"{row['speedup']:.2f}x"

    return show


def pace(method: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        row = next((row for row in result["lossless_rows"] if row["method"] == method), None)
        return MISSING if row is None or not row["tokens_per_second"] else f"{row['tokens_per_second']:.0f}"

    return show


def parted(result: Result) -> str:
    """Answers that are not full depth's, with lookup where it ran."""
    row = drafted(result, lookup=True) or drafted(result, lookup=False)
    return MISSING if row is None else f"{row['answers_that_differ']} of {row['prompts']}"


WITHOUT_LOSS: tuple[Column, ...] = (
    ("model", lambda r: f"[{r['model']}](benchmarks/results/{r['file']})"),
    ("precision", lambda r: str(r["settings"]["dtype"])),
    ("prompts", lambda r: f"{r['settings']['prompts']} of {_option(r['command'], '--prompts')}"),
    ("`generate`, tokens/s", pace("transformers generate")),
    ("our full depth, tokens/s", pace("full")),
    ("lossless, drafts by layers", drafted_speed(lookup=False)),
    ("and by lookup", drafted_speed(lookup=True)),
    ("answers that differ", parted),
)
WITHOUT_LOSS_NOTE = (
    "Speed-ups are against our own full depth, answer by answer in turns. When these were measured, a pass over some "
    "tokens rounded differently in 16 bits than one over a single token, so near-ties could flip. "
    "[All methods, margins and commands](docs/RESULTS.md#lossless-mode)."
)


def _option(command: str, name: str) -> str:
    words = command.split()
    return words[words.index(name) + 1] if name in words else MISSING


def make_section(results: list[Result], lossless: list[Result]) -> str:
    """All that stands between the markers."""
    lines: list[str] = []
    on_gpu = sorted((r for r in lossless if r["settings"]["device"] != "cpu"), key=lambda r: (machine(r), r["file"]))
    for place, here in by_machine(on_gpu):
        lines += [f"**The full model's own answer**, {place}, batch 1:", "", *table(WITHOUT_LOSS, here), ""]
    if on_gpu:
        lines += [WITHOUT_LOSS_NOTE, ""]
    if not results:
        return "\n".join(lines).strip() or NONE_YET
    for place, here in by_machine(results):
        on_cpu = here[0]["settings"]["device"] == "cpu"
        kind = (
            "ratios within one run, since times on a CPU are not comparable between runs" if on_cpu else "decoding only"
        )
        lines += [f"**Depth decay**, {place}, {kind}:", "", *table(RATIOS if on_cpu else TIMES, here), ""]
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
