"""Keep garbage collection away from what it would slow down or break: long-lived objects, and captures of graphs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import sys
from collections.abc import Iterator


def freeze_for_good() -> None:
    """Freeze the million long-lived objects that libraries create; otherwise every collection scans them in vain."""
    gc.freeze()
    _thaw_at_exit()


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """While open, nothing is collected unless someone asks for it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _thaw_at_exit() -> None:
    atexit.register(_thaw)


def _thaw() -> None:
    """Unfreeze where triton is loaded: its bindings (nanobind) print some thirty lines about objects left unfreed.

    Without triton, skip it: collecting everything that was frozen takes about a second.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
