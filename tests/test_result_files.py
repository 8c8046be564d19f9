"""Result files: where they may be written, and that they record the command that produced them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from depthdecay.errors import DepthDecayError
from depthdecay.files import make_folder
from depthdecay.result_files import provenance, require_writable, write_result


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["/opt/venv/bin/depthdecay", "bench", "-m", "/home/me/models/tiny"], "depthdecay bench -m tiny"),
        (["/src/depthdecay/__main__.py", "check", "--json"], "depthdecay check --json"),
        (["/home/me/experiments/study.py", "--seed", "3"], "python study.py --seed 3"),
        (
            ["study.py", "a=gsm8k:/home/me/test.jsonl,limit=3", "--to=/tmp/x"],
            "python study.py a=gsm8k:test.jsonl,limit=3 --to=x",
        ),
        ([""], "python"),  # interactive
    ],
)
def test_the_command_is_what_was_typed(typed: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", typed)
    assert provenance()["command"] == told


NO_FILES_HERE = Path("/proc/self")  # a folder in which not even root can create a file


@pytest.mark.skipif(not NO_FILES_HERE.is_dir(), reason="needs Linux's /proc")
def test_a_folder_that_takes_no_file_is_refused_at_once() -> None:
    with pytest.raises(DepthDecayError, match=r"^cannot write /proc/self/result.json: "):
        require_writable(NO_FILES_HERE / "result.json")
    with pytest.raises(DepthDecayError, match=r"^cannot write to the folder '/proc/self': "):
        make_folder(NO_FILES_HERE)


def test_asking_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("kept")
    assert require_writable(file) == file
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_protected_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    file.write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (file, os.W_OK))  # root may write anything
    with pytest.raises(DepthDecayError, match="write-protected"):
        require_writable(file)


def test_no_pipe_is_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DepthDecayError, match="is a device or a pipe"):
        require_writable(pipe)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "result.json"
    link.symlink_to(file)
    write_result(link, {"figure": 1})
    assert link.is_symlink()
    assert '"figure": 1' in file.read_text()
