"""Repairs survive a round trip through files, are rejected if they do not fit, and run the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibrations import decaying_plan, random_repairs
from tiny_models import PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs, repaired_at_once


def test_applied_runs_repairs_as_the_engine_does(tmp_path: Path) -> None:
    model, plan = tiny_model("qwen2"), decaying_plan()
    repairs = random_repairs(plan, LayerStack.of(model).hidden_size, neurons=2)
    repairs.save(tmp_path / "repairs.safetensors")
    replace(plan, repairs="repairs.safetensors").save(tmp_path)
    loaded = dd.Plan.load(tmp_path)
    ids = torch.tensor([PROMPTS[0]])
    with dd.applied(model, loaded):
        tokens = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = dd.Engine(model, plan=loaded).generate([list(PROMPTS[0])], 20, eos_token_id=None)[0].token_ids
    assert tokens[0, ids.shape[1] :].tolist() == expected
    plain = dd.Engine(model, plan=plan).generate([list(PROMPTS[0])], 20, eos_token_id=None)[0].token_ids
    assert plain != expected  # random maps must show
    full = dd.Engine(model, plan=loaded).generate([list(PROMPTS[0])], 20, mode="full", eos_token_id=None)[0].token_ids
    assert full == dd.Engine(model).generate([list(PROMPTS[0])], 20, eos_token_id=None)[0].token_ids


def test_repairs_survive_a_file_and_share_maps(tmp_path: Path) -> None:
    plan = decaying_plan()
    repairs = random_repairs(plan, 32, neurons=2)
    shared = Repairs({**repairs.at_depth, 6: repairs.at_depth[6], 5: (*repairs.at_depth[6], repairs.at_depth[5][-1])})
    loaded = Repairs.load(shared.save(tmp_path / "maps.safetensors"))
    assert set(loaded.at_depth) == set(shared.at_depth)
    for depth, maps in shared.at_depth.items():
        for ours, theirs in zip(maps, loaded.at_depth[depth], strict=True):
            assert (ours.start, ours.end) == (theirs.start, theirs.end)
            assert all(torch.equal(a, b) for a, b in zip(ours.parts, theirs.parts, strict=True))
    assert loaded.at_depth[5][0] is loaded.at_depth[6][0]
    repairs.check(plan, 32)


@pytest.mark.parametrize("damage", ["width", "layers", "missing-depth", "no-file", "garbage", "nan"])
def test_repairs_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    hidden = LayerStack.of(model).hidden_size
    repairs = random_repairs(plan, hidden + 1 if damage == "width" else hidden)
    maps = dict(repairs.at_depth)
    if damage == "layers":
        maps[7] = (replace(maps[7][0], start=2, end=3),)
    if damage == "missing-depth":
        del maps[5]
    if damage == "nan":
        maps[7] = (replace(maps[7][0], bias=torch.full((hidden,), float("nan"))),)
    file = Repairs(maps).save(tmp_path / "repairs.safetensors")
    if damage == "no-file":
        file.unlink()
    if damage == "garbage":
        file.write_bytes(b"not a tensor in sight")
    replace(plan, repairs="repairs.safetensors").save(tmp_path)
    with pytest.raises(DepthDecayError) as error:
        dd.Engine(model, plan=dd.Plan.load(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("neurons", [0, 5])
def test_a_map_at_once_is_the_same_map(neurons: int) -> None:
    torch.manual_seed(0)
    shapes = [(4, 16), (16, 4), (16,)] + ([(neurons, 16), (neurons, 16), (16, neurons)] if neurons else [])
    repair = Repair(2, 4, *(torch.randn(shape) for shape in shapes))
    hidden = torch.randn(2, 3, 16)
    assert torch.allclose(repaired_at_once(hidden, *repair.parts_at_once), repair(hidden), atol=1e-5)
    assert repair.parts_at_once is repair.parts_at_once


def test_maps_are_floats_beside_packed_weights() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[3]
    layer.self_attn.q_proj.weight = torch.nn.Parameter(
        torch.zeros_like(layer.self_attn.q_proj.weight, dtype=torch.int8), requires_grad=False
    )
    assert all(example.dtype == torch.float32 for example in LayerStack.of(model).examples())


def test_an_engine_follows_a_model_that_changes_its_numbers() -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    engine = dd.Engine(model, plan=plan, repairs=random_repairs(plan, LayerStack.of(model).hidden_size))
    engine.generate([[5, 6, 7]], 8)
    model.to(torch.bfloat16)
    assert len(engine.generate([[5, 6, 7]], 8, eos_token_id=None)[0].token_ids) == 8


@pytest.mark.parametrize("damage", ["no-bias", "no-gate", "flat-up", "long-bias", "float-start"])
def test_damaged_maps_are_refused(damage: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = random_repairs(decaying_plan(), 32, neurons=2).save(tmp_path / "repairs.safetensors")
    with safe_open(file, "pt") as content:
        about = dict(content.metadata())
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    if damage == "no-bias":
        del tensors["0.bias"]
    if damage == "no-gate":
        del tensors["0.gate"]
    if damage == "flat-up":
        tensors["0.up"] = tensors["0.up"].flatten()
    if damage == "long-bias":
        tensors["0.bias"] = torch.zeros(33)
    if damage == "float-start":
        about["depths"] = about["depths"].replace("[[3, ", "[[3.0, ", 1)
    save_file(tensors, file, about)
    with pytest.raises(DepthDecayError, match="cannot be read as repairs"):
        Repairs.load(file)
