"""GSM8K from OpenAI's JSON-lines files, for the tasks in this folder: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.files import expanded


def load_splits(data: str | None = None, **_: Any) -> dict[str, Any]:
    """Called by lm-eval to load the data set, with the task's metadata as arguments."""
    import datasets

    test, train = find_files(data)
    files = {"test": test} | ({"train": train} if train else {})
    return {split: datasets.Dataset.from_list(read_problems(file)) for split, file in files.items()}


def find_files(data: str | None) -> tuple[Path, Path | None]:
    """The test questions, and train.jsonl with the worked examples if it is in the same folder."""
    if data is None:
        raise DepthDecayError("the local GSM8K tasks need their questions; add --data with test.jsonl or its folder")
    path = expanded(data)
    test = path / "test.jsonl" if path.is_dir() else path
    if not test.is_file():
        raise DepthDecayError(f"there is no file '{test}'; --data takes GSM8K's test.jsonl or its folder")
    train = test.with_name("train.jsonl")
    return test, train if train.is_file() else None


def read_problems(file: Path) -> list[dict[str, str]]:
    problems = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DepthDecayError(f"'{file}' cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
            question, answer = problem["question"], problem["answer"]
        except (ValueError, TypeError, KeyError):
            question = answer = None
        if not isinstance(question, str) or not isinstance(answer, str):
            raise DepthDecayError(f"line {number} of '{file}' is not a JSON object with a question and an answer")
        problems.append({"question": question, "answer": answer})
    if not problems:
        raise DepthDecayError(f"'{file}' contains no questions")
    return problems
