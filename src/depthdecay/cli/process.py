"""What a command that takes long sets for its whole process, before the library runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from depthdecay.garbage import freeze_for_good


def settle(threads: int | None = None) -> None:
    """Load the large libraries, whose objects stay; take so many threads; keep advice to programmers to ourselves."""
    with no_collection():
        from transformers.utils import logging

        from depthdecay.cpu.threads import set_threads

    if threads is not None:
        set_threads(threads)
    logging.set_verbosity_error()


@contextmanager
def no_collection() -> Iterator[None]:
    """While libraries load, whose objects stay: collections find nothing among them, neither now nor at each step."""
    gc.disable()
    try:
        yield
    finally:
        freeze_for_good()
        gc.enable()
