"""Maps learn on a GPU as on a CPU, in 16 bits. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from calibrations import decaying_plan, random_texts
from tiny_models import tiny_model

from depthdecay.calibration.fit import FitSettings, fit_plan
from depthdecay.calibration.learned_repairs import LearnedRepairs, LearningSettings
from depthdecay.calibration.recording import Recording
from depthdecay.model.layers import LayerStack

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_maps_in_bf16_learn_on_a_gpu() -> None:
    stack, plan = LayerStack.of(tiny_model("llama").to("cuda", torch.bfloat16)), decaying_plan()
    texts = random_texts(56, 24)
    fit, select = Recording.of(stack, texts[:40]), Recording.of(stack, texts[40:])
    repairs = fit_plan(fit, plan, FitSettings(8, 4, 0.03))
    settings = LearningSettings(minutes=10, passes=8, rows=8, rate=0.02, own_share=0.1, renewals=2)
    learning = LearnedRepairs(stack, plan, repairs, texts[:40], select, settings)
    learned = learning.learn()
    parts = [part for maps in learned.at_depth.values() for repair in maps for part in repair.parts]
    assert {(part.device.type, part.dtype) for part in parts} == {("cuda", torch.bfloat16)}
    assert {row.learned.dtype for row in learning.masters.rows.values()} == {torch.float32}
    assert learning.ended == "all steps were made"
    assert learning.select.measure(plan, learned).kl < learning.curve[0][1]
