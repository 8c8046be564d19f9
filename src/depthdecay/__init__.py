"""Depth-decay decoding for any Hugging Face causal language model: later tokens run through fewer layers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthdecay.batching.batcher import Batcher as Batcher
    from depthdecay.bench.decoding import benchmark as benchmark
    from depthdecay.calibration.calibrate import calibrate as calibrate
    from depthdecay.engine.engine import Engine as Engine
    from depthdecay.engine.result import Result as Result
    from depthdecay.errors import DepthDecayError as DepthDecayError
    from depthdecay.evaluation.evaluate import evaluate as evaluate
    from depthdecay.integrations.eagle3.export import export as export
    from depthdecay.integrations.transformers.applied import applied as applied
    from depthdecay.integrations.transformers.assistant import draft_model as draft_model
    from depthdecay.model.load import load as load
    from depthdecay.plan.ladder import Ladder as Ladder
    from depthdecay.plan.plan import Plan as Plan
    from depthdecay.self_check import check as check

__version__ = "0.2.0"

# Imported on first use, so that plans can be built and read without importing torch.
_EXPORTS = {
    "Batcher": "batching.batcher",
    "DepthDecayError": "errors",
    "Engine": "engine.engine",
    "Ladder": "plan.ladder",
    "Plan": "plan.plan",
    "Result": "engine.result",
    "applied": "integrations.transformers.applied",
    "benchmark": "bench.decoding",
    "calibrate": "calibration.calibrate",
    "check": "self_check",
    "draft_model": "integrations.transformers.assistant",
    "evaluate": "evaluation.evaluate",
    "export": "integrations.eagle3.export",
    "load": "model.load",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'depthdecay' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"depthdecay.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
