"""A calibration that takes seconds (few prompts, small maps), and texts to record without calibrating."""

from __future__ import annotations

import numpy as np
import torch
from tiny_models import LAYERS, PROMPTS

import depthdecay as dd
from depthdecay.calibration.continuations import Continuation
from depthdecay.calibration.fit import FitSettings
from depthdecay.calibration.settings import CalibrationSettings
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.plan.ladder import runs_of


def random_repairs(plan: dd.Plan, hidden: int, neurons: int = 0) -> Repairs:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    at_depth = {}
    for depth in range(plan.ladder.min_layers, plan.num_layers):
        maps = []
        for start, end in runs_of(plan.dropped(depth)):
            parts = [random(4, hidden), random(hidden, 4), random(hidden)]
            if neurons:
                parts += [random(neurons, hidden), random(neurons, hidden), random(hidden, neurons)]
            maps.append(Repair(start, end, *parts))
        at_depth[depth] = tuple(maps)
    return Repairs(at_depth)


SMALL = CalibrationSettings(
    fit_prompts=24,
    select_prompts=8,
    held_out_prompts=8,
    new_tokens=16,
    search_prompts=16,
    rows=8,
    batch=8,
    beam=1,
    width=2,
    maps=(FitSettings(8, 0, 0.03), FitSettings(8, 2, 0.03)),
    ridges=(0.03,),
    warmups=(0.2,),
    learning_minutes=0.0,
)


def token_prompts(count: int = 60) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, 90, (count, 6)).tolist()


ORDER = [3, 4, 6, 1]


def decaying_plan() -> dd.Plan:
    return dd.Plan.decay(LAYERS, alpha=0.93, drop_order=ORDER, min_layers=4)


def texts_of(engine: dd.Engine, tokens: int = 24) -> list[Continuation]:
    prompts = [list(prompt) for prompt in PROMPTS]
    results = engine.generate(prompts, tokens, eos_token_id=None)
    return [Continuation(tuple(p), tuple(r.token_ids)) for p, r in zip(prompts, results, strict=True)]


def random_texts(count: int, tokens: int, vocabulary: int = 90) -> list[Continuation]:
    numbers = np.random.default_rng(0).integers(3, vocabulary, (count, 6 + tokens)).tolist()
    return [Continuation(tuple(row[: 4 + i % 3]), tuple(row[6:])) for i, row in enumerate(numbers)]
