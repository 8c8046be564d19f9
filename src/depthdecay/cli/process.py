"""Process-wide settings of a long-running command, made before the library runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from depthdecay.garbage import freeze_for_good


def settle(threads: int | None = None) -> None:
    """Import the large libraries, set the number of threads, and silence transformers' advice to programmers."""
    with no_collection():
        from transformers.utils import logging

        from depthdecay.cpu.threads import set_threads

    if threads is not None:
        set_threads(threads)
    logging.set_verbosity_error()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection during imports. Imported objects are never freed, so freeze them: no later scan either."""
    gc.disable()
    try:
        yield
    finally:
        freeze_for_good()
        gc.enable()
