"""Progress output: live in a terminal, line by line in a log, and in a pipe only for slow steps."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr

import pytest

from depthdecay.cli import show
from depthdecay.cli.show import working


def test_a_slow_step_is_told_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "SLOW_SECONDS", 0.0)
    with working("preparing …") as say, redirect_stderr(io.StringIO()):  # as when a library's progress bars are hidden
        say("rounding weights …")
        for waiting in threading.enumerate():
            if isinstance(waiting, threading.Timer):
                waiting.join(60)
    say("compiling …")  # an engine may report a step after the block has ended
    assert capsys.readouterr().err == "rounding weights …\n"


def test_quick_steps_are_not_told_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "SLOW_SECONDS", 3600.0)
    threads = threading.active_count()
    with working("preparing …") as say:
        say("rounding weights …")
        say("packing them …")
    for waiting in threading.enumerate():
        if isinstance(waiting, threading.Timer):
            waiting.join(60)
    assert threading.active_count() <= threads
    assert capsys.readouterr().err == ""


def test_what_lasts_is_told_line_by_line_and_nothing_where_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with working("preparing …", lasting=True) as say:
        say("batch 1")
    with working("preparing …", lasting=True, quiet=True) as say:
        say("batch 2")
    assert capsys.readouterr().err == "batch 1\n"
