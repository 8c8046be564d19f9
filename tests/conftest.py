"""Tiny random models of every architecture that we promise, and the embedded real one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from depthdecay.model import gguf_convert
from depthdecay.model import load as models

# Tiny matrices are not worth sharing out, and threads that wait for each other on a busy machine take minutes.
torch.set_num_threads(1)

# The same examples in every run, and no deadlines: neither luck nor a busy machine decides whether a test passes.
# `pytest --hypothesis-profile=default` looks for new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

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
    """A random fp32 model whose greedy text is varied: weights are drawn wide enough that layers matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                # Gemma multiplies embeddings by the root of the hidden size: drawn wide, they would drown the layers.
                wide = 0.1 if "gemma" in architecture else 0.6
                parameter.normal_(0, wide if "embed" in name or "wte" in name else 0.25)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, bos_token_id=1)
    return model


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PROMPTS = [[5, 17, 33, 8, 61, 12, 40, 3, 77, 21, 9], [44, 6, 90], [13, 28, 28, 55, 70, 31, 2 + 64]]


# The embedded model, converted once a test run.


@pytest.fixture(scope="session")
def gguf_file() -> Path:
    return models.embedded_file()


@pytest.fixture(scope="session")
def converted_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that holds the embedded model, so that the slow conversion happens once a test run."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPTHDECAY_CACHE", str(folder))
        models.load(device="cpu")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cache(converted_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPTHDECAY_CACHE", str(converted_cache))
    return converted_cache


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*args: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_convert, "convert", convert)
