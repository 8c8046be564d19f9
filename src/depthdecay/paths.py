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
