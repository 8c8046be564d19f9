"""Maps repair dropped layers."""

from __future__ import annotations

import pytest
import torch
from calibrations import ORDER, random_texts
from tiny_models import LAYERS, tiny_model

import depthdecay as dd
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings, Moments, Trace, _sample, fit_plan
from depthdecay.calibration.recording import Recording
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs


def test_a_linear_layer_is_repaired_exactly() -> None:
    """Outputs that are linear in the normalised state are recovered completely."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn((400, 12), generator=generator)
    state[:, 3] *= 7
    normal = state * state.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    weight = torch.randn((12, 3), generator=generator) @ torch.randn((3, 12), generator=generator)
    target = state + normal @ weight + 0.5
    moments = Moments(12, torch.device("cpu"))
    for part in range(0, 400, 100):
        moments.add(state[part : part + 100], target[part : part + 100])
    repair = moments.solve(0, 1, FitSettings(rank=3, ridge=1e-9)).to(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(repair(state), target, atol=1e-3, rtol=1e-3)
    assert repair.rank == 3
    small = moments.solve(0, 1, FitSettings(rank=1, ridge=1e-9)).to(torch.device("cpu"), torch.float32)
    left = float((small(state) - target).norm())
    assert left > 0.1
    # The best of its rank: rank-1 maps with other directions are far worse.
    whole = (target - state - 0.5).T.cov()
    values = torch.linalg.eigvalsh(whole).flip(0)
    assert left**2 / 400 == pytest.approx(float(values[1:].sum()), rel=0.2)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_maps_lower_the_kl_of_dropped_layers(architecture: str) -> None:
    stack = LayerStack.of(tiny_model(architecture))
    texts = random_texts(64, 24)
    fit, held = Recording.of(stack, texts[:48]), Recording.of(stack, texts[48:])
    plan = dd.Plan.for_speedup(LAYERS, 1.2, over_tokens=24, drop_order=ORDER)
    trace, maps = Trace(fit), {}
    for rung, layer in enumerate(ORDER, start=1):
        trace = trace.without([layer], FitSettings(16, 4, 0.01))
        maps[LAYERS - rung] = trace.repairs
    constant = Repairs(maps)
    constant.check(plan, stack.hidden_size)
    simulator = Simulator(held)
    plain, repaired = simulator.measure(plan), simulator.measure(plan, constant)
    assert repaired.kl < 0.8 * plain.kl
    fitted = fit_plan(fit, plan, FitSettings(16, 4, 0.1), constant)
    fitted.check(plan, stack.hidden_size)
    assert simulator.measure(plan, fitted).kl < 0.9 * plain.kl
    has_neurons = any(repair.neurons for repairs in fitted.at_depth.values() for repair in repairs)
    assert has_neurons == (architecture == "llama")


def test_a_trace_that_goes_on_equals_one_from_the_start() -> None:
    """What is shared between rungs must equal a fit from scratch."""
    stack = LayerStack.of(tiny_model("llama"))
    recording = Recording.of(stack, random_texts(24, 12))
    settings = FitSettings(8, 2, 0.01)
    steps = Trace(recording)
    for layer in ORDER:
        steps = steps.without([layer], settings)
    # Maps before the last change were fitted on states that later rungs do not affect.
    whole = Trace(recording).without(ORDER, settings)
    assert [(r.start, r.end) for r in steps.repairs] == [(r.start, r.end) for r in whole.repairs]
    for ours, theirs in zip(steps.states, whole.states, strict=True):
        torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-3, rtol=1e-3)


def test_neurons_are_chosen_on_tokens_of_every_batch() -> None:
    parts = [torch.full((count, 3), float(kind)) for kind, count in enumerate((5000, 100, 3000))]
    kinds = _sample(parts)[:, 0]
    assert len(kinds) < 4200
    assert [int((kinds == kind).sum()) for kind in range(3)] == [1366, 100, 1366]
