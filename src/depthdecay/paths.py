"""Paths as people type them."""

from __future__ import annotations

from pathlib import Path

from depthdecay.errors import DepthDecayError


def expanded(path: str | Path) -> Path:
    """A path with ~ and ~name as the folders that they stand for."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DepthDecayError(f"'{path}' begins with the home of a user who is not here; give the whole path") from None


def make_folder(path: str) -> Path:
    """The folder to write to, refused before anything long runs."""
    folder = expanded(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DepthDecayError(f"cannot write to the folder '{path}': {error.strerror or error}") from None
    except ValueError:
        raise DepthDecayError(f"cannot write to {path!r}: no folder can have that name") from None
    return folder
