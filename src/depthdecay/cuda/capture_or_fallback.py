"""Captures passes as CUDA graphs on first use, checks them once against plain layers, and falls back on failure.

The fallbacks are all here: layers that cannot be compiled run uncompiled, passes that cannot be captured run eagerly,
and a warning says which and why.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.errors import NotCapturable, one_line
from depthdecay.garbage import collection_paused
from depthdecay.library_internals import clear_cublas_workspaces

# Relative to the norm of the logits: what rounding explains. A layer that uses its index for anything besides the
# cache is far beyond.
_ROUNDING = {torch.float32: 1e-2}
_ROUNDING_16_BITS = 0.15

Found = TypeVar("Found")


def require_alike(said: torch.Tensor, expected: torch.Tensor, whose: str) -> None:
    """Reject logits that differ from those of an eager pass by more than rounding."""
    error = float((said.float() - expected.float()).norm() / expected.float().norm())
    if not error <= _ROUNDING.get(said.dtype, _ROUNDING_16_BITS):
        raise NotCapturable(f"{whose} differ from plain ones by {error:.3g} of the logits' norm")


class Capturer:
    """Captures passes as CUDA graphs, all in one memory pool and on one side stream."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.side_stream: torch.cuda.Stream | None = None

    def capture(self, warm_up: Callable[[], Any], run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """The graph of `run`. Nothing may be initialized or compiled during capture, so `warm_up` runs first."""
        graph = torch.cuda.CUDAGraph()
        if self.side_stream is None:
            self.side_stream = torch.cuda.Stream()  # one for all captures: cuBLAS keeps a workspace per stream
        side = self.side_stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up()
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            side.synchronize()
            # cuBLAS keeps its workspaces outside the pool, and others may free them (transformers' compiled generate
            # does). Cleared, they are reallocated during capture, so the graph owns the memory it writes to.
            clear_cublas_workspaces()
            # Collecting another engine's graphs frees device memory, which CUDA forbids during a capture.
            with collection_paused():
                self._record(graph, run)
            clear_cublas_workspaces()
        torch.cuda.current_stream().wait_stream(side)
        return graph

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Any]) -> None:
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # ending a failed capture raises too, hiding the cause
                graph.capture_end()
            # A failed capture leaves torch's RNG in capture state, and the next draw would fail.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        graph.capture_end()


@dataclass
class Graphs:
    """Graphs by key, and how they are captured: with compiled layers until those fail."""

    compiled: CompiledLayers | None
    whose: str = "this model"
    capturer: Capturer = field(default_factory=Capturer)
    by_key: dict[Any, Any] = field(default_factory=dict)
    compared: set[Any] = field(default_factory=set)  # kinds of passes already checked against plain layers
    can_capture: bool = True

    def capture(self, warm_up: Callable[[], Any], run: Callable[[], Any]) -> Any:
        try:
            return self.capturer.capture(warm_up, run)
        except NotCapturable:
            raise
        except Exception as error:
            raise NotCapturable(one_line(error)) from error

    def attempt(self, run: Callable[[], Found]) -> Found:
        """Run something that may capture: with compiled layers, after a failure with plain ones, then not at all."""
        while self.can_capture:
            try:
                return run()
            except NotCapturable as error:
                self._give_up(error)
        raise NotCapturable(f"{self.whose} cannot run as CUDA graphs")

    def _give_up(self, error: NotCapturable) -> None:
        if self.compiled is not None:
            warnings.warn(f"layers of {self.whose} could not be compiled and run uncompiled: {error}", stacklevel=4)
            self.compiled = None
        else:
            warnings.warn(f"{self.whose} cannot run as CUDA graphs and runs eagerly: {error}", stacklevel=4)
            self.can_capture = False
        self.by_key.clear()
        self.compared.clear()
        self.capturer.pool = None  # it was freed with the last of its graphs
