"""The work file next to a result: every finished batch, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    """A short hash of everything that affects an answer."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class WorkFile:
    """One line per batch, each with the key of its run, so that different settings, plans or data never mix.

    Without a path nothing is saved.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._kept: dict[tuple[str, int], dict[str, Any]] = {}
        if path is not None and path.is_file():
            lines = path.read_bytes().split(b"\n")
            self._kept = {(line["key"], line["number"]): line["batch"] for line in map(_read, lines) if line}

    @classmethod
    def beside(cls, result: Path) -> WorkFile:
        return cls(result.with_name(f"{result.name}.partial.jsonl"))

    def get(self, key: str, number: int) -> dict[str, Any] | None:
        return self._kept.get((key, number))

    def add(self, key: str, number: int, batch: dict[str, Any]) -> None:
        """Save a batch to disk before the next one starts."""
        if self.path is None:
            return
        line = json.dumps({"key": key, "number": number, "batch": batch}) + "\n"
        with self.path.open("ab") as file:
            # If a kill left an incomplete line, start a new one.
            torn = file.tell() > 0 and not _ends_a_line(self.path)
            file.write((b"\n" if torn else b"") + line.encode())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
        whole = isinstance(values["key"], str) and isinstance(values["number"], int)
        return values if whole and isinstance(values["batch"], dict) else None
    except (ValueError, KeyError, TypeError):
        return None
