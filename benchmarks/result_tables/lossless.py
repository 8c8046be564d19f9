"""Lossless mode: every method on the same prompts, and what its passes cost."""

from __future__ import annotations

from result_tables.results import (
    MISSING,
    Column,
    Result,
    failure,
    link,
    machine,
    software,
    table,
    times,
)

LOSSLESS = (
    "Decoding only, one prompt at a time, all methods in turns in one run. The speed-up is over our own full depth on "
    "the same prompts. Ideal is what layer passes alone would give: a draft counts by its layers, a verification as "
    "one full-depth step whatever its length. Runs with answers that differ predate the kernels that round the same "
    "for one token and for several; near-ties flipped in them. [Lossless mode](LOSSLESS.md) explains how it works."
)
# For runs from before the settings had `compared`.
CAPTURED = (
    "Rows with fewer prompts were warmed up on one of them, so their time includes capturing graphs for other text "
    "lengths."
)
LOOKUP = " and lookup"  # the suffix of a method with prompt lookup
TEXTS = (
    "One loaded model on several sets of prompts, one prompt at a time, full depth and lossless mode in turns; only "
    "decoding is timed. Drafted is the share of tokens that came from drafts. Nothing was trained on these prompts "
    "unless the plan's name says so."
)
STEPS = (
    "The cost of passes, in full-depth steps, for random weights in the real shape; and the speed-up for a given "
    "acceptance rate, with the best number of drafts per window in brackets."
)


def differing(row: Result) -> str:
    """How many answers diverge from full depth, and the largest logit margin between the two tokens there."""
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
        "tokens per verification",
        lambda row: MISSING if row["tokens_per_verification"] is None else f"{row['tokens_per_verification']:.2f}",
    ),
    (
        "layer passes per token",
        lambda row: MISSING if not row["passes_per_token"] else f"{row['passes_per_token']:.3f}",
    ),
    ("answers that differ", differing),
)


def _speed(row: Result) -> str:
    window = row["tokens_per_verification"]
    if window is None:
        return times(row["speedup"])
    return f"{times(row['speedup'])}, {window:.2f} tokens per window, {row['accepted'] / row['tokens']:.0%} drafted"


def _answered(settings: Result) -> list[str]:
    """How answers were generated, in words."""
    drawn = [f"temperature {settings['temperature']:g}"] if settings["temperature"] else []
    drawn += [f"{name.replace('_', '-')} {settings[name]:g}" for name in ("top_p", "top_k") if name in settings]
    return [f"up to {settings['new_tokens']} new tokens", *([f"sampled at {' and '.join(drawn)}"] if drawn else [])]


def texts_section(results: list[Result]) -> list[str]:
    """The gain of one engine by kind of text."""
    lines: list[str] = []
    for result in results:
        reports = result["lossless_texts"]
        settings = next(iter(reports.values()))["settings"]
        words = [
            *(said := _answered(settings)),
            f"{settings.get('quantize') or settings['dtype']} on {machine({**result, 'settings': settings})}",
            *software(result),
        ]
        is_shared = result.get("shared_device", False)
        words += ["beside other processes, so without times"] if is_shared else []
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        is_absolute = settings["device"] != "cpu"  # times there compare within a run only
        heads = [
            "text",
            "prompts",
            *(["full depth, tokens/s"] if is_absolute else []),
            "speed-up",
            "with prompt lookup",
        ]
        lines += ["| " + " | ".join([*heads, "answers that differ"]) + " |", "|---" + "|---:" * len(heads) + "|"]
        for name, report in reports.items():
            full, *drafted = report["lossless_rows"]
            by_lookup = {row["method"].endswith(LOOKUP): row for row in drafted}
            differ = max(row["answers_that_differ"] for row in drafted)
            own = [word for word in _answered(report["settings"]) if word not in said]
            if "cut_off" in report["settings"]:
                own += [f"cut off {report['settings']['cut_off']}"]
            cells = [", ".join([name, *own]), str(full["prompts"])]
            cells += [MISSING if is_shared else f"{full['tokens_per_second']:.0f}"] if is_absolute else []
            shown = {} if is_shared else by_lookup
            cells += [_speed(shown[lookup]) if lookup in shown else MISSING for lookup in (False, True)]
            lines += ["| " + " | ".join([*cells, f"{differ} of {full['prompts']}"]) + " |"]
        drafter = drafted[0]["method"].removeprefix("lossless, ").removesuffix(LOOKUP)
        lines += ["", f"Drafter: {drafter}. `{result['command']}`", ""]
    return ["### By kind of text", "", TEXTS, "", *lines] if lines else []


def lossless_section(results: list[Result], steps: list[Result], texts: list[Result]) -> list[str]:
    """One table over kinds of text, one for each set of prompts, then the cost of passes by shape."""
    lines = texts_section(texts)
    if results:
        lines += [LOSSLESS, ""]
    for result in sorted(results, key=lambda r: (r["model"], r["file"])):
        settings = result["settings"]
        words = [
            f"{settings['prompts']} prompts" + (f" (cut off {settings['cut_off']})" if "cut_off" in settings else ""),
            f"up to {settings['new_tokens']} new tokens",
            f"{settings.get('quantize') or settings['dtype']} on {machine(result)}",
            *software(result),
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
        words = [f"{costs['settings']['dtype']} on {machine({**result, **costs})}", *software(result)]
        lines += [f"**{costs['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [f"A full-depth step takes {costs['full_ms']:.3f} ms. A verification costs {verified} tokens.", ""]
        lines += ["| drafts at | a draft costs | " + " | ".join(f"{p:.0%} accepted" for p in shares) + " |"]
        lines += ["|---" + "|---:" * (len(shares) + 1) + "|"]
        for depth, cost in costs["drafts"].items():
            fast = [row for row in costs["speedups"] if str(row["depth"]) == depth]
            cells = " | ".join(f"{row['speedup']:.2f}x ({row['drafts']})" for row in fast)
            lines += [f"| {depth} layers | {cost:.3f} | {cells} |"]
        lines += ["", f"`{result['command']}`", ""]
    return lines or ["None has been recorded yet. `depthdecay bench --mode lossless` writes one."]
