"""Sets of prompts by a line, and a run that goes on where it was cut off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, script

from depthdecay.prompt_files import read_prompts

lossless_texts = script("lossless_texts")

DEFAULTS = {"limit": 3, "skip": 0, "tokens": 8, "temperature": 0.0}
CHAT = BENCHMARKS / "prompts_german_chinese.jsonl"


def test_a_line_says_what_is_asked_and_how() -> None:
    texts = lossless_texts.TextSet.of("sums=gsm8k:some/test.jsonl,limit=200,temperature=0.7,top_p=0.9", DEFAULTS)
    assert (texts.name, texts.task, texts.file, texts.limit) == ("sums", "gsm8k", "some/test.jsonl", 200)
    assert (texts.tokens, texts.temperature, texts.sampling) == (8, 0.7, {"top_p": 0.9})
    plain = lossless_texts.TextSet.of("chat=questions.jsonl", DEFAULTS)
    assert (plain.task, plain.file, plain.limit, plain.sampling) == (None, "questions.jsonl", 3, {})


def test_questions_of_a_task_come_from_its_subtasks_in_turn(tmp_path: Path) -> None:
    (tmp_path / "bbh").mkdir()
    (tmp_path / "bbh-cot-prompts").mkdir()
    for name in ("first", "second"):
        examples = [{"input": f"{name} {number}", "target": "yes"} for number in range(3)]
        (tmp_path / "bbh" / f"{name}.json").write_text(json.dumps({"examples": examples}))
        (tmp_path / "bbh-cot-prompts" / f"{name}.txt").write_text("Shown.")
    prompts = lossless_texts.TextSet.of(f"bbh=bbh:{tmp_path / 'bbh'}", DEFAULTS).prompts(None)
    assert [prompt.splitlines()[2] for prompt in prompts] == ["Q: first 0", "Q: second 0", "Q: first 1"]


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = BENCHMARKS.parent / "src" / "depthdecay" / "data" / "smollm2-135m"
    out = tmp_path / "texts.json"
    words = ["--model", "smollm2-135m", "--device", "cpu", "--plan", str(plan), "--limit", "1", "-n", "3"]

    def run(*sets: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["lossless_texts.py", *words, "--json", str(out), *sets])
        lossless_texts.main()
        found: dict[str, Any] = json.loads(out.read_text())["lossless_texts"]
        return found

    first = run(f"chat={CHAT}")
    assert [row["answers_that_differ"] for row in first["chat"]["lossless_rows"]] == [0, 0, 0]
    capsys.readouterr()
    both = run(f"chat={CHAT}", f"more={CHAT},tokens=4")
    assert both["chat"] == first["chat"]
    assert "chat: measured before" in capsys.readouterr().out
    assert run(f"chat={CHAT},tokens=2")["chat"] != first["chat"]


def test_questions_of_tasks_make_one_file_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = tmp_path / "train.jsonl", tmp_path / "mixed.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "2 + 2?", "answer": "#### 4"}\n')
    monkeypatch.setattr(sys, "argv", ["task_prompts.py", str(out), f"gsm8k:{data},skip=1", f"{CHAT},limit=2"])
    script("task_prompts").main()
    prompts = read_prompts(out)
    assert "2 + 2?" in prompts[0]
    assert prompts[1:] == read_prompts(CHAT)[:2]
