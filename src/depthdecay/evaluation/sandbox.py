"""Runs generated code in a separate process, with limited time and memory, an empty folder and no network.

This protects against a language model's accidents, not against attacks: run hostile code in a virtual machine. Limits:

- The user's files can be read and written. A file may grow to 1 MiB; the number of files is not limited.
- A program that searches its own process for the pass code finds it.
- Where the system refuses namespaces, as in many containers, only Python's sockets are blocked, and a program can kill
  its guard and other processes of the user.
- Root may start any number of processes. Outside Linux, a process with its own session outlives the program.
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
_GRACE_SECONDS = 10.0  # for the guard to start, and to kill the program's processes
_CHILD = Path(__file__).with_name("sandbox_child.py")


def require_sandbox() -> None:
    """Called before anything is generated."""
    if sys.platform == "win32":
        raise DepthDecayError(
            "humaneval and mbpp run generated code, which works on Linux and macOS only; choose another task"
        )


def passes(program: str, timeout: float = TIMEOUT_SECONDS, memory: int = MEMORY_BYTES) -> bool:
    """Whether the program runs to its end without an error. Exiting early fails, whatever the exit status."""
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
                # The guard has killed all its descendants. If the guard itself hangs or was killed by the program,
                # this kills the rest of its process group, and with it its namespace.
                with contextlib.suppress(OSError):
                    os.killpg(guard.pid, signal.SIGKILL)


def _ran_to_its_end(guard: subprocess.Popen[bytes], timeout: float) -> bool:
    """Pass in a code that is read only after the program's last line, and check that it comes back."""
    assert guard.stdin is not None
    assert guard.stdout is not None
    code = secrets.token_bytes(16)
    try:
        os.write(guard.stdin.fileno(), code)
        guard.stdin.close()
        guard.wait(timeout)
        # A process that outlives the guard may hold the pipe open, so do not wait for more.
        os.set_blocking(guard.stdout.fileno(), False)
        return os.read(guard.stdout.fileno(), 64) == code
    except (OSError, subprocess.TimeoutExpired):
        return False
