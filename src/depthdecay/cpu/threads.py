"""How many threads the compiled pass uses: the number that was set, else torch's, capped at the number of cores."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from depthdecay.argument_checks import whole_number
from depthdecay.library_internals import openmp_threads

_TOPOLOGY = Path("/sys/devices/system/cpu")
_chosen: int | None = None
_here = threading.local()


def set_threads(count: int | None) -> None:
    """Set the thread count of this process, torch included; None restores the default."""
    global _chosen
    if count is not None:
        whole_number("threads", count, 1, 1024)
        torch.set_num_threads(count)
    _chosen = count


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread for the small operations of this thread between compiled passes.

    More gain little there, and go on spinning on the cores that the next pass needs: sampled steps of a small model
    took three times as long as greedy ones.
    """
    openmp = openmp_threads()
    before = 1 if openmp is None else openmp[0]()
    if openmp is None or before == 1:
        yield
        return
    _here.threads = threads()  # of the passes within, which would follow torch's number
    openmp[1](1)
    try:
        yield
    finally:
        openmp[1](before)
        _here.threads = None


def threads() -> int:
    return getattr(_here, "threads", None) or _chosen or min(torch.get_num_threads(), physical_cores())


@functools.cache
def physical_cores() -> int:
    """Physical cores this process may use. Hyperthreads share a core's memory ports, so using both gains nothing."""
    try:
        allowed = os.sched_getaffinity(0)
        siblings = {(_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in allowed}
        return max(len(siblings), 1)
    except (OSError, AttributeError):  # not Linux
        return os.cpu_count() or 1
