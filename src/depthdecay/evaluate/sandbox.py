"""Runs generated code in a process of its own, with little time, little memory, an empty folder and no network.

Enough against the slips of a language model. It is no prison: run hostile code in a virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_SECONDS = 10.0
MEMORY_BYTES = 2**31
# Not 0: a program that leaves by exit() before its tests has not passed them.
_PASSED = 42

# Runs in the child, so that nothing has to happen between fork and exec of a process with threads and a GPU.
_LAUNCHER = """
import os, sys
path, memory, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    import ctypes
    CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
    ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)  # a network of its own, with nothing in it
except Exception:
    pass
try:
    import resource
    for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 2**20),
                         (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
except (ImportError, ValueError, OSError):
    pass
import socket
def refuse(*_, **__):
    raise OSError("no network here")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = refuse
sys.argv = [path]
with open(path, encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
os._exit(PASSED)
""".replace("PASSED", str(_PASSED))


def passes(program: str, timeout: float = TIMEOUT_SECONDS, memory: int = MEMORY_BYTES) -> bool:
    """Whether the program runs to its end without an error."""
    with tempfile.TemporaryDirectory(prefix="depthdecay-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "answer.py")
        file.write_text(program, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-c", _LAUNCHER, str(file), str(memory), str(int(timeout) + 1)]
        child = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(timeout) == _PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            # The whole group: what the program started goes with it.
            with contextlib.suppress(OSError, AttributeError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
