"""What a task is: examples, a prompt for each, and when an answer to it is right. A new one is a file and a line here.

class Capitals(Task):
    name, max_new_tokens, stop = "capitals", 16, ("\\n",)

    def load(self) -> list[Example]:
        return [Example(row) for row in read_jsonl(self.options.data, ("country", "capital"))]

    def prompt(self, example: Example, chat: bool) -> str:
        return f"What is the capital of {example.data['country']}?"

    def score(self, example: Example, text: str) -> Score:
        return Score(example.data["capital"] in text)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from depthdecay.argument_checks import whole_number
from depthdecay.errors import ArgumentError, DepthDecayError

# By name, so that asking for one task imports no other.
TASKS: dict[str, str] = {
    "gsm8k": "depthdecay.evaluation.gsm8k:GSM8K",
    "bbh": "depthdecay.evaluation.bbh:BBH",
    "humaneval": "depthdecay.evaluation.code:HumanEval",
    "mbpp": "depthdecay.evaluation.code:MBPP",
    "squad": "depthdecay.evaluation.squad:SQuAD",
}


@dataclass(frozen=True)
class Example:
    """One question as the task's file has it; the group is a subtask, where a task has those."""

    data: Mapping[str, Any]
    group: str = ""


@dataclass(frozen=True)
class Score:
    """Right or wrong, and further measures from 0 to 1 by name."""

    correct: bool
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskOptions:
    """Where a task's data is and how much of it is asked; what a task has no use for, it refuses."""

    data: str | None = None
    limit: int | None = None  # of each group
    shots: int | None = None
    subtasks: tuple[str, ...] | None = None
    prompts_dir: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            whole_number("limit", self.limit, 1)
        if self.shots is not None:
            whole_number("shots", self.shots, 0)


class Task:
    """One benchmark. Subclasses fill in the names, `load`, `prompt` and `score`."""

    name: ClassVar[str]
    max_new_tokens: ClassVar[int]
    stop: ClassVar[tuple[str, ...]] = ()  # where text that a model merely continues ends; a chat turn ends by itself
    takes: ClassVar[tuple[str, ...]] = ()  # which of shots, subtasks, prompts_dir mean something here

    def __init__(self, options: TaskOptions) -> None:
        for option in ("shots", "subtasks", "prompts_dir"):
            if getattr(options, option) is not None and option not in self.takes:
                raise ArgumentError(f"{option} means nothing to the task {self.name}", option)
        self.options = options
        self.examples = _limited(self.load(), options.limit)
        if not self.examples:
            raise DepthDecayError(f"the data of {self.name} holds no question; give a file with some")

    def load(self) -> list[Example]:
        """All questions, in the order of the file."""
        raise NotImplementedError

    def prompt(self, example: Example, chat: bool) -> str:
        """What the model reads: as a user's turn where `chat`, else as text that it continues."""
        raise NotImplementedError

    def prompts_for(self, tokenizer: Any) -> list[str]:
        """All questions as this tokenizer's model reads them: as a user's turns where it knows a chat."""
        chat = bool(getattr(tokenizer, "chat_template", None))
        return [self.prompt(example, chat) for example in self.examples]

    def score(self, example: Example, text: str) -> Score:
        raise NotImplementedError

    def describe(self, chat: bool) -> str:
        """How it is asked, for the result file."""
        return "chat" if chat else "text"


def open_task(name: str, options: TaskOptions) -> Task:
    """The named task with its data read."""
    if name not in TASKS:
        raise DepthDecayError(f"there is no task {name!r}; expected one of {', '.join(TASKS)}")
    module, made = TASKS[name].split(":")
    task: Task = getattr(importlib.import_module(module), made)(options)
    return task


def _limited(examples: list[Example], limit: int | None) -> list[Example]:
    """The first `limit` of each group."""
    if limit is None:
        return examples
    taken: dict[str, int] = {}
    chosen = []
    for example in examples:
        taken[example.group] = taken.get(example.group, 0) + 1
        if taken[example.group] <= limit:
            chosen.append(example)
    return chosen
