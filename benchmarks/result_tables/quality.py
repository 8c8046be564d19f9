"""Quality: how far calibrated plans are from the full model, and their accuracy on tasks, next to the paper's."""

from __future__ import annotations

from itertools import groupby

from result_tables.results import (
    MISSING,
    Column,
    Result,
    link,
    machine,
    software,
    table,
    times,
)

FIDELITY = (
    "How far a plan's next token is from the full model's, on the full model's own greedy text for held-out prompts. "
    "KL is in nats per token. Agreement is how often both would pick the same token. In brackets is a one-sided 95% "
    "bound from a bootstrap over prompts. Plain is the same plan without its repairs. A requested speed-up counts "
    "repair maps as the layers that their weights amount to, so fewer layers run than it says. Cost speed-up counts "
    "the LM head too."
)
SECONDS = (
    "Plans of one command share one search. Seconds run from its start until that plan was done, excluding loading."
)
ANSWERS = (
    "All methods got the same questions, with greedy decoding. Layer and cost speed-up are those of the actual "
    "answers, not the planned ones. Wall-clock is per step, the median over batches; unlike in `bench`, answers "
    "differ in length. Differences are in points, with a paired 95% interval from a bootstrap over questions; p is "
    "from McNemar's exact test. Ours is the method `depthdecay`, a calibrated plan."
)
NO_ANSWERS = (
    "No answers to tasks have been recorded yet. `depthdecay eval --json-file benchmarks/results/NAME.json` adds some."
)
PAPER = (
    "For comparison, what the paper reports ([arXiv 2503.08524](https://arxiv.org/abs/2503.08524)), exact match in %. "
    "Its models and prompts differ, so do not compare its accuracies with ours."
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


def digits(value: float) -> str:
    """Three significant digits: KLs differ by powers of ten."""
    return f"{value:#.3g}".rstrip(".")


def asked(result: Result) -> str:
    promise = result["promise"]
    if result.get("drafting"):
        return f"drafter: {result['drafting']['speedup']:.2f}x expected"
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
    """On prompts of other kinds than the calibrated ones, if some were mixed in."""
    found = result.get("elsewhere")
    return MISSING if found is None else f"{digits(found['kl'])}, {digits(found['plain_kl'])}"


CALIBRATED: tuple[Column, ...] = (
    ("target", lambda r: link(r, asked(r))),
    ("layer speed-up", lambda r: f"{r['promise']['layer_speedup']:.3f}x"),
    ("cost speed-up", lambda r: f"{r['promise']['cost_speedup']:.3f}x"),
    ("KL", held_out_kl),
    ("agreement", held_out_agreement),
    (
        "perplexity, plan / full",
        lambda r: f"{r['repaired']['perplexity']:.3f} / {r['repaired']['full_perplexity']:.3f}",
    ),
    ("KL, plain", lambda r: digits(r["plain"]["kl"])),
    ("KL on other text, and plain", other_text),
    ("rank / neurons per layer", lambda r: f"{r['choices']['rank']} / {r['choices']['neurons a layer']}"),
    ("seconds", lambda r: f"{r['choices']['seconds']:.0f}"),
)


def calibration_section(results: list[Result]) -> list[str]:
    """A table for each model and command: plans of one command share their prompts and their search."""
    if not results:
        return ["No calibration has been recorded yet. `depthdecay calibrate` writes calibration.json into its plan."]
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
            *software(here[0]),
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


def measure(found: Result) -> str:
    difference = found.get("difference_to_full")
    return f"{found['mean']:.1%}" + ("" if difference is None else f", {points(difference)}")


def answer_columns(result: Result) -> tuple[Column, ...]:
    """Columns of every task, then this one's extra measures and subtasks, then ours compared with each peer."""
    against = {(found["peer"], found["speedup"]): found for found in result["comparisons"]}
    on_cpu = result["settings"]["device"] == "cpu"

    def ours(row: Result) -> Result | None:
        return against.get((row["method"], row["asked_speedup"]))

    def named(row: Result) -> str:
        return row["method"] if row["asked_speedup"] is None else f"{row['method']} {row['asked_speedup']:g}x"

    columns: list[Column] = [
        ("method", named),
        ("accuracy", lambda row: f"{row['accuracy']:.1%}"),
        ("difference to full", lambda row: points(row["difference_to_full"])),
        ("p", lambda row: chance(row["difference_to_full"])),
        ("layer speed-up", lambda row: times(row["layer_speedup"])),
        ("cost speed-up (ideal)", lambda row: times(row["cost_speedup"])),
        # Methods run one after the other for a long time: on a CPU, other work distorts the times.
        ("wall-clock speed-up (measured)", lambda row: MISSING if on_cpu else times(row["wall_clock_speedup"])),
    ]
    for name in result["rows"][0]["measures"]:
        columns.append((name, lambda row, name=name: measure(row["measures"][name])))  # type: ignore[misc]
    if result["rows"][0]["group_mean"] is not None:
        columns.append(("mean of subtasks", lambda row: f"{row['group_mean']:.1%}"))
    if against:
        columns += [("ours minus this", lambda row: points(ours(row))), ("its p", lambda row: chance(ours(row)))]
    return tuple(columns)


def answers_section(results: list[Result]) -> list[str]:
    """By task, then by model; one table per file, since only answers of one run are paired. The paper's follow."""
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
                *software(result),
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
