"""Random weights in the shapes of real models: valid for speed, useless for text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from depthdecay.errors import ArgumentError
from depthdecay.model.devices import choose_device, choose_dtype
from depthdecay.model.load import as_loaded
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.plan.file import EMBEDDED_MODEL

_SIZES = (
    *("model_type", "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, *sizes in (
        ("llama-2-7b", "llama", 32000, 4096, 4096, 11008, 32, 32, 32, False),
        ("llama-2-13b", "llama", 32000, 4096, 5120, 13824, 40, 40, 40, False),
        ("llama-2-70b", "llama", 32000, 4096, 8192, 28672, 80, 64, 8, False),
        ("qwen2.5-1.5b", "qwen2", 151936, 32768, 1536, 8960, 28, 12, 2, True),
        ("tiny", "llama", 512, 512, 64, 128, 8, 4, 2, False),
    )
}


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model in a real model's shape with random weights, created directly on the device."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    check_shape(shape)
    settings = dict(SHAPES[shape])
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    return model.to(dtype).eval()


def check_shape(shape: str) -> None:
    if shape not in SHAPES:
        raise ArgumentError(f"unknown shape '{shape}'; known are {', '.join(SHAPES)}", "shape")


def check_source(model: object, shape: str | None) -> None:
    """A benchmark takes one model: a real one, or a shape."""
    if shape is None:
        return
    if model is not None:
        raise ArgumentError("shape and model were given together; give one of them", "shape", "model")
    check_shape(shape)


def load_model_or_shape(
    model: str | LoadedModel | None,
    shape: str | None,
    device: str | None,
    dtype: str | torch.dtype | None,
    say: Callable[[str], None],
) -> LoadedModel:
    """The model, by default the embedded one; or random weights, by default in bfloat16 on a GPU, else in float32."""
    if shape is None:
        return as_loaded(EMBEDDED_MODEL if model is None else model, device=device, dtype=dtype, progress=say)
    place = choose_device(device)
    number_type = choose_dtype(dtype) or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    say(f"creating {shape} with random weights")
    return LoadedModel(random_model(shape, place, number_type), None, shape, "random")
