"""BIG-Bench Hard: its subtasks with the paper's chain-of-thought prompts (arXiv 2210.09261)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.evaluation.task import Example, Score, Task
from depthdecay.evaluation.task_files import read_json, read_text, require_fields, require_text
from depthdecay.files import expanded

_OPTION = re.compile(r"\(([A-Z])\)", re.IGNORECASE)
_BARE_OPTION = re.compile(r"([A-Z])(?=[).:,]|$)")
_ANNOUNCED = re.compile(r"answer(?:\s+is\b|\s*:)[ \t:]*", re.IGNORECASE)
_MARKUP = re.compile(r"[*`\"“”$]|\\boxed\{|\\text\{|\}")


def extract(text: str, target: str) -> str:
    """The answer in a text, in the target's form: an option's letter, or words.

    As in the paper's code: the text after the last "answer is", or else the whole text.
    """
    parts = _ANNOUNCED.split(_MARKUP.sub("", text))
    said = parts[-1].split("\n")[0].strip() if len(parts) > 1 else text.strip()
    if _OPTION.fullmatch(target):
        option = _OPTION.search(said) or _BARE_OPTION.match(said) if len(parts) > 1 else _OPTION.fullmatch(said)
        return f"({option[1].upper()})" if option else said
    return _plain(said)


def _plain(words: str) -> str:
    return " ".join(words.replace(",", " ").split()).rstrip(".").strip().casefold()


class BBH(Task):
    """Correct if the option or the words match the target."""

    name = "bbh"
    max_new_tokens = 512
    stop = ("\n\n", "\nQ:")
    takes = ("subtasks", "prompts_dir")

    def load(self) -> list[Example]:
        if self.options.data is None:
            raise ArgumentError("bbh needs data: the folder bbh of the repository suzgunmirac/BIG-Bench-Hard", "data")
        folder = expanded(self.options.data)
        files = {file.stem: file for file in sorted(folder.glob("*.json"))} if folder.is_dir() else {}
        if not files:
            raise DepthDecayError(f"'{self.options.data}' is not a folder with BBH's .json files, one per subtask")
        names = self.options.subtasks or tuple(files)
        unknown = [name for name in names if name not in files]
        if unknown:
            raise DepthDecayError(f"there is no subtask {unknown[0]!r} in '{folder}'; expected {', '.join(files)}")
        self.prompts = {name: self._shown(folder, name) for name in names}
        return [example for name in dict.fromkeys(names) for example in self._examples(files[name])]

    def _shown(self, folder: Path, name: str) -> str:
        """A subtask's worked examples, without the canary note about training data."""
        given = self.options.prompts_dir
        place = expanded(given) if given is not None else folder.resolve().with_name("bbh-cot-prompts")
        file = place / f"{name}.txt"
        if not file.is_file():
            shown = given if given is not None else f"{place.name} next to '{folder}'"
            raise ArgumentError(
                f"there is no {file.name} in {shown}; set prompts_dir to BBH's cot-prompts folder", "prompts_dir"
            )
        text = read_text(file)
        return text.split("-----\n", 1)[-1].strip()

    @staticmethod
    def _examples(file: Path) -> list[Example]:
        content: Any = read_json(file)
        require_fields(content, ("examples",), f"'{file}'")
        if not isinstance(content["examples"], list) or not content["examples"]:
            raise DepthDecayError(f"'{file}' has no examples; expected a list of objects with input and target")
        for number, row in enumerate(content["examples"], start=1):
            where = f"'{file}' example {number}"
            require_fields(row, ("input", "target"), where)
            for field in ("input", "target"):
                require_text(row[field], f"{where}: the {field}")
        return [Example(row, file.stem) for row in content["examples"]]

    def prompt(self, example: Example, chat: bool) -> str:
        return f"{self.prompts[example.group]}\n\nQ: {example.data['input']}\nA: Let's think step by step."

    def score(self, example: Example, text: str) -> Score:
        target = example.data["target"].strip()
        wanted = target.upper() if _OPTION.fullmatch(target) else _plain(target)
        return Score(extract(text, target) == wanted)

    def describe(self, chat: bool) -> str:
        return f"3-shot chain of thought, {'chat' if chat else 'text'}"
