"""A model's identity is stable across dtypes, rounding and wrappers, and differs for other weights."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from depthdecay.plan.fingerprint import SAMPLES
from depthdecay.plan.identity import ModelIdentity, identity


def llama(seed: int = 0, **changes: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **{**shape, **changes})).eval()


def round_to_four_bits(model: torch.nn.Module) -> torch.nn.Module:
    """Blocks of 32 with a scale each, as in 4-bit formats."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in rounded.parameters():
            if tensor.ndim == 2:
                blocks = tensor.reshape(-1, 32)
                scale = blocks.abs().amax(dim=1, keepdim=True) / 7
                tensor.copy_((torch.round(blocks / scale) * scale).reshape(tensor.shape))
    return rounded


def test_shape_and_name() -> None:
    found = identity(llama(), name="mine")
    assert (found.architecture, found.num_layers, found.hidden_size) == ("LlamaForCausalLM", 4, 64)
    assert (found.num_attention_heads, found.vocab_size, found.name) == (4, 256, "mine")


def test_fingerprint_samples_embedding_attention_mlp_and_norms() -> None:
    fingerprint = identity(llama()).fingerprint
    assert fingerprint is not None
    assert all(len(sample) == SAMPLES for sample in fingerprint.values())
    assert "model.embed_tokens.weight" in fingerprint
    for layer in (0, 2, 3):
        names = [name for name in fingerprint if name.startswith(f"model.layers.{layer}.")]
        assert any("self_attn" in name for name in names)
        assert any("mlp" in name for name in names)
        assert any("norm" in name for name in names)


def test_samples_do_not_fall_into_one_column() -> None:
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.arange(64.0).expand(256, 64))
    fingerprint = identity(model).fingerprint
    assert fingerprint is not None
    assert len(set(fingerprint["model.embed_tokens.weight"])) > 30


def test_round_trip() -> None:
    found = identity(llama(), name="mine")
    assert ModelIdentity.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_the_same_weights(dtype: torch.dtype) -> None:
    model = llama()
    assert identity(model).same_weights(identity(copy.deepcopy(model).to(dtype))) is True


def test_four_bit_rounding_is_the_same_weights() -> None:
    model = llama()
    assert identity(model).same_weights(identity(round_to_four_bits(model))) is True


def test_another_seed_is_other_weights() -> None:
    assert identity(llama(0)).same_weights(identity(llama(1))) is False


def test_packed_tensors_are_left_out() -> None:
    model = llama()
    packed = copy.deepcopy(model)
    for layer in packed.model.layers:
        weight = torch.zeros(layer.self_attn.k_proj.weight.numel() // 2, 1, dtype=torch.uint8)
        layer.self_attn.k_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    found = identity(packed)
    assert found.fingerprint is not None
    assert not any("k_proj" in name for name in found.fingerprint)
    assert identity(model).same_weights(found) is True


def test_peft_model_has_the_identity_of_its_base() -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    plain = identity(model)
    targets = ["q_proj", "k_proj", "down_proj", "gate_proj", "embed_tokens"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    assert identity(wrapped) == plain


def test_other_families() -> None:
    gpt2 = identity(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, n_positions=32)))
    assert (gpt2.num_layers, gpt2.hidden_size, gpt2.num_attention_heads) == (3, 32, 4)
    assert gpt2.fingerprint is not None
    assert {"transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"} <= gpt2.fingerprint.keys()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    mixtral = identity(MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=2, **shape)))
    assert mixtral.fingerprint is not None
    assert any("experts" in name or "gate" in name for name in mixtral.fingerprint)
