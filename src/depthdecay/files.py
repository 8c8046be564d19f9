"""Paths as users type them, package files, our cache folder, and atomic file writes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from depthdecay.errors import DepthDecayError


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with ~ and ~name expanded."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DepthDecayError(f"'{path}' begins with the home of a user unknown here; give the full path") from None


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder to write to, or fail before anything long runs."""
    folder = expanded(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_folder(folder)
    except OSError as error:
        raise DepthDecayError(f"cannot write to the folder '{path}': {error.strerror or error}") from None
    except ValueError:
        raise DepthDecayError(f"cannot write to {path!r}: that is not a valid folder name") from None
    return folder


def try_folder(folder: Path) -> None:
    """Create and remove a temporary folder, as `made_aside` does; raises OSError where nothing can be written."""
    with _aside(folder):
        pass


def cache_folder() -> Path:
    """`$DEPTHDECAY_CACHE`, or `depthdecay` in the user's cache folder."""
    chosen = os.environ.get("DEPTHDECAY_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "depthdecay"


def package_file(package: str, inside: str) -> Path | None:
    """A file inside an installed package, found without importing it or its dependencies."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder, inside)
        if path.is_file():
            return path
    return None


def read_bytes(path: str | os.PathLike[str], called: str) -> bytes:
    """Read a file that the user named; `called` starts the error message if that fails."""
    try:
        return expanded(path).read_bytes()
    except OSError as error:
        raise DepthDecayError(f"{called} cannot be read: {error.strerror or error}") from None


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """Write a file atomically: the yielded path replaces `path` once it is on disk, so nobody sees half a file.

    Several processes may write the same file at once. It is written inside a temporary folder, since files made by
    tempfile itself are readable by their owner only.
    """
    with _aside(path.parent) as folder:
        made = Path(folder, path.name)
        yield made
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        made.replace(path)


def _aside(folder: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=".building-", dir=folder)


def write_whole(path: Path, content: str | bytes) -> Path:
    with made_aside(path) as made:
        made.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
