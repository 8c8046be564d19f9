from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from depthdecay.calibration.divergence import (
    ROWS_AT_ONCE,
    CompiledKL,
    kl_and_gradient,
    mean_kl,
    rows_within,
    weighted_kl,
)
from depthdecay.library_internals import compilation_errors


@pytest.mark.parametrize("at_once", [3, 7, 100])
def test_kl_in_parts_is_kl_at_once(at_once: int) -> None:
    torch.manual_seed(0)
    head, other = nn.Linear(4, 11).requires_grad_(False), nn.Linear(4, 11).requires_grad_(False)
    states, targets = torch.randn(2, 7, 4, requires_grad=True), torch.randn(7, 4)
    weights = torch.rand(2, 7)
    found = weighted_kl(states, weights, head, targets, other, at_once)
    wanted = other(targets).softmax(-1)
    by_position = (wanted * (wanted.log() - head(states).log_softmax(-1))).sum(-1)
    expected = (weights * by_position).sum()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (gradient,) = torch.autograd.grad(3 * found, states, retain_graph=True)
    (plain,) = torch.autograd.grad(3 * expected, states, retain_graph=True)
    assert torch.allclose(gradient, plain, atol=1e-6)
    with torch.no_grad():
        assert float(mean_kl(states[1], head, targets, other)) == pytest.approx(float(by_position[1].mean()), rel=1e-5)


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def failing(run: Any, **settings: Any) -> Any:
        def fail(*given: Any) -> Any:
            tries.append(1)
            raise compilation_errors()("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", failing)
    run, logits = CompiledKL(), torch.randn(3, 5)
    chances = torch.randn(3, 5).softmax(-1)
    given = logits, chances, (chances * chances.log()).sum(-1), torch.ones(3)
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(run(*given), kl_and_gradient(*given), strict=True))
    assert len(tries) == 1


def test_more_positions_are_taken_at_a_time_where_there_is_room() -> None:
    assert rows_within(8e9, 150_000) == ROWS_AT_ONCE
    assert 2000 < rows_within(80e9, 150_000) < 4000
    assert rows_within(80e9, 1_000) == 8192
