"""Read prompts from files: one per line, as text or JSON, or the questions of a task's file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.evaluation.task import TaskOptions, open_task
from depthdecay.files import read_bytes
from depthdecay.model.prompts import as_batch

Prompts = str | os.PathLike[str] | Sequence[Any]  # a file, or the prompts themselves
_FIELDS = ("messages", "prompt", "question", "text", "instruction", "turns")


def prompts_for(prompts: Prompts, task: str | None = None) -> Callable[[Any], list[Any]]:
    """The prompts, or a task's questions from its file: read now, formatted later for a given tokenizer."""
    if not isinstance(prompts, (str, os.PathLike)):
        if task is not None:
            raise ArgumentError(f"prompts is a list; task {task} expects the file with its questions", "prompts")
        texts = as_batch(prompts)
    elif task is not None:
        return open_task(task, TaskOptions(data=os.fspath(prompts))).prompts_for
    else:
        texts = read_prompts(prompts)
    return lambda tokenizer: texts


def read_prompts(path: str | os.PathLike[str]) -> list[Any]:
    """Texts or conversations from a .jsonl file (one object per line) or a .txt file (one prompt per line)."""
    try:
        lines = read_bytes(path, f"the prompts '{path}'").decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DepthDecayError(f"the prompts '{path}' are not UTF-8 text (byte {error.start})") from None
    is_text = Path(path).suffix == ".txt"
    prompts = [
        line.strip() if is_text else _prompt_of(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise DepthDecayError(f"the file '{path}' contains no prompts")
    return prompts


def _prompt_of(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DepthDecayError(f"{where} is not JSON ({error}); expected one object per line") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise DepthDecayError(f"{where} is {type(value).__name__}; expected an object with one of {', '.join(_FIELDS)}")
    name = next((name for name in _FIELDS if value.get(name)), None)
    if name is None:
        raise DepthDecayError(f"{where} has none of the fields {', '.join(_FIELDS)}")
    prompt = value[name]
    if name == "messages":
        good = isinstance(prompt, list) and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in prompt
        )
        if not good:
            raise DepthDecayError(f"{where}: messages must be a list of objects with role and content")
        return prompt
    if name == "turns" and isinstance(prompt, list):  # MT-bench: the user's first turn
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt.strip():
        raise DepthDecayError(f"{where}: {name} must be a non-empty string")
    return prompt
