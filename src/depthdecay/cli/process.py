"""What a command that takes long sets for its whole process, before the library runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
    """Libraries make a million objects that stay; looking for garbage among them, now and at each step, finds none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
