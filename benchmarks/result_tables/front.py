"""The README's small tables: lossless mode, decay and what it costs, and decay compared with `generate`."""

from __future__ import annotations

from typing import Any

from result_tables.results import MISSING, Column, Result, TablesError, machine, table
from result_tables.speed import figure

START, END = "<!-- results:start -->", "<!-- results:end -->"
NONE_YET = "No results have been recorded yet. `depthdecay bench --json-file benchmarks/results/NAME.json` writes one."
# Names that readers know.
TEXT_NAMES = {
    "gsm8k": "GSM8K (school maths)",
    "mtbench": "MT-bench (chat)",
    "humaneval": "HumanEval (code)",
    "bbh": "BIG-Bench Hard (reasoning)",
    "languages": "German and Chinese (chat)",
}
# The task with enough questions to tell plans apart, for plans that were calibrated on it.
DECAY_TASK = "gsm8k"


def file_link(result: Result, words: str) -> str:
    return f"[{words}](benchmarks/results/{result['file']})"


def newest(results: list[Result]) -> Result | None:
    """The most recent one measured on a GPU, of those on the most kinds of text; one on a few replaces none on all."""
    on_gpu = [result for result in results if result["machine"].get("gpu") and not result.get("shared_device")]
    return max(
        on_gpu,
        key=lambda result: (len(result["lossless_texts"]), result.get("date", ""), result["file"]),
        default=None,
    )


def lossless_rows(result: Result) -> list[tuple[str, Result, Result]]:
    """Each kind of text with its row at full depth and its row in lossless mode with prompt lookup; greedy ones."""
    reports = {name: one for name, one in result["lossless_texts"].items() if not one["settings"]["temperature"]}
    return [(name, report["lossless_rows"][0], report["lossless_rows"][-1]) for name, report in reports.items()]


def lossless_lines(result: Result) -> list[str]:
    settings = next(iter(result["lossless_texts"].values()))["settings"]
    place = machine({**result, "settings": settings})
    lines = [
        f"**Lossless: the same answer, sooner.** {file_link(result, result['model'])}, {settings['dtype']}, {place}, "
        f"batch 1, up to {settings['new_tokens']} tokens. The drafter was trained on text that the model wrote itself.",
        "",
        "| prompts | full depth, tokens/s | lossless, tokens/s | speed-up | answers that differ from full depth |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, full, fast in lossless_rows(result):
        cells = [TEXT_NAMES.get(name, name), f"{full['tokens_per_second']:.0f}", f"{fast['tokens_per_second']:.0f}"]
        cells += [f"**{fast['speedup']:.2f}x**", f"{fast['answers_that_differ']} of {fast['prompts']}"]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _with_interval(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return MISSING
    points = [100 * difference[name] for name in ("value", "low", "high")]
    return "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*points)


def best_peers(rows: list[Result]) -> dict[float, Result]:
    """By requested speed-up, the best of the other rules at the same layer budget."""
    peers = [row for row in rows if row["method"] not in ("full", "depthdecay", "lossless")]
    return {row["asked_speedup"]: row for row in sorted(peers, key=lambda row: row["accuracy"])}


def decay_lines(result: Result) -> list[str]:
    settings = result["settings"]
    full = next(row for row in result["rows"] if row["method"] == "full")
    peers = best_peers(result["rows"])
    lines = [
        f"**Decay: fewer layers, for a price.** {file_link(result, result['model'])}, {settings['dtype']}, "
        f"{machine(result)}, batch {settings['batch']}, {settings['questions']} questions of GSM8K, with calibrated "
        f"plans. Full depth gets {full['accuracy']:.1%} right.",
        "",
        "| plan | speed-up, measured | accuracy | difference to full depth | best other rule at this budget |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in (row for row in result["rows"] if row["method"] == "depthdecay"):
        peer = peers.get(row["asked_speedup"])
        wall = row["wall_clock_speedup"]
        cells = [f"{row['asked_speedup']:g}x", MISSING if wall is None else f"**{wall:.2f}x**"]
        cells += [f"{row['accuracy']:.1%}", _with_interval(row["difference_to_full"])]
        cells += [MISSING if peer is None else f"{peer['accuracy']:.1%} ({peer['method']})"]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


BESIDE_GENERATE: tuple[Column, ...] = (
    ("shape, batch 1", lambda r: file_link(r, r["model"])),
    ("`generate`", figure("generate", "tokens_per_second", "{:.0f}")),
    ("`generate`, compiled", figure("generate-static", "tokens_per_second", "{:.0f}")),
    ("our full depth", figure("full", "tokens_per_second", "{:.0f}")),
    ("our decay", figure("decay", "tokens_per_second", "{:.0f}")),
    ("layer speed-up (ideal)", figure("decay", "layer_speedup", "{:.2f}x")),
    ("decay over full depth", figure("decay", "wall_clock_speedup", "**{:.2f}x**")),
)


def beside_generate_lines(results: list[Result]) -> list[str]:
    lines = [
        f"**Compared with transformers.** Tokens/s on {machine(results[0])}, bfloat16, random weights in the real "
        "shape, so speed only. Compiled `generate` uses a static cache.",
        "",
    ]
    return [*lines, *table(BESIDE_GENERATE, results), ""]


def make_section(bench: list[Result], texts: list[Result], answers: list[Result]) -> str:
    """Everything between the markers."""
    lines: list[str] = []
    if text := newest(texts):
        lines += lossless_lines(text)
    if answer := _decay_answers(answers):
        lines += decay_lines(answer)
    if beside := [r for r in bench if r["settings"]["device"] == "cuda" and r["settings"]["batch"] == 1]:
        lines += beside_generate_lines(beside)
    return "\n".join(lines).strip() or NONE_YET


def _decay_answers(answers: list[Result]) -> Result | None:
    """The GPU run with the most timed plans; evaluations that shared a GPU have no times."""

    def timed_plans(result: Result) -> int:
        return sum(row["method"] == "depthdecay" and bool(row["wall_clock_speedup"]) for row in result["rows"])

    found = [result for result in answers if result["task"] == DECAY_TASK and result["machine"].get("gpu")]
    best = max(found, key=timed_plans, default=None)
    return best if best is not None and timed_plans(best) else None


def put_section(text: str, section: str) -> str:
    """The text with the section inserted between its markers."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise TablesError(f"expected one {START} followed by one {END}")
    before, rest = text.split(START)
    return f"{before}{START}\n{section}\n{END}{rest.split(END)[1]}"
