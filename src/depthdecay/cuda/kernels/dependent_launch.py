"""Makes programmatic dependent launch (PDL) safe in inductor's kernels: each waits before it touches memory.

Starting a kernel while the preceding one still runs hides launch latency: a tenth of a step of a 1.5B model. inductor
generates such kernels, but waits only before reading what the scheduler's previous node wrote. That node may launch no
kernel at all (an in-place concatenation), and then the kernel races with an earlier one.

A kernel lets the next one start after its last load. One that loops over a row for its mean, and again to use it, would
do so at its end; so rows are held whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from depthdecay.library_internals import kernel_waits, whole_reductions
from depthdecay.patches import SharedPatch

LONGEST_ROW = 8192  # elements of a row that a generated kernel holds in registers


def _write(kernel: Any, buffer: Any) -> None:
    """Wait before a loop, not in every iteration. inductor drops all waits but the first."""
    looped = kernel.inside_reduction and kernel.range_trees[-1].is_loop
    (kernel.body if looped else buffer).writeline(kernel.GDC_WAIT)


@contextlib.contextmanager
def _changes() -> Iterator[None]:
    with kernel_waits(_write), whole_reductions(LONGEST_ROW):
        yield


_WAITING = SharedPatch(_changes)  # shared: both are correct for anyone's kernels


def waiting_first() -> contextlib.AbstractContextManager[None]:
    """While open, generated kernels wait for the preceding kernel before they touch memory, and hold rows whole."""
    return _WAITING.made()
