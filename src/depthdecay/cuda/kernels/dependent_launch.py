"""Makes programmatic dependent launch (PDL) safe in inductor's kernels: each waits before it touches memory.

Starting a kernel while the preceding one still runs hides launch latency: a tenth of a step of a 1.5B model. inductor
generates such kernels, but waits only before reading what the scheduler's previous node wrote. That node may launch no
kernel at all (an in-place concatenation), and then the kernel races with an earlier one.
"""

from __future__ import annotations

import contextlib
from typing import Any

from depthdecay.library_internals import kernel_waits
from depthdecay.patches import SharedPatch


def _write(kernel: Any, buffer: Any) -> None:
    """Wait before a loop, not in every iteration. inductor drops all waits but the first."""
    looped = kernel.inside_reduction and kernel.range_trees[-1].is_loop
    (kernel.body if looped else buffer).writeline(kernel.GDC_WAIT)


_WAITING = SharedPatch(lambda: kernel_waits(_write))  # shared: waiting earlier is correct for anyone's kernels


def waiting_first() -> contextlib.AbstractContextManager[None]:
    """While open, generated kernels wait for the preceding kernel before their first load or store."""
    return _WAITING.made()
