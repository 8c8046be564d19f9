"""How many threads the compiled pass takes: what was asked for, else as torch, but no more than there are cores."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

from depthdecay.argument_checks import whole_number

_TOPOLOGY = Path("/sys/devices/system/cpu")
_chosen: int | None = None


def set_threads(count: int | None) -> None:
    """For this process, torch included; None goes back to the machine's own number."""
    global _chosen
    if count is not None:
        whole_number("threads", count, 1, 1024)
        torch.set_num_threads(count)
    _chosen = count


def threads() -> int:
    return _chosen or min(torch.get_num_threads(), physical_cores())


@functools.cache
def physical_cores() -> int:
    """Cores that this process may use. Two threads of one core share what reads the weights, so more gain nothing."""
    try:
        allowed = os.sched_getaffinity(0)
        siblings = {(_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in allowed}
        return max(len(siblings), 1)
    except (OSError, AttributeError):  # no Linux
        return os.cpu_count() or 1
