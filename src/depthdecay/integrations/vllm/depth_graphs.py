"""CUDA graphs by depth for vLLM's first model runner: its own wrapper and capture, once per kind of pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from depthdecay.integrations.vllm.depth_passes import DepthPass, Kernels, PassKind
from depthdecay.integrations.vllm.layer_rows import Step
from depthdecay.integrations.vllm.settings import ServerDepth
from depthdecay.model.repairs import reached_depths

logger = init_logger("vllm.depthdecay")

Wrap = Callable[[DepthPass], Callable[..., Any]]


class DepthGraphs:
    """One of vLLM's graph wrappers per kind of pass, with a graph per batch size.

    A step takes the smallest captured depth that all its rows fit into. Shallower rows are masked.
    """

    def __init__(
        self, model: Any, max_tokens: int, device: torch.device, wrap: Wrap, kernels: Kernels = nullcontext
    ) -> None:
        self.num_layers: int = model.depth.plan.num_layers
        self.depths = captured_depths(model.depth)
        self.row_depths = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.passes = {kind: wrap(DepthPass(model, kind, self.row_depths, kernels)) for kind in self._kinds()}
        self.captured: set[tuple[PassKind, Any]] = set()
        self.steps: Counter[str] = Counter()
        self.last_step: str | None = None
        self.last_tokens = 0

    def _kinds(self) -> Iterator[PassKind]:
        for depth in self.depths:
            yield PassKind(depth, masked=True)
            # At full depth without masks, vLLM's own graph runs.
            if depth < self.num_layers:
                yield PassKind(depth, masked=False)

    def kinds_for(self, uniform: bool) -> list[PassKind]:
        """Batches with prompts have rows at full depth, so they need only that one."""
        return [kind for kind in self.passes if uniform or kind.depth == self.num_layers]

    def kind_of(self, step: Step) -> PassKind:
        depth = min(depth for depth in self.depths if depth >= step.reached[-1])
        return PassKind(depth, masked=step.reached[0] < depth)

    def choose(self, step: Step) -> Callable[..., Any] | None:
        """The pass for this step; None for vLLM's own, at full depth.

        Also without a graph: attention metadata is in buffers that graphs read, so a step has only one set of rows.
        """
        context = get_forward_context()
        in_graph = context.cudagraph_runtime_mode == CUDAGraphMode.FULL
        if step.is_full:
            self.count("full depth, replayed" if in_graph else "full depth, no graph", step)
            return None
        kind = self.kind_of(step)
        if in_graph and (kind, context.batch_descriptor) not in self.captured:
            logger.warning_once(
                "no CUDA graph was captured for %s and %s, so such steps run eagerly", kind, context.batch_descriptor
            )
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            in_graph = False
        if kind.masked:
            padded = context.batch_descriptor.num_tokens if in_graph else len(self.row_depths)
            self.write_depths(step.depths, padded)
        self.count("decayed, replayed" if in_graph else "decayed, no graph", step)
        return self.passes[kind]

    def count(self, kind: str, step: Step) -> None:
        """One more step of this kind, one of `metrics.KINDS`."""
        self.steps[kind] += 1
        self.last_step, self.last_tokens = kind, len(step.depths)

    def write_depths(self, depths: np.ndarray, padded: int) -> None:
        """Rows that only pad the batch are at depth 0: they write nothing."""
        filled = torch.zeros(padded, dtype=torch.int32, pin_memory=self.row_depths.is_cuda)
        filled[: len(depths)] = torch.from_numpy(depths)
        # Without waiting for the step before: pinned memory is not reused until the copy has run.
        self.row_depths[:padded].copy_(filled, non_blocking=True)


def captured_depths(depth: ServerDepth) -> list[int]:
    """At most `graph_depths` of the depths that requests may have, evenly spaced from shallowest to deepest."""
    layers, ladder = depth.plan.num_layers, depth.plan.ladder
    own = set(reached_depths(depth.plan)) - {layers}
    below = sorted(own or range(max(1, ladder.min_layers), layers))
    every = [*below, layers]
    if len(every) <= depth.graph_depths:
        return every
    return sorted({every[round(place)] for place in np.linspace(0, len(every) - 1, max(2, depth.graph_depths))})


def install_depth_graphs(runner: Any) -> DepthGraphs:
    """Capture each kind of pass after vLLM's own graphs, with vLLM's dummy runs."""

    def wrap(function: DepthPass) -> Callable[..., Any]:
        return CUDAGraphWrapper(function, runner.vllm_config, runtime_mode=CUDAGraphMode.FULL)

    graphs = DepthGraphs(runner.get_model(), runner.max_num_tokens, runner.device, wrap)
    capture = runner._capture_cudagraphs

    def capture_all(batch_descriptors: list[Any], cudagraph_runtime_mode: Any, **named: Any) -> None:
        # vLLM expects a list of either decode batches or mixed ones.
        for uniform in (True, False):
            alike = [found for found in batch_descriptors if found.uniform == uniform]
            if not alike:
                continue
            capture(batch_descriptors=alike, cudagraph_runtime_mode=cudagraph_runtime_mode, **named)
            if cudagraph_runtime_mode == CUDAGraphMode.FULL:
                _capture_kinds(runner, graphs, alike, uniform, capture, named)

    runner._capture_cudagraphs = capture_all
    _add_mixed_keys(runner)
    return graphs


def _capture_kinds(
    runner: Any, graphs: DepthGraphs, sizes: list[Any], uniform: bool, capture: Any, named: dict[str, Any]
) -> None:
    own = runner.model
    try:
        for kind in graphs.kinds_for(uniform):
            runner.model = graphs.passes[kind]
            # Dummy rows are as deep as the pass.
            graphs.row_depths.fill_(kind.depth)
            capture(batch_descriptors=sizes, cudagraph_runtime_mode=CUDAGraphMode.FULL, **named)
            graphs.captured |= {(kind, size) for size in sizes}
    finally:
        runner.model = own


def _add_mixed_keys(runner: Any) -> None:
    """Full graphs for mixed batches as well as decode batches, which no mode of vLLM has without its compiler."""
    dispatcher = runner.cudagraph_dispatcher
    initialize = dispatcher.initialize_cudagraph_keys

    def with_mixed(cudagraph_mode: Any, *more: Any, **named: Any) -> None:
        initialize(cudagraph_mode, *more, **named)
        if cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY or not takes_any_batch(runner):
            return
        for size in dispatcher.compilation_config.cudagraph_capture_sizes:
            key = dispatcher._create_padded_batch_descriptor(size, False, False)
            dispatcher.add_cudagraph_key(CUDAGraphMode.FULL, key)

    dispatcher.initialize_cudagraph_keys = with_mixed


def takes_any_batch(runner: Any) -> bool:
    """Whether attention can be captured for batches with prompts, as FlashAttention 3 can."""
    from vllm.v1.attention.backend import AttentionCGSupport

    inner = runner.get_model().model
    backends = {inner.layers[index].self_attn.attn.attn_backend for index in range(inner.start_layer, inner.end_layer)}
    builders = [backend.get_builder_cls() for backend in backends]
    return all(
        builder.get_cudagraph_support(runner.vllm_config, None) == AttentionCGSupport.ALWAYS for builder in builders
    )
