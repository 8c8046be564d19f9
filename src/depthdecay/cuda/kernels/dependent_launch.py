"""inductor's kernels with programmatic dependent launch, made safe: each waits before it touches memory.

A kernel that may start while the one ahead of it still runs saves the latency of a launch: a tenth of a step of a 1.5B
model. inductor generates such kernels, but lets them wait only ahead of what the scheduler's previous node wrote. That
node may be one that launches nothing (a concatenation in place), and then they read what is still being written.
"""

from __future__ import annotations

import contextlib
from typing import Any

from depthdecay.library_internals import kernel_waits
from depthdecay.patches import SharedPatch


def _write(kernel: Any, buffer: Any) -> None:
    """Ahead of a loop, since inside it every turn would wait. inductor drops all waits but the first."""
    looped = kernel.inside_reduction and kernel.range_trees[-1].is_loop
    (kernel.body if looped else buffer).writeline(kernel.GDC_WAIT)


_WAITING = SharedPatch(lambda: kernel_waits(_write))  # a kernel of somebody else that waits first is as right as before


def waiting_first() -> contextlib.AbstractContextManager[None]:
    """While open, generated kernels wait for the one ahead of them before their first load or store."""
    return _WAITING.made()
