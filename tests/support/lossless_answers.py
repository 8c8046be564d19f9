"""Lossless answers for tests, and an engine whose drafts are all accepted."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import LAYERS, tiny_model

import depthdecay as dd


def token_ids(engine: dd.Engine, mode: str, prompts: list[list[int]], tokens: int, **settings: Any) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, tokens, mode=mode, **settings)]


def perfect_engine() -> dd.Engine:
    """Its shallow pass equals the full one, since layer 3 does nothing."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight.zero_()
        model.model.layers[3].mlp.down_proj.weight.zero_()
    return dd.Engine(model, plan=dd.Plan.constant(LAYERS, LAYERS - 1, drop_order=[3]))
