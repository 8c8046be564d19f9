"""A host that learns each step's tokens as late as it can, as on a busy GPU; without one, tokens arrive at once."""

from __future__ import annotations

import pytest

from depthdecay.engine.mailbox import Mailbox


class Late:
    """Stands in for a CUDA event: never there yet, except for who waits."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


def lag_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect tokens only when the mailbox allows no more lag."""
    monkeypatch.setattr(Mailbox, "_now", lambda self: Late())
