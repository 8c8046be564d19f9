"""Shared fixtures: repeatable settings, every architecture in turn, and the embedded model, converted once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny_models import ARCHITECTURES

from depthdecay.batching.drafting import BatchDrafting, BatchPace, CPUPace, Found
from depthdecay.model import gguf_convert
from depthdecay.model import load as models
from depthdecay.speculative.expected_gain import TrackRecord

# Tiny matrices gain nothing from threads, and on a busy machine waiting threads take minutes.
torch.set_num_threads(1)

# The same examples in every run, and no deadlines, so that neither luck nor a busy machine fails a test.
# `pytest --hypothesis-profile=default` searches for new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# The embedded model, converted once per test run.


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    return models.embedded_file()


@pytest.fixture(scope="session")
def converted_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that holds the embedded model, so that the slow conversion happens once per test run."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPTHDECAY_CACHE", str(folder))
        models.load(device="cpu")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cache(converted_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(converted_cache))
    return converted_cache


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*args: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_convert, "convert", convert)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Windows of varying length instead of those that pay off: random weights draft badly."""
    lengths: list[int] = []

    def window(self: TrackRecord) -> int:
        lengths.append((1, 5, 3, 0, 7)[len(lengths) % 5])
        return lengths[-1]

    asked: list[float] = []

    def goes_on(self: TrackRecord, sure: float) -> bool:
        asked.append(sure)
        return len(asked) % 7 != 0

    def cut(self: BatchDrafting, found: Sequence[Found], rows: int) -> list[Found]:
        return [(drafts, tokens[: drafts.lookup.window()]) for drafts, tokens in found]

    monkeypatch.setattr(TrackRecord, "window", window)
    monkeypatch.setattr(TrackRecord, "goes_on", goes_on)
    monkeypatch.setattr(BatchDrafting, "_worth_it", cut)
    monkeypatch.setattr(CPUPace, "_drafts", lambda *_: 0.0)
    monkeypatch.setattr(CPUPace, "has_begun", True)
    monkeypatch.setattr(CPUPace, "longest_after", BatchPace.longest_after)
    return lengths
