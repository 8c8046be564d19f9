"""Precisions on a CPU compared with transformers and llama.cpp."""

from __future__ import annotations

from result_tables.results import (
    MISSING,
    Column,
    Result,
    link,
    software,
    spread,
    table,
    times,
)

PRECISIONS = (
    "Ratios within one interleaved run, as medians with their range over rounds; realised is the plan's wall-clock "
    "speed-up over that in bytes. [On a CPU](CPU.md) explains what runs."
)


PRECISION_COLUMNS: tuple[Column, ...] = (
    ("method", lambda row: row["title"]),
    ("over `generate` in bfloat16", lambda row: "failed" if row["error"] else spread(row["times_generate"])),
    ("over llama.cpp", lambda row: spread(row["times_llama"])),
    (
        "share of read bandwidth",
        lambda row: f"{row['bandwidth_share']:.0%}" if row["bandwidth_share"] else "–",
    ),
    ("layer speed-up", lambda row: times(row["layer_speedup"])),
    ("cost speed-up (ideal)", lambda row: times(row["cost_speedup"])),
    ("wall-clock speed-up (measured)", lambda row: times(row["wall_clock_speedup"])),
    ("realised", lambda row: f"{row['realised']:.2f}" if row["realised"] else MISSING),
)


def precisions_section(results: list[Result]) -> list[str]:
    """A table for each model; times on a CPU are comparable only within a run."""
    lines = [PRECISIONS, ""] if results else ["None has been recorded yet. `depthdecay bench --device cpu` writes one."]
    for result in sorted(results, key=lambda r: (r["model"], r["file"])):
        settings, facts = result["settings"], result["machine"]
        words = [
            f"{settings['new_tokens']} new tokens",
            f"{settings['rounds']} rounds",
            f"{settings['threads']} threads of {facts['cpu']}, {facts['cores']} cores",
            *software(result),
        ]
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [*table(PRECISION_COLUMNS, result["rows"]), "", f"`{result['command']}`", ""]
    return lines
