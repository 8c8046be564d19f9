"""The Prometheus counter of steps by kind: at full depth or decayed, replayed from a CUDA graph or not.

The worker writes the kind into a field that vLLM carries from it to the API server anyway, `cudagraph_stats`.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

NAME = "depthdecay:engine_steps"
KINDS = {
    "full depth, replayed": ("full", "graph"),
    "full depth, in pieces": ("full", "pieces"),
    "full depth, no graph": ("full", "eager"),
    "decayed, replayed": ("decayed", "graph"),
    "decayed, no graph": ("decayed", "eager"),
}
_DONE = "_counts_depth_decay"


def mark_step(output: Any, kind: str | None, tokens: int) -> None:
    """Write the kind of a step into what the model runner returns for it."""
    from vllm.compilation.cuda_graph import CUDAGraphStat
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if output is None or kind is None:
        return
    if isinstance(output, AsyncModelRunnerOutput):
        # The name of the second runner's output, then of the first one's.
        names = [name for name in ("model_runner_output", "_model_runner_output") if hasattr(output, name)]
        output = getattr(output, names[0])
    output.cudagraph_stats = CUDAGraphStat(tokens, tokens, 0, kind)


def install() -> None:
    """In the API server: count what arrives, next to vLLM's own metrics."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    if getattr(PrometheusStatLogger, _DONE, False):
        return
    record = PrometheusStatLogger.record

    @wraps(record)
    def counted(self: Any, scheduler_stats: Any, *more: Any, **named: Any) -> None:
        stat = getattr(scheduler_stats, "cudagraph_stats", None)
        if stat is not None and stat.runtime_mode in KINDS:
            _counter().labels(*KINDS[stat.runtime_mode]).inc()
        record(self, scheduler_stats, *more, **named)

    PrometheusStatLogger.record = counted
    setattr(PrometheusStatLogger, _DONE, True)


@cache
def _counter() -> Any:
    from prometheus_client import Counter

    return Counter(NAME, "Steps of the engine, by depth and by how they ran.", ["depth", "run"])
