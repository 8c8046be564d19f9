"""Tiny Llama models on disk, and the loader's error for anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from depthdecay.errors import DepthDecayError
from depthdecay.model import load as models

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def save_llama(folder: Path, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **SHAPE, **changes)).eval()
    model.save_pretrained(folder)
    return model


def refusal(given: object, **options: Any) -> str:
    """The one-line error of `load`."""
    with pytest.raises(DepthDecayError) as caught:
        models.load(str(given), **{"device": "cpu", **options})
    message = str(caught.value)
    assert "\n" not in message
    return message
