"""Reuse of objects that are slow to create: the last one is kept for the next request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Lent = TypeVar("Lent")


class Kept(Generic[Lent]):
    """Keeps the last object that was slow to create, and lends it to one request at a time."""

    def __init__(self) -> None:
        self.last: Lent | None = None
        self._is_lent = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lent(self, fits: Callable[[Lent], bool], make: Callable[[], Lent]) -> Iterator[Lent]:
        """The kept object if it fits and is not lent; otherwise a new one, which is kept unless another is lent."""
        with self._lock:
            free = not self._is_lent
            if free and self.last is not None and not fits(self.last):
                self.last = None  # free its memory before the next one allocates more
            lent = self.last if free and self.last is not None else make()
            if free:
                self.last, self._is_lent = lent, True
        try:
            yield lent
        finally:
            if free:
                self._is_lent = False
