"""Result files by the command that wrote them, and the helpers that all tables share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MISSING = "–"
# The keys of each command's result files; the first match wins.
KINDS: dict[str, set[str]] = {
    "calibrate": {"model", "command", "machine", "promise", "repaired", "plain", "choices"},
    "eval": {"model", "command", "machine", "task", "settings", "rows", "comparisons"},
    "precisions": {"model", "command", "machine", "settings", "rows", "read_gb_per_second"},
    "bench": {"model", "command", "machine", "settings", "rows"},
    "lossless": {"model", "command", "machine", "settings", "lossless_rows"},
    "texts": {"model", "command", "machine", "lossless_texts"},
    "steps": {"command", "machine", "step_costs"},
    "vllm": {"model", "command", "machine", "settings", "vllm_rows"},
    "vllm ways": {"model", "command", "machine", "settings", "vllm_ways"},
}

_RESULT = {"command", "machine", "versions"}  # keys of every result file
Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]


class TablesError(Exception):
    """One sentence that says what is wrong with a file."""


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
            # Scripts and other commands write results too, which documents quote directly.
            if not keys >= _RESULT:
                print(f"{file.name} is not a depthdecay result file and is ignored", file=sys.stderr)
            continue
        found[kind].append({**result, "file": file.name})
    return found


def machine(result: Result) -> str:
    """What the run was on. A CPU run is named by its CPU even if the machine has a GPU."""
    facts, device = result["machine"], result["settings"]["device"]
    if device == "cuda":
        return str(facts.get("gpu", "CUDA GPU"))
    kind = "" if device == "cpu" else f" ({device})"
    return f"{facts['cpu']}, {facts['cores']} cores{kind}"


def by_machine(results: list[Result]) -> list[tuple[str, list[Result]]]:
    """In order of each machine's first result."""
    return [(place, [r for r in results if machine(r) == place]) for place in dict.fromkeys(map(machine, results))]


def table(columns: tuple[Column, ...], results: list[Result]) -> list[str]:
    lines = ["| " + " | ".join(heading for heading, _ in columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return lines + ["| " + " | ".join(show(result) for _, show in columns) + " |" for result in results]


def software(result: Result) -> list[str]:
    versions = result.get("versions", {})
    words = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return words + ([f"commit {result['commit']}"] if result.get("commit") else [])


def failure(name: str, row: Result) -> str:
    return f"{name} failed: {' '.join(row['error'].split())[:200]}"


def link(result: Result, words: str | None = None) -> str:
    return f"[{words or result['file']}](../benchmarks/results/{result['file']})"


def times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}x"


def spread(values: list[float] | None) -> str:
    if not values:
        return MISSING
    median, least, most = values
    return f"{median:.2f}x ({least:.2f}–{most:.2f})"
