"""How many threads the compiled pass uses: the number that was set, else torch's, capped at the number of cores."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from depthdecay.argument_checks import whole_number

_TOPOLOGY = Path("/sys/devices/system/cpu")
_chosen: int | None = None


def set_threads(count: int | None) -> None:
    """Set the thread count of this process, torch included; None restores the default."""
    global _chosen
    if count is not None:
        whole_number("threads", count, 1, 1024)
        torch.set_num_threads(count)
    _chosen = count


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread for the small operations between compiled passes.

    Its other threads gain little there, and go on spinning on the cores that the next pass needs: sampled steps of a
    small model took three times as long as greedy ones.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    count = threads()  # of passes within, which follows torch's number
    global _chosen
    chosen, _chosen = _chosen, count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _chosen = chosen


def threads() -> int:
    return _chosen or min(torch.get_num_threads(), physical_cores())


@functools.cache
def physical_cores() -> int:
    """Physical cores this process may use. Hyperthreads share a core's memory ports, so using both gains nothing."""
    try:
        allowed = os.sched_getaffinity(0)
        siblings = {(_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in allowed}
        return max(len(siblings), 1)
    except (OSError, AttributeError):  # not Linux
        return os.cpu_count() or 1
