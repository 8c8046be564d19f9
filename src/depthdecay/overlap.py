"""inductor's kernels with programmatic dependent launch, made safe: each waits before it touches memory.

A kernel that may start while the one ahead of it still runs saves the latency of a launch: a tenth of a step of a 1.5B
model. inductor generates such kernels, but lets them wait only ahead of what the scheduler's previous node wrote. That
node may be one that launches nothing (a concatenation in place), and then they read what is still being written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .patches import SharedPatch

_HOOK = "_handle_pdl_before_access"


def _generated_kernel() -> Any:
    """inductor's class of generated kernels, if it has the place where one decides to wait; else None."""
    from torch._inductor.codegen.triton import TritonKernel  # takes long to import, and is needed only here

    return TritonKernel if hasattr(TritonKernel, _HOOK) and hasattr(TritonKernel, "GDC_WAIT") else None


def can_wait_first() -> bool:
    return _generated_kernel() is not None


def _wait_first() -> Callable[[], None]:
    kernel = _generated_kernel()
    original = getattr(kernel, _HOOK)

    def wait(self: Any, wait_buffer: Any, *dependencies: Any, **kwargs: Any) -> None:
        if self._enable_pdl_codegen():
            # Ahead of a loop, since inside it every turn would wait. inductor drops all waits but the first.
            looped = self.inside_reduction and self.range_trees[-1].is_loop
            (self.body if looped else wait_buffer).writeline(self.GDC_WAIT)

    setattr(kernel, _HOOK, wait)
    return lambda: setattr(kernel, _HOOK, original)


_WAITING = SharedPatch(_wait_first)  # a kernel of somebody else that waits first too is as right as before


def waiting_first() -> contextlib.AbstractContextManager[None]:
    """While open, generated kernels wait for the one ahead of them before their first load or store."""
    return _WAITING.made() if can_wait_first() else contextlib.nullcontext()
