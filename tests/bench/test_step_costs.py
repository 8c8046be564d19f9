"""Passes are timed for a shape and for a model, and speed-ups follow from their costs."""

from __future__ import annotations

import pytest
from tiny_models import LAYERS, tiny_model

from depthdecay.bench.step_costs import ACCEPTED, VERIFIED, benchmark_step_costs
from depthdecay.errors import DepthDecayError
from depthdecay.model.loaded_model import LoadedModel


def test_passes_of_a_loaded_model_are_timed_in_full_depth_steps() -> None:
    report = benchmark_step_costs(LoadedModel(tiny_model(), None, "mine", "folder"), prompt_tokens=8, rounds=1)
    assert report.model == "mine"
    assert list(report.drafts) == [str(LAYERS * part // 4) for part in (1, 2, 3)]
    assert list(report.verifications) == [str(tokens) for tokens in VERIFIED]
    assert len(report.speedups) == len(report.drafts) * len(ACCEPTED)
    assert report.full_ms > 0


def test_bad_values_are_refused_before_a_model_is_made() -> None:
    with pytest.raises(DepthDecayError, match="shape and model were given together"):
        benchmark_step_costs("x", shape="tiny")
    with pytest.raises(DepthDecayError, match="prompt_tokens is 0"):
        benchmark_step_costs("no/such-model", prompt_tokens=0)
