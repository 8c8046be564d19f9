"""The trial of passes of many widths finds every bit that depends on the width, and covers all widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from replays import replay_captures
from saved_model import save_tiny_chat_model
from tiny_models import PROMPTS, tiny_model

import depthdecay as dd
from depthdecay import self_check
from depthdecay.cuda import exactness
from depthdecay.cuda.pass_graphs import PassGraphs
from depthdecay.cuda.width_trial import WIDTHS, WidthTrial, splits
from depthdecay.model.layers import LayerStack
from depthdecay.self_check import CheckRow, check_model

TEXT = [token % 90 + 3 for token in range(0, 96 * 7, 7)]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> WidthTrial:
    replay_captures(monkeypatch)
    return WidthTrial(LayerStack.of(tiny_model().double()), None, len(PROMPTS[0]) + len(TEXT))


@pytest.mark.parametrize("tokens", [1, 7, 16, 96, 100])
def test_splits_cover_the_text_and_every_width(tokens: int) -> None:
    found = dict(splits(tokens))
    assert all(sum(widths) == tokens for widths in found.values())
    assert all(0 < width <= max(WIDTHS) for widths in found.values() for width in widths)
    assert {widths[0] for widths in found.values()} >= {width for width in WIDTHS[1:] if width <= tokens}
    if tokens > 16:
        assert len(set(found["mixed numbers of tokens (0)"])) > 3


def test_logits_are_those_of_the_model(trial: WidthTrial) -> None:
    model = trial.passes.stack.model
    with torch.no_grad():
        expected = model(torch.tensor([[*PROMPTS[0], *TEXT]])).logits[0, len(PROMPTS[0]) :]
    for widths in ([1] * len(TEXT), [16] * 6, [5, 11] * 6):
        torch.testing.assert_close(trial.logits(PROMPTS[0], TEXT, widths), expected, rtol=1e-4, atol=1e-5)


def test_widths_that_miss_the_end_of_the_text_are_refused(trial: WidthTrial) -> None:
    with pytest.raises(ValueError, match="widths add up to 3, but the text has 96 tokens"):
        trial.logits(PROMPTS[0], TEXT, [1, 2])


@pytest.mark.parametrize("wrong", [None, 2, 11, 16])
def test_one_bit_in_one_width_is_found(wrong: int | None, trial: WidthTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    def several(self: Any, ids: torch.Tensor, positions: torch.Tensor, bucket: int) -> torch.Tensor:
        logits = (ids * 131 + positions).unsqueeze(-1) + torch.arange(trial.said.shape[-1]) / 7
        if ids.shape[1] == wrong:
            logits[:, -1, 5] = logits[:, -1, 5].nextafter(torch.tensor(1e9))
        return logits

    monkeypatch.setattr(PassGraphs, "several", several)
    found = trial.first_difference(PROMPTS[0], TEXT)
    assert found == (None if wrong is None else f"token {wrong - 1} of passes over {wrong} tokens")


@pytest.mark.parametrize("difference", [None, "token 3 of passes over 5 tokens"])
def test_check_reports_what_the_trial_finds(difference: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers are compiled and reported exact, here by stand-ins."""
    replay_captures(monkeypatch)
    monkeypatch.setattr(exactness, "why_inexact", lambda stack: None)
    monkeypatch.setattr(exactness.Exactness, "tell", lambda self, same_bits: setattr(self, "tried", True))
    monkeypatch.setattr(WidthTrial, "first_difference", lambda self, prompt, text: difference)
    engine = dd.Engine(tiny_model(), fast=False)
    engine.uses_graphs, engine.compiled = True, None
    assert not any("any width" in row.name for row in check_model(engine.stack.model))
    monkeypatch.setattr(PassGraphs, "inexact", None)
    rows = list(self_check._check_compiled(engine, PROMPTS[:2]))
    assert [row.passed for row in rows] == [True, difference is None]
    assert rows[1].detail == (difference or "96 tokens in 12 splits into passes of 1 to 16")


@pytest.mark.parametrize(("dtype", "checked"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_a_model_by_name_is_checked_in_its_own_dtype_too(
    dtype: torch.dtype, checked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_chat_model(tmp_path, dtype=dtype)
    seen: list[torch.dtype] = []
    rows = [CheckRow("compiled", True, "")]
    monkeypatch.setattr(
        self_check, "_check_compiled", lambda engine, _: seen.append(engine.stack.model.dtype) or iter(rows)
    )
    assert list(self_check.check_own_dtype(lambda: dd.load(folder, device="cpu", dtype=dtype), None)) == rows[:checked]
    assert seen == [dtype][:checked]
