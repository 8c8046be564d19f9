"""transformers' own answers, and plans that drop the first and the last layers too."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import LAYERS

import depthdecay as dd


def generate(model: Any, prompts: list[list[int]], new_tokens: int, **kwargs: Any) -> list[list[int]]:
    """transformers' own answer, left-padded."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    kwargs = {"do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **kwargs)[:, length:].tolist()


def tokens(results: list[dd.Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


# Orders that drop the first and the last layers too: then the layer whose cache sizes the masks stops growing.
ORDERS = {"middle-out": None, "first-layers-too": (0, 5, 1, 6, 3), "last-layers-too": (7, 2, 6, 0)}


def plan_with(order: tuple[int, ...] | None, alpha: float = 0.97) -> dd.Plan:
    return dd.Plan.decay(LAYERS, alpha, drop_order=order)
