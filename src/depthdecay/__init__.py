"""Depth-decay decoding for any Hugging Face causal language model: later tokens run through fewer layers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .apply import applied as applied
    from .assistant import draft_model as draft_model
    from .engine import Engine as Engine
    from .engine import Result as Result
    from .errors import DepthDecayError as DepthDecayError
    from .ladder import Ladder as Ladder
    from .models import load as load
    from .plan import Plan as Plan

__version__ = "0.1.0"

# Loaded when first asked for: plans are made and read without importing torch.
_EXPORTS = {
    "DepthDecayError": "errors",
    "Engine": "engine",
    "Ladder": "ladder",
    "Plan": "plan",
    "Result": "engine",
    "applied": "apply",
    "draft_model": "assistant",
    "load": "models",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'depthdecay' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
