"""What a process keeps to its end, left out of garbage collection until then."""

from __future__ import annotations

import atexit
import functools
import gc
import sys


def freeze_for_good() -> None:
    """Libraries make a million objects that stay; every collection would look at all of them and find none."""
    gc.freeze()
    _thaw_at_exit()


@functools.cache
def _thaw_at_exit() -> None:
    atexit.register(_thaw)


def _thaw() -> None:
    """triton's bindings (nanobind) report, in some thirty lines, what the last collection did not free.

    Without triton nobody does, and the last collection stays short: it takes about a second for all that was frozen.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
