"""A stand-in for CUDA graphs where there is no GPU: it runs the recorded pass again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from depthdecay.cuda.capture_or_fallback import Capturer


class Replay:
    """Stands in for a CUDA graph: runs the recorded pass."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.replay = run


def replay_captures(monkeypatch: pytest.MonkeyPatch, allowed: Iterator[bool] | None = None) -> None:
    """Make captures return replays; `allowed`: whether each capture succeeds."""

    def capture(self: Capturer, warm_up: Callable[[], None], run: Callable[[], None]) -> Replay:
        warm_up()  # really runs, and must have no side effects
        if allowed is not None and not next(allowed):
            raise RuntimeError("no capture")
        return Replay(run)

    monkeypatch.setattr(Capturer, "capture", capture)
