"""File writes are atomic, also with several writers."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from depthdecay.errors import DepthDecayError
from depthdecay.files import made_aside, read_bytes, write_whole


def test_several_writers_of_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    contents = [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda content: write_whole(file, content), contents)) == [file] * 8
    assert file.read_text() in contents
    assert list(tmp_path.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == _mode_of_a_plain_file(tmp_path)


def _mode_of_a_plain_file(folder: Path) -> int:
    plain = folder / "plain"
    plain.touch()
    return plain.stat().st_mode & 0o777


def test_what_fails_on_the_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = write_whole(tmp_path / "kept", b"before")

    def fail() -> None:
        with made_aside(file) as made:
            made.write_bytes(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_read_is_called_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match=r"^the prompts cannot be read: No such file or directory$"):
        read_bytes(tmp_path / "absent", "the prompts")


def test_the_engine_does_not_import_what_finds_and_converts_models() -> None:
    code = (
        "import sys, depthdecay.engine.engine; print(*(name for name in sys.modules if name.startswith('depthdecay.')))"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    elsewhere = {
        "model.load",
        "model.gguf_cache",
        "model.gguf_convert",
        "model.gguf_tokenizer",
        "plan.identity",
        "plan.fingerprint",
    }
    assert not {f"depthdecay.{name}" for name in elsewhere} & set(imported)
