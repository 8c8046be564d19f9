"""Tiny random models of every supported architecture."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

VOCABULARY = 97
LAYERS = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# model_type -> what differs from the common configuration. Windows are shorter than the texts of the tests.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 7},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": {
        "n_embd": 32,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 256,
        "hidden_size": None,
        "intermediate_size": None,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "max_position_embeddings": None,
    },
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "intermediate_size": None, "num_key_value_heads": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def tiny_config(architecture: str, **changes: Any) -> Any:
    settings = {**_COMMON, **ARCHITECTURES.get(architecture, {}), **changes}
    keep_none = {"sliding_window"}
    settings = {name: value for name, value in settings.items() if value is not None or name in keep_none}
    return CONFIG_MAPPING[architecture](**settings)


def tiny_model(architecture: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model whose greedy text varies: the weights' variance is large enough that layers matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                # Gemma multiplies embeddings by the root of the hidden size; a large variance would drown the layers.
                wide = 0.1 if "gemma" in architecture else 0.6
                parameter.normal_(0, wide if "embed" in name or "wte" in name else 0.25)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


PROMPTS = [[5, 17, 33, 8, 61, 12, 40, 3, 77, 21, 9], [44, 6, 90], [13, 28, 28, 55, 70, 31, 2 + 64]]
