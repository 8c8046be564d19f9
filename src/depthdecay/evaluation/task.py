"""The task interface: examples, a prompt for each, and scoring. A new task is a file and a line here.

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

# By name, so that using one task imports no other.
TASKS: dict[str, str] = {
    "gsm8k": "depthdecay.evaluation.gsm8k:GSM8K",
    "bbh": "depthdecay.evaluation.bbh:BBH",
    "humaneval": "depthdecay.evaluation.code:HumanEval",
    "mbpp": "depthdecay.evaluation.code:MBPP",
    "squad": "depthdecay.evaluation.squad:SQuAD",
}


@dataclass(frozen=True)
class Example:
    """One question as in the task's file; `group` is the subtask, if there are any."""

    data: Mapping[str, Any]
    group: str = ""


@dataclass(frozen=True)
class Score:
    """Correct or not, and further named measures from 0 to 1."""

    correct: bool
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskOptions:
    """Where a task's data is and how much of it to use. A task refuses options that it does not support."""

    data: str | None = None
    limit: int | None = None  # per group
    shots: int | None = None
    subtasks: tuple[str, ...] | None = None
    prompts_dir: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            whole_number("limit", self.limit, 1)
        if self.shots is not None:
            whole_number("shots", self.shots, 0)


class Task:
    """One benchmark. Subclasses define the class variables, `load`, `prompt` and `score`."""

    name: ClassVar[str]
    max_new_tokens: ClassVar[int]
    stop: ClassVar[tuple[str, ...]] = ()  # stop strings for plain continuations; a chat turn ends by itself
    takes: ClassVar[tuple[str, ...]] = ()  # supported options among shots, subtasks, prompts_dir

    def __init__(self, options: TaskOptions) -> None:
        for option in ("shots", "subtasks", "prompts_dir"):
            if getattr(options, option) is not None and option not in self.takes:
                raise ArgumentError(f"the task {self.name} has no option {option}; leave it out", option)
        self.options = options
        self.examples = _limited(self.load(), options.limit)
        if not self.examples:
            raise DepthDecayError(f"the data of {self.name} has no questions; give a file with some")

    def load(self) -> list[Example]:
        """All questions, in file order."""
        raise NotImplementedError

    def prompt(self, example: Example, chat: bool) -> str:
        """The model's input: a user turn if `chat`, otherwise text to continue."""
        raise NotImplementedError

    def prompts_for(self, tokenizer: Any) -> list[str]:
        """All prompts for this tokenizer's model: as user turns if it has a chat template."""
        chat = bool(getattr(tokenizer, "chat_template", None))
        return [self.prompt(example, chat) for example in self.examples]

    def score(self, example: Example, text: str) -> Score:
        raise NotImplementedError

    def describe(self, chat: bool) -> str:
        """The prompt format, for the result file."""
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
