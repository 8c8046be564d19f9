"""From a request's depth settings to a plan: the same one that the library would choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import LAYERS, tiny_model

pytest.importorskip("pydantic")

from depthdecay import Engine, Plan
from depthdecay.engine.plan_choice import DepthSettings
from depthdecay.serve.depth_choice import Depths
from depthdecay.serve.schema import DepthRequest


@pytest.mark.parametrize("max_tokens", [2, 24, None])
def test_a_speed_up_of_a_calibrated_plan_is_over_its_own_horizon(max_tokens: int | None) -> None:
    """However short the answer: two tokens alone could not average 1.2."""
    calibrated = replace(Plan.for_speedup(LAYERS, 1.3, over_tokens=64), notes={"over_tokens": 64})
    engine = Engine(tiny_model(), None, calibrated, fast=False)
    mode, plan = Depths(engine).resolve(DepthRequest(speedup=1.2), max_tokens)
    assert mode == "decay"
    assert plan == DepthSettings(calibrated, speedup=1.2).choose(engine.stack, None)


def test_a_guessed_ladder_averages_over_the_answer() -> None:
    engine = Engine(tiny_model(), None, fast=False)
    _, plan = Depths(engine).resolve(DepthRequest(speedup=1.2), 40)
    assert plan is not None
    assert plan.schedule.to_dict()["horizon"] == 40
    _, said = Depths(engine).resolve(DepthRequest(speedup=1.2, over_tokens=80), 40)
    assert said is not None
    assert said.schedule.to_dict()["horizon"] == 80
