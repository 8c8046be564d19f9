"""Which models are accepted as a stack of layers, and which are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import decoder_layers
from tiny_models import LAYERS, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, BertModel, T5Config

from depthdecay.errors import DepthDecayError, UnsupportedModelError
from depthdecay.model.layers import LayerPass, LayerStack
from depthdecay.patches import replaced


def test_layers_are_found(architecture: str) -> None:
    model = tiny_model(architecture)
    stack = LayerStack.of(model)
    assert list(stack.layers) == list(decoder_layers(model))
    assert stack.num_layers == LAYERS


def test_windows_are_known() -> None:
    assert LayerStack.of(tiny_model("llama")).windows == (None,) * LAYERS
    assert LayerStack.of(tiny_model("mistral")).windows == (7,) * LAYERS
    assert LayerStack.of(tiny_model("gemma3_text")).windows == (7, None) * 4
    assert LayerStack.of(tiny_model("qwen2")).windows == (None,) * 3 + (7,) * 5


def recurrent(model_type: str, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_config(tiny_config(model_type, **settings))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: AutoModelForSeq2SeqLM.from_config(T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2)),
            "decoder",
        ),
        (lambda: BertModel(BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)), "generate"),
        (lambda: recurrent("mamba", state_size=4), "layer|state|attention"),
        (
            lambda: recurrent("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]),
            "conv",
        ),
        (lambda: torch.nn.Linear(2, 2), "transformers"),
    ],
    ids=["encoder-decoder", "no language model", "state-space", "convolution", "no transformers model"],
)
def test_others_are_refused(build: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        LayerStack.of(build())
    assert "\n" not in str(caught.value)


def test_shared_keys_and_values_are_refused() -> None:
    model = tiny_model("gemma3_text")
    model.config.num_kv_shared_layers = 2
    with pytest.raises(UnsupportedModelError, match="shares keys and values"):
        LayerStack.of(model)


def test_executed_layers_are_counted_where_they_run() -> None:
    model = tiny_model()
    stack = LayerStack.of(model)
    with torch.no_grad(), stack.routed(LayerPass(dropped=frozenset({2, 5}))) as layer_pass:
        model(torch.tensor([[5, 6]]))
        assert layer_pass.layers_executed == LAYERS - 2
        layer_pass.dropped = frozenset()
        model(torch.tensor([[5, 6]]))
    assert layer_pass.layers_executed == 2 * LAYERS - 2


def test_layer_bytes_count_the_experts_that_a_token_reads() -> None:
    dense = LayerStack.of(tiny_model("llama")).layer_bytes()
    expected = sum(p.numel() * 4 for p in tiny_model("llama").model.layers[0].parameters())
    assert dense == (expected,) * LAYERS
    model = tiny_model("mixtral")
    experts = model.model.layers[0].mlp.experts
    expert_bytes = sum(p.numel() * 4 for p in experts.parameters())
    whole = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    assert LayerStack.of(model).layer_bytes()[0] == whole - expert_bytes // 2  # 2 of 4 experts


def test_replaced_restores_absence_and_presence() -> None:
    class Thing:
        pass

    thing = Thing()
    with replaced(thing, "a", 1):
        assert thing.a == 1  # type: ignore[attr-defined]
    assert "a" not in thing.__dict__
    thing.__dict__["a"] = 0
    with pytest.raises(ZeroDivisionError), replaced(thing, "a", 1):
        _ = 1 / 0
    assert thing.__dict__["a"] == 0


def test_a_model_that_was_left_with_fewer_layers_is_refused() -> None:
    model = tiny_model()
    stack, ids = LayerStack.of(model), torch.tensor([[1, 2, 3]])
    model.config.num_hidden_layers -= 1  # as transformers' early exit leaves it when it fails
    with pytest.raises(DepthDecayError, match=f"now says {LAYERS - 1} layers, but {LAYERS}"):
        stack.run(LayerPass(), ids, None, None, torch.arange(3).unsqueeze(0))
    model.config.num_hidden_layers += 1
    assert stack.run(LayerPass(), ids, None, None, torch.arange(3).unsqueeze(0)).shape[:2] == (1, 1)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", True),
        ("qwen3", True),
        ("gpt_neox", True),
        ("mistral", True),
        ("gemma2", True),
        ("gemma3_text", True),
        ("gpt2", False),
        ("opt", False),
    ],
)
def test_whole_masks_go_to_models_that_take_them(architecture: str, expected: bool) -> None:
    model = tiny_model(architecture)
    stack = LayerStack.of(model)
    assert stack.takes_whole_masks == expected
    model.set_attn_implementation("eager")  # adds masks to scores, and is replaced only where scores are capped
    assert stack.takes_whole_masks == stack.caps_scores == (architecture == "gemma2")
