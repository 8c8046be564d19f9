"""A command in its own process: what is on stderr when it exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from saved_model import save_tiny_chat_model


def test_a_command_ends_without_a_word_of_the_libraries(tmp_path: Path) -> None:
    """Some libraries report supposed leaks at exit, as triton 3.9 did for frozen objects."""
    command = [sys.executable, "-m", "depthdecay", "generate", "-q"]
    words = ["-m", save_tiny_chat_model(tmp_path), "-n", "4", "hello"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
