"""Tiny models whose random text is readable: they output ASCII."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from saved_model import BYTES, SPECIAL, save_tiny_chat_model

import depthdecay as dd
from depthdecay.model.loaded_model import LoadedModel


def plain_spoken(folder: Path, **settings: Any) -> LoadedModel:
    """A tiny model that outputs ASCII bytes, mostly letters; arbitrary random bytes would not be valid text."""
    path = save_tiny_chat_model(folder, **settings)
    loaded = dd.load(path, device="cpu")
    spoken = torch.zeros(len(SPECIAL) + len(BYTES), 1)
    spoken[[len(SPECIAL) + place for place, byte in enumerate(BYTES) if byte.isascii()]] = 1.0
    with torch.no_grad():
        loaded.model.lm_head.weight *= spoken
    loaded.model.save_pretrained(path)
    return loaded
