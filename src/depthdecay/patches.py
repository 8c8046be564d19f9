"""Temporary patches of other people's objects, restored exactly as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from depthdecay.errors import DepthDecayError

_MISSING = object()


@contextlib.contextmanager
def replaced_each(objects: Sequence[Any], name: str, values: Iterable[Any]) -> Iterator[None]:
    """Set an attribute on each object; afterwards restore their __dict__s exactly."""
    before = [obj.__dict__.get(name, _MISSING) for obj in objects]
    try:
        for obj, value in zip(objects, values, strict=True):
            obj.__dict__[name] = value
        yield
    finally:
        for obj, value in zip(objects, before, strict=True):
            _put_back(obj, name, value)


def replaced(obj: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """The same for one object."""
    return replaced_each([obj], name, [value])


def _put_back(obj: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        obj.__dict__.pop(name, None)
    else:
        obj.__dict__[name] = before


class Patch:
    """A function that replaces a method and has its signature, but refuses to be copied along with the model.

    A copied function would still call the original model, with the original's weights.
    """

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        self.function = function
        self.__wrapped__ = original  # gives it the signature: transformers inspects what a forward accepts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __deepcopy__(self, _memo: Any) -> Any:
        raise DepthDecayError("the model cannot be copied while depth decay is applied to it; leave the block first")

    def __reduce__(self) -> Any:
        raise DepthDecayError("the model cannot be pickled while depth decay is applied to it; leave the block first")


def patched(obj: Any, name: str, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Temporarily replace a method with a function."""
    return replaced(obj, name, Patch(function, getattr(obj, name)))


class SharedPatch:
    """A process-wide patch: the first user applies it, the last one undoes it.

    Two threads that each replaced and restored the name would restore each other's patch. The replacement must be
    correct for every thread while it is in place.
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._undo.enter_context(self._change())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()
