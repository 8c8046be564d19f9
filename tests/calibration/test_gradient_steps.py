from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from depthdecay.calibration import gradient_steps
from depthdecay.calibration.gradient_steps import Learned, Progress, StepSettings, descend
from depthdecay.errors import DepthDecayError

WANTED = torch.tensor([3.0, -1.0])


def fitted(steps: int = 200, spoil: int | None = None, **settings: float) -> tuple[nn.Parameter, Learned]:
    values = nn.Parameter(torch.zeros(2))

    def loss_of(step: int) -> torch.Tensor:
        loss = (values - WANTED).pow(2).sum()
        return loss * math.nan if step == spoil else loss

    learned = descend([values], loss_of, lambda: float(loss_of(-1)), StepSettings(steps, rate=0.1, **settings))
    return values, learned


def test_steps_go_down_and_the_curve_tells() -> None:
    values, learned = fitted()
    assert torch.allclose(values, WANTED, atol=0.05)
    assert learned.curve[0].step == 0
    assert learned.curve[0].judged_loss == pytest.approx(10)
    assert learned.best == min(point.judged_loss for point in learned.curve)
    assert learned.ended == "all steps were made"


def test_the_same_steps_give_the_same_bits() -> None:
    assert torch.equal(fitted(50)[0], fitted(50)[0])


def test_the_best_is_kept_and_not_the_last() -> None:
    values = nn.Parameter(torch.zeros(1))
    seen: list[float] = []

    def judge() -> float:  # after a while, training makes this worse
        seen.append(float((values - 0.5).abs()))
        return seen[-1]

    learned = descend([values], lambda step: -values.sum(), judge, StepSettings(40, rate=0.1))
    assert learned.best == min(seen) < seen[-1]
    assert float((values.detach() - 0.5).abs()) == learned.best


def test_steps_that_are_too_large_are_made_smaller() -> None:
    values = nn.Parameter(torch.tensor([0.99, -0.99]))

    def loss_of(_step: int) -> torch.Tensor:
        return (values - torch.tensor([1.0, -1.0])).abs().sum()

    settings = StepSettings(80, rate=2.0, cooldown=0.0)  # without cooldown, steps stay this large
    learned = descend([values], loss_of, lambda: float(loss_of(-1)), settings)
    start = learned.curve[0].judged_loss
    assert learned.slowings > 1
    assert learned.curve[1].judged_loss > start
    assert learned.best < start


def test_smaller_steps_outlive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_steps, "KEEP_EVERY", 0.0)
    values = nn.Parameter(torch.tensor([0.99]))

    def interrupted(progress: Progress) -> None:
        if progress.step == 21:
            raise KeyboardInterrupt

    asked = [values], lambda step: (values - 1).abs().sum(), lambda: float((values - 1).abs())
    first, second = Learned(), Learned()
    settings = StepSettings(80, rate=2.0, cooldown=0.0)
    with pytest.raises(KeyboardInterrupt):
        descend(*asked, settings, interrupted, tmp_path / "kept", first)
    assert first.slowings > 0
    descend(*asked, StepSettings(80, rate=2.0, cooldown=0.0), file=tmp_path / "kept", learned=second)
    assert second.slowings >= first.slowings
    assert [point.step for point in second.curve][:3] == [point.step for point in first.curve]


def test_what_was_there_is_kept_where_no_step_helps() -> None:
    values = nn.Parameter(torch.ones(1))
    descend([values], lambda step: values.sum(), lambda: float((values - 1).abs()), StepSettings(10, rate=0.1))
    assert values.item() == 1


def test_a_loss_that_is_not_finite_ends_it_with_the_best_so_far() -> None:
    values, learned = fitted(200, spoil=100)
    assert "step 101 was not a finite number" in learned.ended
    assert torch.isfinite(values).all()
    assert learned.best < 10


def test_a_loss_that_was_never_finite_is_an_error() -> None:
    values = nn.Parameter(torch.zeros(1))
    with pytest.raises(DepthDecayError, match="not a finite number from the start"):
        descend([values], lambda step: values.sum(), lambda: math.nan, StepSettings(10))


def test_time_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(gradient_steps.time, "monotonic", lambda: float(next(clock)))
    _, learned = fitted(10_000, seconds=100.0)
    assert "the time was up" in learned.ended
    assert learned.curve[-1].judged_loss < 10


def test_an_interrupt_leaves_the_best_in_place() -> None:
    values = nn.Parameter(torch.zeros(2))

    def told(progress: Progress) -> None:
        if progress.step == 60:
            raise KeyboardInterrupt

    def loss_of(step: int) -> torch.Tensor:
        return (values - WANTED).pow(2).sum()

    with pytest.raises(KeyboardInterrupt):
        descend([values], loss_of, lambda: float(loss_of(0)), StepSettings(100, rate=0.1, judgements=10), told)
    assert 0 < loss_of(0).item() < 5


class TestGoingOn:
    SETTINGS = StepSettings(40, rate=0.1, judgements=8)

    @pytest.fixture(autouse=True)
    def at_every_judgement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gradient_steps, "KEEP_EVERY", 0.0)

    def descend(self, file: Path, until: int = 1000) -> torch.Tensor:
        values = nn.Parameter(torch.zeros(2))

        def loss_of(step: int) -> torch.Tensor:
            return (values - WANTED - 0.1 * step % 3).pow(2).sum()

        def told(progress: Progress) -> None:
            if progress.step == until:
                raise KeyboardInterrupt

        descend([values], loss_of, lambda: float((values - WANTED).pow(2).sum()), self.SETTINGS, told, file)
        return values.detach()

    def test_as_if_it_had_never_been_interrupted(self, tmp_path: Path) -> None:
        whole = self.descend(tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            self.descend(tmp_path / "halves", until=23)
        assert torch.equal(self.descend(tmp_path / "halves"), whole)

    @pytest.mark.parametrize("damage", ["garbage", "other settings"])
    def test_what_does_not_fit_is_begun_anew(self, tmp_path: Path, damage: str) -> None:
        whole = self.descend(tmp_path / "whole")
        file = tmp_path / "halves"
        with pytest.raises(KeyboardInterrupt):
            self.descend(file, until=23)
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(b"nothing" if damage == "garbage" else content.replace(b"rate=0.1", b"rate=0.9"))
        assert torch.equal(self.descend(file), whole)
