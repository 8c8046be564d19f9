"""Prompts are read from every supported file format, and errors name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from depthdecay.errors import DepthDecayError
from depthdecay.prompt_files import prompts_for, read_prompts


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"question": "a"}\n{"answer": 2}\n', "line 2 has none of the fields"),
        ('{"question": "a"}\nnonsense\n', "line 2 is not JSON"),
        ("[1, 2]\n", "line 1 is list"),
        ('{"prompt": 5}\n', "line 1: prompt must be a non-empty string"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: messages must be a list"),
        ("\n\n", "contains no prompts"),
    ],
)
def test_prompts_in_a_wrong_format_are_named_by_line(content: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(DepthDecayError, match=complaint):
        read_prompts(file)


def test_lines_end_at_newlines_only_and_deep_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\n{"prompt": "c\u0085d"}\r\n', encoding="utf-8")
    assert read_prompts(file) == ["a\u2028b", "c\u0085d"]
    file.write_text("[" * 100_000)
    with pytest.raises(DepthDecayError, match="line 1"):
        read_prompts(file)
    with pytest.raises(DepthDecayError, match="~nobody"):
        read_prompts("~nobody-of-that-name/prompts.jsonl")


def test_prompts_are_a_file_a_list_or_a_tasks_questions(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    assert prompts_for(file)(None) == prompts_for(str(file))(None) == ["one", "two"]
    assert prompts_for(["one", [5, 6]])(None) == ["one", [5, 6]]
    questions = tmp_path / "test.jsonl"
    questions.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    (asked,) = prompts_for(questions, "gsm8k")(None)
    assert asked.endswith("Q: 1 + 1?\nA:")
    with pytest.raises(DepthDecayError, match="prompts is a list"):
        prompts_for(["one"], "gsm8k")
    with pytest.raises(DepthDecayError, match="no prompt was given"):
        prompts_for([])


def test_of_several_turns_the_first_is_asked(tmp_path: Path) -> None:
    """The format of MT-bench's questions."""
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 81, "turns": ["Write a poem.", "Now in French."]}\n', encoding="utf-8")
    assert read_prompts(file) == ["Write a poem."]
    file.write_text('{"turns": [5]}\n', encoding="utf-8")
    with pytest.raises(DepthDecayError, match="turns must be a non-empty string"):
        read_prompts(file)
