"""The sandbox's process: a script that `sandbox` starts, so that a process with threads and a GPU runs no code between
fork and exec. It stays as a guard, and forks a process that runs the program.

Usage: sandbox_child.py PROGRAM MEMORY_BYTES SECONDS, with the pass code on stdin; it is returned on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

FILE_BYTES = 2**20
NEW_TASKS = 256  # processes and threads that a program may start
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    path, memory, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    pass_code, report = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    tasks = count_tasks()
    has_own_pids = isolate()
    limit_tasks(tasks + NEW_TASKS)
    guard(seconds)
    if has_own_pids:
        # PID 1 of a namespace ignores most signals, which a program would not expect; so PID 1 only waits.
        first_child = os.fork()
        if first_child:
            os.waitpid(first_child, 0)
            os._exit(0)  # the kernel then kills all others in the namespace
    limit_program(memory, int(seconds) + 1)
    # Kept here, since the program may replace them.
    read, write, leave, process_id = os.read, os.write, os._exit, os.getpid
    own_id = process_id()
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
    # The code is read only here, so no exit status and no output of the program can fake it.
    if process_id() == own_id:  # not a process that the program forked
        write(report, read(pass_code, 64))
    leave(0)


def isolate() -> bool:
    """Enter new network and PID namespaces where the system allows it; returns whether the PID namespace is new."""
    with contextlib.suppress(OSError, AttributeError):
        system = ctypes.CDLL(None)
        system.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become the guard's children, whatever their session
        if system.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID) == 0:
            return True
        system.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    return False


def guard(seconds: float) -> None:
    """Returns in a new process only. The old one waits for it, kills everything it started, and exits."""
    try:
        child = os.fork()
    except BlockingIOError:  # tasks not visible from here count too, so no limit can be set
        _, highest = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (highest, highest))
        child = os.fork()
    if child == 0:
        return
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.005)
    end_children()
    os._exit(0)


def end_children() -> None:
    """Generation by generation: the children of a killed process become children of this one."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(0.001)


def count_tasks() -> int:
    """The user's current tasks, which count towards the same limit as those that the program starts."""
    return sum(_tasks_of(pid) for pid in _processes())


def limit_tasks(most: int) -> None:
    """Has no effect for root."""
    with contextlib.suppress(OSError, ValueError):
        _, highest = resource.getrlimit(resource.RLIMIT_NPROC)
        if highest == resource.RLIM_INFINITY or most < highest:
            resource.setrlimit(resource.RLIMIT_NPROC, (most, highest))


def limit_program(memory: int, cpu_seconds: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (value, value))
    for name in ("connect", "connect_ex"):
        setattr(socket.socket, name, _refuse)
    socket.create_connection = _refuse


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError("the sandbox has no network")


def _processes() -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):  # not on Linux
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def _tasks_of(pid: int) -> int:
    """The number of threads of a process of this user; 0 for other users' and for one that has just ended."""
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{pid}").st_uid == os.getuid():
            return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def _children() -> list[int]:
    return [pid for pid in _processes() if _parent_of(pid) == os.getpid()]


def _parent_of(pid: int) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return None


if __name__ == "__main__":
    main()
