"""Experts with our own kernel, without a GPU: the same answers wherever transformers' experts are supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from depthdecay.cuda import experts
from depthdecay.cuda.compiled_layers import free_rows, inductor_options
from depthdecay.cuda.kernels import expert_products
from depthdecay.model.layers import LayerStack

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}


def mixtral(**more: Any) -> Any:
    return tiny_model("mixtral", **{**SHAPE, **more})


@pytest.mark.parametrize("each", [False, True])
def test_products_without_a_gpu_are_those_of_the_chosen_experts(each: bool) -> None:
    torch.manual_seed(0)
    chosen = torch.tensor([[0, 3], [2, 0], [1, 2]])
    x, weights = torch.randn(6 if each else 3, 256), torch.randn(4, 64, 256)
    got = expert_products.expert_products(x, chosen, weights, each, False).sum(0).view(3, 2, 64)
    for token, ids in enumerate(chosen.tolist()):
        for place, expert in enumerate(ids):
            vector = x[2 * token + place] if each else x[token]
            assert torch.allclose(got[token, place], weights[expert] @ vector, atol=1e-4)
    torch.library.opcheck(expert_products.expert_products, (x, chosen, weights, each, False))


def test_experts_apart_say_the_same_and_leave_no_trace() -> None:
    model = mixtral()
    ids = torch.arange(3, 10).unsqueeze(0)
    config = model.config
    calls: list[int] = []
    forward = experts._apart()
    with torch.no_grad():
        expected, before = model(ids).logits, dict(config.__dict__)
        with experts.experts_apart(LayerStack.of(model)), pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                experts_interface()._global_mapping,
                "depthdecay",
                lambda module, *args: (calls.append(1), forward(module, *args))[1],
            )
            said = model(ids).logits
        after = model(ids).logits
    assert len(calls) == config.num_hidden_layers
    assert torch.allclose(said, expected, atol=1e-4)
    assert torch.equal(after, expected)
    assert config.__dict__ == before


def experts_interface() -> Any:
    from transformers.integrations.moe import ExpertsInterface

    return ExpertsInterface


def test_compiled_experts_take_any_number_of_tokens() -> None:
    stack = LayerStack.of(mixtral())
    block: Any = stack.layers[0].mlp
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(type(block).forward, options=inductor_options("any"))
    with torch.no_grad(), experts.experts_apart(stack):
        for tokens in (5, 2, 20):
            hidden = torch.randn(1, tokens, 256)
            expected = block(hidden)
            free_rows(hidden, "any")
            assert torch.allclose(compiled(block, hidden), expected, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"intermediate_size": 272}, False),
        ({"hidden_size": 288}, False),  # not a multiple of the kernel's block of columns
    ],
)
def test_which_experts_the_kernel_takes(changes: dict[str, int], plain: bool) -> None:
    (found,) = {experts.are_plain(layer.mlp.experts) for layer in mixtral(**changes).model.layers}
    assert found is plain


@pytest.mark.parametrize("name", ["has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel"])
def test_experts_of_another_form_run_as_they_are(name: str) -> None:
    model = mixtral()
    setattr(model.model.layers[1].mlp.experts, name, True)
    before = model.config._experts_implementation
    with experts.experts_apart(LayerStack.of(model)):
        assert model.config._experts_implementation == before
