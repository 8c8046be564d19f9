"""A shallow model for assisted generation in transformers: shared weights, the plan's layers, the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import ARCHITECTURES, LAYERS, PROMPTS, tiny_model
from transformers import DynamicCache

import depthdecay as dd
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerPass, LayerStack
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.plan.ladder import runs_of


def random_maps(plan: dd.Plan, depth: int, hidden: int) -> Repairs:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    maps = [
        Repair(start, end, random(4, hidden), random(hidden, 4), random(hidden))
        for start, end in runs_of(plan.dropped(depth))
    ]
    return Repairs({depth: tuple(maps)})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("order", [[3, 4, 1], [3, LAYERS - 1, 5]], ids=["inner", "last"])
def test_it_is_the_shallow_pass(architecture: str, order: list[int]) -> None:
    model = tiny_model(architecture)
    plan = dd.Plan.constant(LAYERS, LAYERS - 3, drop_order=order)
    repairs = random_maps(plan, LAYERS - 3, LayerStack.of(model).hidden_size)
    draft = dd.draft_model(model, plan, repairs=repairs)
    assert draft.config.get_text_config(decoder=True).num_hidden_layers == LAYERS - 3
    ours = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in ours for parameter in draft.parameters())
    ids = torch.tensor([PROMPTS[0]])
    stack = LayerStack.of(model)
    route = LayerPass(frozenset(order), repairs.at(LAYERS - 3))
    with torch.no_grad():
        model(ids)  # reveals what layers return
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        expected = stack.run(route, ids, None, DynamicCache(config=model.config), positions, keep=ids.shape[1])
        assert torch.allclose(draft(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text", "gpt2", "gpt_neox"])
def test_assisted_generation_says_what_generate_says(architecture: str) -> None:
    model = tiny_model(architecture)
    if transformers.__version__ < "5.22" and any(LayerStack.of(model).windows):
        pytest.skip("this release cannot roll back drafts from a sliding window, whatever the assistant")
    ids = torch.tensor([PROMPTS[0]])
    settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plan = dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=[3, 5])
    expected = model.generate(ids, **settings)
    draft = dd.draft_model(model, plan)
    assert torch.equal(model.generate(ids, assistant_model=draft, **settings), expected)
    assert torch.equal(model.generate(ids, **settings), expected)  # the model itself is unchanged


def test_what_is_refused() -> None:
    model = tiny_model("llama")
    plan = dd.Plan.constant(LAYERS, 5)
    with pytest.raises(DepthDecayError, match="depth is 99"):
        dd.draft_model(model, plan, depth=99)
    with pytest.raises(DepthDecayError, match="depth is 1"):
        dd.draft_model(model, plan, depth=1)
    with pytest.raises(DepthDecayError, match="layers"):
        dd.draft_model(model, dd.Plan.constant(LAYERS + 1, 5))
