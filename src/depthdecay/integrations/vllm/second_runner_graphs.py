"""CUDA graphs by depth for vLLM's second model runner: one more of its graph managers for each kind of pass.

At full depth vLLM's own graphs run, compiled as stock's are. The runner looks for a graph before it prepares a step,
and replays it afterwards: `find` and `replay` replace these two methods of its manager.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import GraphCaptureContext, graph_capture
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from depthdecay.integrations.vllm.depth_graphs import DepthGraphs, takes_any_batch
from depthdecay.integrations.vllm.depth_passes import PassKind
from depthdecay.integrations.vllm.kernels import FusedKernels
from depthdecay.integrations.vllm.layer_rows import Step
from depthdecay.integrations.vllm.settings import CAPTURE_SIZES
from depthdecay.patches import patched

logger = init_logger("vllm.depthdecay")


class SecondRunnerGraphs:
    """`own` is vLLM's manager. Decode batches have a manager for each kind of pass, and mixed batches one for all."""

    def __init__(self, runner: Any, make_manager: Callable[[CUDAGraphMode], Any]) -> None:
        model = runner.get_model()
        kernels = FusedKernels(model, runner.vllm_config)
        self.graphs = DepthGraphs(model, runner.max_num_tokens, runner.device, lambda run: run, kernels)
        self.model = model
        self.own = runner.cudagraph_manager
        self.decode_query_len = runner.decode_query_len
        self._find, self._replay, self._capture = self.own.dispatch, self.own.run_fullgraph, self.own.capture
        self.managers = {kind: make_manager(CUDAGraphMode.FULL_DECODE_ONLY) for kind in self.graphs.passes}
        # Ranks of data parallelism agree on one kind of graph, which knows nothing of depths.
        mixed = runner.dp_size == 1 and takes_any_batch(runner)
        self.mixed = make_manager(CUDAGraphMode.FULL) if mixed else None
        self.mixed_kind = PassKind(self.graphs.num_layers, masked=True)
        self.capturing_mixed = False
        # Of the step that is about to run: first whether a row of it is decayed, then all of it.
        self.is_decayed: Callable[[], bool] = lambda: False
        self.step: Step | None = None

    def capture(self, model: Any, *settings: Any, **named: Any) -> None:
        """vLLM's own graphs, then ours with the same inputs."""
        self.model.in_dummy_run = True
        try:
            self._capture(model, *settings, **named)
            with one_stream(self.graphs.row_depths.device):
                self._capture_ours(*settings, **named)
        finally:
            self.model.in_dummy_run = self.capturing_mixed = False

    def _capture_ours(self, *settings: Any, **named: Any) -> None:
        for kind, manager in self.managers.items():
            self._capture_kind(kind, manager, *settings, **named)
        if self.mixed is not None:
            self.capturing_mixed = True
            self._capture_kind(self.mixed_kind, self.mixed, *settings, **named)

    def _capture_kind(self, kind: PassKind, manager: Any, *settings: Any, **named: Any) -> None:
        if manager is not self.mixed:
            # One output buffer for all of them, since one graph runs at a time; mixed batches may be larger.
            manager.hidden_states = self.own.hidden_states
            manager.intermediate_tensors = self.own.intermediate_tensors
        # Dummy rows are as deep as the pass.
        self.graphs.row_depths.fill_(kind.depth)
        masked = "masked" if kind.masked else "even"
        named["progress_bar_desc"] = f"Capturing CUDA graphs for depth {kind.depth}, {masked}"
        manager.capture(self.graphs.passes[kind], *settings, **named)

    def find(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *more: Any, **named: Any) -> Any:
        """At full depth vLLM's choice. With decayed rows the size of one of our graphs, or none."""
        found = self._find(num_reqs, num_tokens, uniform_token_count, *more, **named)
        if not self.is_decayed():
            return found
        decoding = uniform_token_count == self.decode_query_len
        manager = next(iter(self.managers.values())) if decoding else self.mixed
        if manager is not None:
            ours = manager.dispatch(num_reqs, num_tokens, uniform_token_count if decoding else None, *more, **named)
            if ours.cg_mode == CUDAGraphMode.FULL:
                return ours
        if found.cg_mode != CUDAGraphMode.FULL:
            return found
        return replace(
            found, cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs, uniform_token_count=None
        )

    def prepare(self, step: Step, padded: int) -> Callable[..., Any] | None:
        """Before a step: write the depths of its rows where graphs read them. Returns its pass, None at full depth."""
        self.step = step
        if step.is_full:
            return None
        # Also where all rows are equally deep: a graph for mixed batches has masks anyway.
        self.graphs.write_depths(step.depths, padded)
        return self.graphs.passes[self.graphs.kind_of(step)]

    def replay(self, desc: Any) -> Any:
        step, self.step = self.step, None
        assert step is not None
        if step.is_full:
            self.graphs.count("full depth, replayed", step)
            return self._replay(desc)
        self.graphs.count("decayed, replayed", step)
        manager = self.managers[self.graphs.kind_of(step)]
        if desc not in manager.graphs:
            assert self.mixed is not None, desc
            manager = self.mixed
        return manager.run_fullgraph(desc)

    def count_without(self, step: Step) -> None:
        """A step that no full graph runs. At full depth vLLM may still replay its pieces."""
        self.step = None
        if step.is_full:
            in_pieces = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
            self.graphs.count("full depth, in pieces" if in_pieces else "full depth, no graph", step)
            return
        self.graphs.count("decayed, no graph", step)
        logger.warning_once(
            "no CUDA graph was captured for %s rows of which some are decayed, so this step and others like it run "
            "eagerly; a larger size in cudagraph_capture_sizes may capture it",
            len(step.depths),
        )


@contextmanager
def one_stream(device: torch.device) -> Iterator[None]:
    """Capture on one stream: each manager would make its own, and cuBLAS keeps 32 MiB for every one it has run on."""
    if device.type != "cuda":
        yield
        return
    shared = GraphCaptureContext(torch.cuda.Stream(device=device))
    with patched(cudagraph_utils, "graph_capture", lambda device: graph_capture(device, shared)):
        yield


def depth_sizes(sizes: Sequence[int], max_requests: int) -> list[int]:
    """The batch sizes of graphs by depth: few where vLLM has many, since each is captured for all depths."""
    if len(sizes) <= len(CAPTURE_SIZES):
        return sorted(sizes)
    # Both ends are vLLM's own: its largest decode batch sizes the buffer that decode graphs share.
    largest, decoding = max(sizes), max(size for size in sizes if size <= max_requests)
    return sorted({size for size in CAPTURE_SIZES if size <= largest} | {largest, decoding})


def install_second_runner_graphs(runner: Any) -> SecondRunnerGraphs | None:
    """After the runner has made its manager, and before it captures; None where it captures no full graphs."""
    own = runner.cudagraph_manager
    if own is None or own.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        return None

    def make_manager(mode: CUDAGraphMode) -> Any:
        manager = ModelCudaGraphManager(
            runner.vllm_config, runner.device, mode, decode_query_len=runner.decode_query_len
        )
        # The same manager for fewer sizes, which it reads when it is made.
        manager.compilation_config = copy.copy(manager.compilation_config)
        manager.compilation_config.cudagraph_capture_sizes = sizes
        manager._candidates, manager._capture_descs = {}, {}
        manager._init_candidates()
        return manager

    sizes = depth_sizes(own.compilation_config.cudagraph_capture_sizes, own.max_num_reqs)
    graphs = SecondRunnerGraphs(runner, make_manager)
    own.capture, own.dispatch, own.run_fullgraph = graphs.capture, graphs.find, graphs.replay
    execute = runner.execute_model

    def with_depths(scheduler_output: Any, *more: Any, **named: Any) -> Any:
        is_dummy = bool(named.get("dummy_run"))
        graphs.is_decayed = lambda: not is_dummy and runner.model_state.any_decayed(scheduler_output)
        return execute(scheduler_output, *more, **named)

    runner.execute_model = with_depths
    runner.model_state.depth_graphs = graphs
    return graphs
