"""Result files say by which command they can be made again, and nothing about the machine's folders."""

from __future__ import annotations

import sys

import pytest

from depthdecay.result_files import provenance


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["/opt/venv/bin/depthdecay", "bench", "-m", "/home/me/models/tiny"], "depthdecay bench -m tiny"),
        (["/src/depthdecay/__main__.py", "check", "--json"], "depthdecay check --json"),
        (["/home/me/experiments/study.py", "--seed", "3"], "python study.py --seed 3"),
        ([""], "python"),  # typed line by line
    ],
)
def test_the_command_is_what_was_typed(typed: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", typed)
    assert provenance()["command"] == told
