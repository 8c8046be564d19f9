"""The search drops the least important layers first, resumes, and ends in time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from calibrations import random_texts
from tiny_models import LAYERS, tiny_model

from depthdecay.calibration.fit import FitSettings
from depthdecay.calibration.influence import block_influence
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.search import Found, Search
from depthdecay.model.layers import LayerStack


def search_on(recording: Recording, **changes: Any) -> Search:
    settings: dict[str, Any] = {
        "fitted_on": len(recording.batches) - 1,
        "candidates": range(1, LAYERS - 1),
        "lowest_depth": 4,
        "settings": FitSettings(8, 0, 0.01),
        "layer_costs": [1.0] * LAYERS,
    }
    return Search(recording, **(settings | changes))


def test_the_search_drops_a_layer_that_does_nothing_first_and_resumes() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[5].self_attn.o_proj.weight.zero_()
        model.model.layers[5].mlp.down_proj.weight.zero_()
    stack = LayerStack.of(model)
    recording = Recording.of(stack, random_texts(40, 12), rows=8)
    saved: list[list[dict[str, Any]]] = []
    influence = block_influence(recording)
    assert influence[5] == pytest.approx(0, abs=1e-6)
    search = search_on(recording, save=lambda beam: saved.append([found.to_dict() for found in beam]))
    found = search.run(influence)
    assert found.order[0] == 5
    assert found.kls[0] < 1e-6
    assert len(found.order) == LAYERS - 4
    assert len(set(found.order)) == len(found.order)
    again = search_on(recording).run(influence)
    assert again.order == found.order  # same input, same ladder
    halfway = json.loads(json.dumps(saved[1]))
    resumed = search_on(recording).run(influence, [Found.from_dict(values) for values in halfway])
    assert resumed.order == found.order


def test_a_wider_search_is_no_worse_and_a_late_one_ends() -> None:
    stack = LayerStack.of(tiny_model("llama"))
    recording = Recording.of(stack, random_texts(40, 12), rows=8)
    influence = block_influence(recording)
    greedy = search_on(recording, beam=1, width=1).run(influence)
    wide = search_on(recording, beam=3, width=6).run(influence)
    assert sum(wide.kls) <= sum(greedy.kls) + 1e-9
    late = search_on(recording, seconds=0.0).run(influence)
    assert len(late.order) == LAYERS - 4


def test_when_its_time_is_over_a_search_measures_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.of(LayerStack.of(tiny_model("llama")), random_texts(16, 12), rows=8)
    influence = block_influence(recording)
    saved: list[list[Found]] = []
    measured: list[float] = []
    kl = Search.kl
    monkeypatch.setattr(Search, "kl", lambda search, trace: measured.append(kl(search, trace)) or measured[-1])
    over = search_on(recording, latest=0.0, save=saved.append).run(influence)
    assert len(saved) == len(measured) == 1  # one layer at the first rung, which scales the others' promise
    assert over.order[0] == saved[0][0].order[0]
    assert len(set(over.order)) == len(over.kls) == LAYERS - 4
    rest = [over.promise[layer] for layer in over.order[1:]]
    assert rest == sorted(rest)
    assert list(over.kls) == sorted(over.kls)
