"""Speed-ups count layers, maps and the LM head, and every reachable one is reached."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calibrations import ORDER, decaying_plan, random_repairs
from tiny_models import LAYERS, tiny_model

import depthdecay as dd
from depthdecay.errors import DepthDecayError
from depthdecay.model.costs import Costs, cost_speedup
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.model.speedup import plan_at_speedup
from depthdecay.plan.ladder import runs_of


def test_costs_count_maps_and_the_head_and_leave_out_the_first_token() -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    stack = LayerStack.of(model)
    repairs = random_repairs(plan, stack.hidden_size)
    layers, head = stack.layer_bytes(), stack.head_bytes()
    costs = Costs(stack, plan, repairs)
    kept = sum(size for index, size in enumerate(layers) if index not in (3, 4))
    maps = sum(part.numel() for part in repairs.at(6)[3].parts) * 4
    assert costs.at(6) == kept + maps + head
    steps = [costs.at(plan.depth(i)) for i in range(1, 10)]
    assert cost_speedup(plan, stack, 10, repairs) == pytest.approx((sum(layers) + head) / (sum(steps) / 9))
    assert cost_speedup(plan, stack, 10, Repairs()) > cost_speedup(plan, stack, 10, repairs)


def test_a_plan_is_rescheduled_with_its_maps_counted() -> None:
    stack = LayerStack.of(tiny_model("llama"))
    plan = dd.Plan.for_speedup(LAYERS, 1.3, over_tokens=64, drop_order=ORDER)
    repairs = random_repairs(plan, stack.hidden_size)
    bare = plan_at_speedup(plan, stack, 1.25, 100, Repairs())
    paid = plan_at_speedup(plan, stack, 1.25, 100, repairs)
    assert bare.layers_executed(100) <= LAYERS * 100 / 1.25
    assert paid.layers_executed(100) < bare.layers_executed(100)
    costs = Costs(stack, plan, repairs)
    assert LAYERS * 100 / float(sum(costs.in_layers(d) for d in paid.depths(100))) >= 1.25
    assert paid.ladder == plan.ladder
    with pytest.raises(DepthDecayError, match="cannot be reached"):
        plan_at_speedup(plan, stack, 3, 100, repairs)


def test_every_reachable_speedup_is_reached_and_no_other() -> None:
    """Compared with trying every alpha: the requested speed-up is met whenever some alpha meets it."""
    stack = LayerStack.of(tiny_model("llama"))
    for rank in (1, 6, 12):
        plan = dd.Plan.for_speedup(LAYERS, 1.1, over_tokens=64, drop_order=[3, 4, 6, 1, 5])
        repairs = Repairs(
            {
                depth: tuple(
                    Repair(start, end, torch.ones(rank, 32), torch.ones(32, rank), torch.ones(32))
                    for start, end in runs_of(plan.dropped(depth))
                )
                for depth in range(3, LAYERS)
            }
        )
        costs = Costs(stack, plan, repairs)

        def reached(candidate: dd.Plan, costs: Costs = costs) -> float:
            return float(LAYERS * 64 / sum(costs.in_layers(depth) for depth in candidate.depths(64)))

        paces = [
            reached(dd.Plan.decay(LAYERS, i / 2000, drop_order=[3, 4, 6, 1, 5], horizon=64)) for i in range(1, 2001)
        ]
        for asked in np.linspace(1.02, 2.6, 25).round(3).tolist():
            if asked > max(paces):
                with pytest.raises(DepthDecayError, match="cannot be reached"):
                    plan_at_speedup(plan, stack, asked, 64, repairs)
            else:
                assert reached(plan_at_speedup(plan, stack, asked, 64, repairs)) >= asked
