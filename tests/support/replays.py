"""What stands in for CUDA graphs where there is no GPU: the recorded pass is run again."""

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
    """Let captures give replays; `allowed`: whether each may succeed."""

    def capture(self: Capturer, warm_up: Callable[[], None], run: Callable[[], None]) -> Replay:
        warm_up()  # it really runs, and must do no harm
        if allowed is not None and not next(allowed):
            raise RuntimeError("no capture")
        return Replay(run)

    monkeypatch.setattr(Capturer, "capture", capture)
