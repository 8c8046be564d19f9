"""Paths: as people type them, where packages and our own cache lie; and files that are whole or not there."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from depthdecay.errors import DepthDecayError


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with ~ and ~name as the folders that they stand for."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DepthDecayError(f"'{path}' begins with the home of a user who is not here; give the whole path") from None


def make_folder(path: str | os.PathLike[str]) -> Path:
    """The folder to write to, refused before anything long runs."""
    folder = expanded(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_folder(folder)
    except OSError as error:
        raise DepthDecayError(f"cannot write to the folder '{path}': {error.strerror or error}") from None
    except ValueError:
        raise DepthDecayError(f"cannot write to {path!r}: no folder can have that name") from None
    return folder


def try_folder(folder: Path) -> None:
    """Make and remove what `made_aside` makes there; an OSError says that no file can be written."""
    with _aside(folder):
        pass


def cache_folder() -> Path:
    """`$DEPTHDECAY_CACHE`, or `depthdecay` in the user's cache folder."""
    chosen = os.environ.get("DEPTHDECAY_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "depthdecay"


def package_file(package: str, inside: str) -> Path | None:
    """A file that an installed package carries. Found, not imported: its code is not needed, nor what that needs."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder, inside)
        if path.is_file():
            return path
    return None


def read_bytes(path: str | os.PathLike[str], called: str) -> bytes:
    """A file that the user named; `called` begins the sentence that says why it cannot be read."""
    try:
        return expanded(path).read_bytes()
    except OSError as error:
        raise DepthDecayError(f"{called} cannot be read: {error.strerror or error}") from None


@contextmanager
def made_aside(path: Path) -> Iterator[Path]:
    """Where to make a file: it takes its place once it is on the disk, so that nobody ever sees half of it.

    Several may make the same one at once. In a folder, since of tempfile's own files only their owner may read them.
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
