"""A draft head in EAGLE-3 format: the tensors and the configuration from which vLLM and SGLang build their own.

This is what vLLM 0.26 to 0.32 (`llama_eagle3.py`) and SGLang read. Attention reads the normalized embedding
concatenated with the normalized state. The residual is the state before normalization, as is what one draft passes to
the next. The embedding of token i + 1 is paired with the state of position i. Engines call that position i and we call
it i + 1, which makes no difference to a rotary embedding: only distances matter.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from depthdecay.errors import DepthDecayError, UnsupportedModelError
from depthdecay.model.layers import LayerStack
from depthdecay.speculative.draft_head import DraftHead

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Rotary embeddings whose frequencies do not depend on the text's length, and the fields that all engines read alike.
# `attention_factor` is not among them: engines before vLLM 0.32 ignore it.
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}
_PLAIN_THETA = 10000.0
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# EAGLE-3's names for our tensors.
_NAMES = {
    "fc": "fc",
    "token_norm": "midlayer.input_layernorm",
    "state_norm": "midlayer.hidden_norm",
    "query": "midlayer.self_attn.q_proj",
    "key": "midlayer.self_attn.k_proj",
    "value": "midlayer.self_attn.v_proj",
    "output": "midlayer.self_attn.o_proj",
    "mlp_norm": "midlayer.post_attention_layernorm",
    "gate": "midlayer.mlp.gate_proj",
    "up": "midlayer.mlp.up_proj",
    "down": "midlayer.mlp.down_proj",
    "norm": "norm",
}


def draft_tensors(head: DraftHead, stack: LayerStack) -> dict[str, torch.Tensor]:
    """Tensors by EAGLE-3's names, in the model's precision, without embeddings: engines then share the model's."""
    _refuse_scaled_embeddings(stack)
    rows = _output_rows(head, stack)
    ours = head.state_dict()
    tensors = {f"{theirs}.weight": ours[f"{name}.weight"].to("cpu", rows.dtype) for name, theirs in _NAMES.items()}
    tensors["lm_head.weight"] = rows
    if not _says_every_token(head, stack):  # vLLM does not expect this tensor for a full vocabulary
        tokens = head.vocabulary.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens))
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def draft_config(head: DraftHead, stack: LayerStack) -> dict[str, Any]:
    """config.json. It lists no layers of the model: a portable head reads the ones that engines use by default."""
    shape, target = head.shape, stack.config
    rope = _rope(head, stack)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    ids = {name: getattr(target, name, None) for name in _TOKEN_IDS}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(head.vocabulary),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.neurons,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.epsilon,
        # Explicit, since the model's attention may have a bias, as Qwen2's does, but a head's has none.
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": target.max_position_embeddings,
        # Both in the format of transformers 5 and in that of earlier versions.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "torch_dtype": str(stack.model.dtype).removeprefix("torch."),
        **{name: value for name, value in ids.items() if value is not None},
    }


def _says_every_token(head: DraftHead, stack: LayerStack) -> bool:
    return len(head.vocabulary) == stack.config.vocab_size


def _output_rows(head: DraftHead, stack: LayerStack) -> torch.Tensor:
    """The rows of the model's LM head for the tokens that the draft head can output."""
    matrix, name = stack.model.get_output_embeddings(), type(stack.model).__name__
    if matrix.bias is not None:
        raise UnsupportedModelError(f"{name}'s LM head has a bias, which the EAGLE-3 format does not support")
    weight = matrix.weight.detach()
    if not weight.is_floating_point() or weight.dim() != 2:
        raise UnsupportedModelError(f"{name}'s LM head is quantized; export with the original weights")
    if int(head.vocabulary.max()) >= stack.config.vocab_size:
        raise DepthDecayError(
            f"the plan's drafter outputs token {int(head.vocabulary.max())}, but the model has only "
            f"{stack.config.vocab_size} tokens"
        )
    return weight[head.vocabulary.to(weight.device)].to("cpu", stack.model.dtype)


def _refuse_scaled_embeddings(stack: LayerStack) -> None:
    """Engines share only the embedding matrix, without any scaling that the model's module applies."""
    embedding = stack.model.get_input_embeddings()
    ids = torch.arange(min(16, embedding.weight.shape[0]), device=embedding.weight.device)
    with torch.no_grad():
        plain, given = embedding.weight[ids], embedding(ids)
    if plain.shape != given.shape or not torch.equal(plain, given):
        raise UnsupportedModelError(
            f"{type(stack.model).__name__} scales its embeddings, as Gemma does, and its drafter was fitted on scaled "
            "ones; engines would feed it unscaled ones, so it cannot be exported"
        )


def _rope(head: DraftHead, stack: LayerStack) -> dict[str, Any]:
    """Parameters with which an engine's Llama rotates queries and keys as the head does: the model's, or the defaults.

    A head has the model's frequencies where those rotate whole heads, and default ones otherwise.
    """
    own = getattr(stack.config, "rope_parameters", None) or {}
    kind, theta = own.get("rope_type", "default"), own.get("rope_theta") or _PLAIN_THETA
    positions = stack.config.max_position_embeddings
    told = {"original_max_position_embeddings": positions, **own}
    fields = {name: told[name] for name in _ROPE_FIELDS.get(kind, ()) if told.get(name) is not None}
    # An unknown kind may still start from the default frequencies, which the head then uses.
    own_kind = kind if kind in _ROPE_FIELDS else "default"
    for name, base, more in ((own_kind, theta, fields), ("default", _PLAIN_THETA, {})):
        parameters = {"rope_type": name, "rope_theta": float(base), **more}
        if _turns_alike(parameters, head, positions):
            return parameters
    known = list(_ROPE_FIELDS)
    raise UnsupportedModelError(
        f"the rotary embedding of {type(stack.model).__name__} ({kind}) cannot be exported so that other engines use "
        f"the same angles; supported are {', '.join(known[:-1])} and {known[-1]}, over whole heads"
    )


def _turns_alike(parameters: dict[str, Any], head: DraftHead, positions: int) -> bool:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape, wanted = head.shape, head.frequencies.cpu()
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            head_dim=shape.head_size,
            max_position_embeddings=positions,
            rope_parameters=dict(parameters),
        )
    )
    return (
        rotary.inv_freq.shape == wanted.shape
        and torch.allclose(rotary.inv_freq, wanted, rtol=1e-5, atol=0)
        and math.isclose(rotary.attention_scaling, shape.rotary_scale, rel_tol=1e-5)
    )
