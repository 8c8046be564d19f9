"""Progress: live in a terminal, line by line in a log, in a pipe only for slow steps. And the line after an answer."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr

import pytest

from depthdecay.cli import show
from depthdecay.cli.show import summary, working
from depthdecay.engine.result import Result


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


def lossless(tokens: int, *, layer_passes: int = 0, **counts: int) -> Result:
    ids = list(range(tokens))
    return Result(
        token_ids=ids, depths=[30] * tokens, num_layers=30, mode="lossless", layer_passes=layer_passes, **counts
    )


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (
            lossless(64, verifications=24, drafted=52, accepted=39, layer_passes=30 * 25 + 52 * 24),
            "64 tokens in 25 full passes: 39 of 52 drafts accepted, 2.56 tokens per pass",
        ),
        # Drafts by layers that cost more than they gain: more layers than at full depth, which is no one's question.
        (
            lossless(64, verifications=62, drafted=7, accepted=1, layer_passes=1962),
            "64 tokens in 63 full passes: 1 of 7 drafts accepted, 1.02 tokens per pass",
        ),
        (lossless(3, verifications=2), "3 tokens in 3 full passes: nothing drafted, 1.00 tokens per pass"),
        (lossless(1), "1 token in 1 full pass: nothing drafted, 1.00 tokens per pass"),
        (
            Result(token_ids=[1, 2, 3, 4], depths=[30, 30, 20, 20], num_layers=30, mode="decay"),
            "4 tokens · 100 of 120 layers · layer speed-up 1.20x",
        ),
    ],
)
def test_the_line_after_an_answer_fits_its_mode(result: Result, line: str) -> None:
    assert summary(result) == line


def test_the_speed_of_an_answer_is_told_if_it_was_timed() -> None:
    result = lossless(64, verifications=24, drafted=52, accepted=39)
    result.seconds, result.prefill_seconds = 1.63, 1.0
    assert summary(result).endswith(" tokens per pass · 100.0 tokens/s")
