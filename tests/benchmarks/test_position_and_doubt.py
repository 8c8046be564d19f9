"""Doubt is given as many full passes as make the cost equal, where the shallow pass is least sure."""

from __future__ import annotations

import json
from typing import Any

import benchmark_scripts
import pytest
import torch
from calibrations import decaying_plan, random_repairs, random_texts
from tiny_models import tiny_model

from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.recording import Recording
from depthdecay.model.layers import LayerStack

script = benchmark_scripts.script("position_and_doubt")


def measured(agrees: list[int], doubt: list[float], layers: float) -> Any:
    places = len(agrees)
    text = torch.arange(places) // 2
    parts = torch.tensor(agrees, dtype=torch.bool), torch.tensor(doubt), torch.full((places,), layers), text
    return script.Measured(1.0, *parts)


def test_the_most_doubtful_places_are_corrected_at_equal_cost() -> None:
    slow = measured([1, 1, 1, 0], [0.0] * 4, 9.0)
    fast = measured([0, 0, 1, 1], [0.9, 0.2, 0.5, 0.1], 4.0)
    found = script.compared(slow, fast, num_layers=10)  # five layers less: full depth again at two places of four
    assert found.share_doubted == pytest.approx(0.5)
    assert found.by_position == 0.75
    assert found.by_position_and_doubt == 0.75  # the first place is corrected; the third was right, the second unseen
    assert found.gain == 0.0
    assert found.gain_low == -0.5
    assert found.gain_high == 0.5
    assert found.speedup == pytest.approx(10 / 9)


def test_a_plan_is_measured_as_calibration_does() -> None:
    stack, plan = LayerStack.of(tiny_model()), decaying_plan()
    recording = Recording.of(stack, random_texts(6, 12), rows=4)
    repairs = random_repairs(plan, stack.hidden_size)
    found = script.measured(recording, plan, repairs, 1.2)
    expected = Simulator(recording).measure(plan, repairs)
    assert float(found.agrees.double().mean()) == pytest.approx(expected.agreement)
    assert torch.bincount(found.text).tolist() == [11] * 6
    assert stack.num_layers - 1 < float(found.layers.max()) < stack.num_layers  # a layer less, and its map
    assert 4 < float(found.layers.min()) < 5
    assert bool(((found.doubt >= 0) & (found.doubt < 1)).all())
    json.dumps(vars(script.compared(found, found, stack.num_layers)), allow_nan=False)
