"""Runs generated code in a process of its own, with little time, little memory, an empty folder and no network.

Enough against the slips of a language model. It is no prison: run hostile code in a virtual machine. What is not held:

- Files of this user can be read and written. A file may grow to 1 MiB; how many of them there are is not limited.
- A program that searches its own process for the pass code finds it.
- Where the system refuses namespaces, as many containers do, only Python's own sockets are closed, and a program can
  end its guard and other processes of this user.
- Root may start any number of processes. Outside Linux, one with a session of its own outlives the program.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from depthdecay.errors import DepthDecayError

TIMEOUT_SECONDS = 10.0
MEMORY_BYTES = 2**31
_GRACE_SECONDS = 10.0  # for the guard to start, and to end what the program started
_CHILD = Path(__file__).with_name("sandbox_child.py")


def require_sandbox() -> None:
    """Asked before anything is generated."""
    if sys.platform == "win32":
        raise DepthDecayError(
            "generated code is run on Linux and macOS only; give another task than humaneval and mbpp"
        )


def passes(program: str, timeout: float = TIMEOUT_SECONDS, memory: int = MEMORY_BYTES) -> bool:
    """Whether the program runs to its very end without an error; leaving early is no pass, whatever the exit status."""
    with tempfile.TemporaryDirectory(prefix="depthdecay-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "answer.py")
        file.write_text(program, encoding="utf-8", errors="replace")
        with subprocess.Popen(
            [sys.executable, "-I", str(_CHILD), str(file), str(memory), str(timeout)],
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as guard:
            try:
                return _ran_to_its_end(guard, timeout + _GRACE_SECONDS)
            finally:
                # The guard has ended all that descends from it. If the guard itself is late or was ended by the
                # program, this ends what stayed in its group, and a namespace of its own with it.
                with contextlib.suppress(OSError):
                    os.killpg(guard.pid, signal.SIGKILL)


def _ran_to_its_end(guard: subprocess.Popen[bytes], timeout: float) -> bool:
    """Hand a code over that is read behind the program's last line, and see whether it comes back."""
    assert guard.stdin is not None
    assert guard.stdout is not None
    code = secrets.token_bytes(16)
    try:
        os.write(guard.stdin.fileno(), code)
        guard.stdin.close()
        guard.wait(timeout)
        # A process that outlives the guard may hold the pipe open: take what is there, wait for nothing.
        os.set_blocking(guard.stdout.fileno(), False)
        return os.read(guard.stdout.fileno(), 64) == code
    except (OSError, subprocess.TimeoutExpired):
        return False
