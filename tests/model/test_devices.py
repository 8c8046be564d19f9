"""In which precision calibration learns."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from depthdecay.model import devices


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_model_of_32_bits_runs_in_16_where_that_is_faster(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_is_faster_in_bfloat16", lambda: is_faster)
    model = tiny_model("llama")
    layer = torch.nn.Linear(4, 4)
    with devices.in_fast_precision(model):
        assert (layer(torch.ones(1, 4)).dtype == torch.bfloat16) is is_faster
    with devices.in_fast_precision(model.bfloat16()):  # has its own precision already
        assert layer(torch.ones(1, 4)).dtype == torch.float32


def test_cpus_are_timed_once() -> None:
    first = devices.fast_precision(torch.device("cpu"))
    assert first in (torch.bfloat16, torch.float32)
    assert devices.fast_precision(torch.device("cpu")) == first
    assert devices._is_faster_in_bfloat16.cache_info().hits >= 1
