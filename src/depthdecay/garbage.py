"""Keep long-lived objects out of garbage collection until the process exits."""

from __future__ import annotations

import atexit
import functools
import gc
import sys


def freeze_for_good() -> None:
    """Freeze the million long-lived objects that libraries create; otherwise every collection scans them in vain."""
    gc.freeze()
    _thaw_at_exit()


@functools.cache
def _thaw_at_exit() -> None:
    atexit.register(_thaw)


def _thaw() -> None:
    """Unfreeze where triton is loaded: its bindings (nanobind) print some thirty lines about objects left unfreed.

    Without triton, skip it: collecting everything that was frozen takes about a second.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
