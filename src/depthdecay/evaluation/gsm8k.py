"""GSM8K: grade-school maths, zero-shot in a chat turn or with the usual eight worked examples."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.evaluation.task import Example, Score, Task
from depthdecay.evaluation.task_files import from_hub, read_jsonl, require_text

# The chain-of-thought prompt of Wei et al. 2022 (arXiv 2201.11903, table 20), which published 8-shot figures use.
EXEMPLARS: tuple[tuple[str, str], ...] = (
    (
        "There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they are done, "
        "there will be 21 trees. How many trees did the grove workers plant today?",
        "There are 15 trees originally. Then there were 21 trees after some more were planted. So there must have "
        "been 21 - 15 = 6. The answer is 6.",
    ),
    (
        "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?",
        "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The answer is 5.",
    ),
    (
        "Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they have left in total?",
        "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 + 42 = 74. After eating "
        "35, they had 74 - 35 = 39. The answer is 39.",
    ),
    (
        "Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How many lollipops did "
        "Jason give to Denny?",
        "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So he gave Denny 20 - 12 = "
        "8. The answer is 8.",
    ),
    (
        "Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he "
        "have now?",
        "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 more toys. 5 + 4 = "
        "9. The answer is 9.",
    ),
    (
        "There were nine computers in the server room. Five more computers were installed each day, from monday "
        "to thursday. How many computers are now in the server room?",
        "There were originally 9 computers. For each of 4 days, 5 more computers were added. So 5 * 4 = 20 "
        "computers were added. 9 + 20 is 29. The answer is 29.",
    ),
    (
        "Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 more. How many "
        "golf balls did he have at the end of wednesday?",
        "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 = 35. After losing 2 "
        "more, he had 35 - 2 = 33 golf balls. The answer is 33.",
    ),
    (
        "Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
        "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. So she has 23 - 15 "
        "dollars left. 23 - 15 is 8. The answer is 8.",
    ),
)
INSTRUCTION = r"Reason step by step, and end with the final answer as one number in the form \boxed{number}."

_NUMBER = re.compile(r"(?<![\d)])(-?)\$?\s?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_ANNOUNCED = re.compile(r"####|\\boxed\s*\{|answer\s+is\b|answer\s*:", re.IGNORECASE)
# A sentence ends at a full stop that is not part of a number, a box at its brace.
_END = re.compile(r"[}\n]|\.(?!\d)")


def number_in(text: str) -> Decimal | None:
    """The answer in a text: the last announced one, or else the last number."""
    text = text.replace("−", "-").replace("{,}", ",").replace(r"\$", "$").replace(r"\!", "")
    for announced in reversed(list(_ANNOUNCED.finditer(text))):
        # In "The answer is 5 + 6 = 11", the answer is the result.
        sentence = _END.split(text[announced.end() :], maxsplit=1)[0]
        numbers = _NUMBER.findall(sentence.split("=")[-1])
        if numbers:
            return _value(numbers[0])
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(found: tuple[str, str]) -> Decimal:
    sign, digits = found
    return Decimal(sign + digits.replace(",", ""))


class GSM8K(Task):
    """Correct if the number equals the reference's."""

    name = "gsm8k"
    max_new_tokens = 512
    stop = ("\n\n", "Q:")
    takes = ("shots",)

    def load(self) -> list[Example]:
        path = self.options.data
        if self.options.shots is not None and self.options.shots > len(EXEMPLARS):
            raise ArgumentError(f"shots is {self.options.shots}; gsm8k has {len(EXEMPLARS)} worked examples", "shots")
        if path is not None:
            rows = read_jsonl(path, ("question", "answer"))
        else:
            rows = from_hub("openai/gsm8k", "main", "test", "GSM8K's test.jsonl")
        return [self._example(row, number) for number, row in enumerate(rows, start=1)]

    @staticmethod
    def _example(row: dict[str, Any], number: int) -> Example:
        require_text(row["question"], f"the question of row {number}")
        if number_in(require_text(row["answer"], f"the answer of row {number}")) is None:
            raise DepthDecayError(f"the answer of row {number} contains no number; expected one after ####")
        return Example(row)

    def shots(self, chat: bool) -> int:
        """Zero for chat models, which are asked as users would; eight for others, which need examples."""
        if self.options.shots is not None:
            return self.options.shots
        return 0 if chat else len(EXEMPLARS)

    def prompt(self, example: Example, chat: bool) -> str:
        question = example.data["question"].strip()
        shots = self.shots(chat)
        if shots == 0:
            return f"{question}\n\n{INSTRUCTION}" if chat else f"Q: {question} {INSTRUCTION}\nA:"
        shown = "".join(f"Q: {asked}\nA: {answered}\n\n" for asked, answered in EXEMPLARS[:shots])
        return f"{shown}Q: {question}\nA:"

    def score(self, example: Example, text: str) -> Score:
        return Score(number_in(text) == number_in(example.data["answer"]))

    def describe(self, chat: bool) -> str:
        return f"{self.shots(chat)}-shot {'chat' if chat else 'text'}"
