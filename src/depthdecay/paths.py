"""Paths: as people type them, where packages and our own cache lie; and files that are whole or not there."""

from __future__ import annotations

import importlib.util
import os
import secrets
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


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write beside the target and rename: nobody ever sees half a file, and several may write the same one at once.

    Not by tempfile, whose files only their owner may read.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path
