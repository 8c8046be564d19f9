"""Decoding on CUDA: one graph per depth, layers compiled once per kind, no waiting for the device within a step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .cache import OneLayer, PlannedCache, bucket_for
from .decoding import EagerDecoder, Prompt
from .plan import Plan
from .stack import Stack, replaced


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    layers_executed: int


def inductor_options() -> dict[str, Any]:
    """How layers are compiled: our own kernel for products with one row, and kernels that overlap their ends."""
    from .gemv import GemvPass

    overlap = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"post_grad_custom_pre_pass": GemvPass(overlap), "triton.enable_pdl": overlap}


@dataclass
class CompiledLayers:
    """One torch.compile per kind of layer, shared by all layers of the kind: weights and cache are inputs."""

    kinds: dict[tuple[type, int | None], Any] = field(default_factory=dict)

    def runner(self, stack: Stack, cache: PlannedCache) -> Any:
        views = [OneLayer(layer) for layer in cache.planned]

        def run_layer(index: int, layer: Any, _forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kind = (type(layer), stack.windows[index])
            if kind not in self.kinds:
                self.kinds[kind] = torch.compile(type(layer).forward, options=inductor_options())
            if "past_key_values" in kwargs:
                kwargs = {**kwargs, "past_key_values": views[index]}
            else:
                args = tuple(views[index] if arg is cache else arg for arg in args)
            return self.kinds[kind](layer, *args, **kwargs)

        return run_layer


class GraphDecoder(EagerDecoder):
    """Decoding as CUDA graphs, one per depth and bucket of positions, captured when first needed.

    A graph advances token and position by itself, so the host replays graphs without ever waiting for the device.
    Where a model cannot be captured (a layer that synchronises), decoding goes on eagerly, and a warning says so.
    """

    feeds_itself = True

    def __init__(
        self, stack: Stack, plan: Plan, cache: PlannedCache, new_tokens: int, compiled: CompiledLayers | None
    ) -> None:
        super().__init__(stack, plan, cache, new_tokens)
        self.compiled = compiled
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.pool: Any = None
        self.position: torch.Tensor | None = None

    def prefill(self, prompt: Prompt) -> int:
        self.layer_pass.run_layer = None
        executed = super().prefill(prompt)
        if self.position is None:
            # Tensors that graphs have captured must stay where they are, so they are made once and then refilled.
            batch, device = prompt.ids.shape[0], prompt.ids.device
            capacity = max(layer.room for layer in self.cache.planned)
            self.position = torch.zeros(1, dtype=torch.long, device=device)
            self.static_tokens = torch.zeros((batch, 1), dtype=torch.long, device=device)
            self.static_position_ids = torch.zeros((batch, 1), dtype=torch.long, device=device)
            self.static_padding = torch.ones((batch, capacity), dtype=torch.bool, device=device)
            self.static_logits = torch.empty_like(self.logits)
            self.has_padding = prompt.mask is not None
        self.position.fill_(prompt.length)
        self.static_position_ids.copy_(prompt.position_ids[:, -1:] + 1)
        if prompt.mask is not None:
            self.static_padding.fill_(True)
            self.static_padding[:, : prompt.length] = prompt.mask.bool()
        self.static_logits.copy_(self.logits)
        self.tokens, self.logits = self.static_tokens, self.static_logits
        return executed

    def step(self, index: int) -> int:
        graph = self.prepare(index)
        if graph is None:
            return super().step(index)
        graph.graph.replay()
        self.cache.clock.filled += 1
        return graph.layers_executed

    def prepare(self, index: int) -> _Graph | None:
        """The graph of T_index's pass, captured now if this depth has not been met at this length of text."""
        if not self.feeds_itself:
            return None
        key = self.plan.depth(index), bucket_for(self.cache.clock.filled + 1)
        if key not in self.graphs:
            graph = self._capture_or_explain(*key)
            if graph is None:
                self.feeds_itself = False
                self.position_ids = self.static_position_ids - 1  # eager steps count on from here
                return None
            self.graphs[key] = graph
        return self.graphs[key]

    def _capture_or_explain(self, depth: int, bucket: int) -> _Graph | None:
        tokens = self.static_tokens.clone()
        try:
            return self._capture(depth, bucket)
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            if self.compiled is None:
                warnings.warn(f"this model cannot run as CUDA graphs and runs eagerly: {reason}", stacklevel=2)
                return None
            warnings.warn(f"layers could not be compiled and run as they are: {reason}", stacklevel=2)
            self.compiled = None
            return self._capture_or_explain(depth, bucket)
        finally:
            self.static_tokens.copy_(tokens)

    def _capture(self, depth: int, bucket: int) -> _Graph:
        self.layer_pass.dropped = frozenset(self.plan.dropped(depth))
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with self._decoding_layout(bucket), torch.cuda.stream(side):
            if self.pool is None or self.compiled is not None:
                # Lazy initialisation (and compilation) must not happen inside a capture. Passing writes only where the
                # real step will write again.
                self._pass(bucket)
            self.layer_pass.layers_executed = 0
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            side.synchronize()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self._pass(bucket)
                assert self.position is not None
                self.position += 1
                self.static_position_ids += 1
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return _Graph(graph, self.layer_pass.layers_executed)

    def _pass(self, bucket: int) -> None:
        padding = self.static_padding[:, :bucket] if self.has_padding else None
        logits = self.run_model(self.static_tokens, self.static_position_ids, padding)
        self.static_logits.copy_(logits)
        # Greedy decoding feeds itself; a sampler overwrites this before the next replay.
        self.static_tokens.copy_(logits.argmax(dim=-1, keepdim=True))

    @contextlib.contextmanager
    def _decoding_layout(self, bucket: int) -> Iterator[None]:
        """How passes are traced: by the device's clock and, to share one compilation, with one layer index for all."""
        self.cache.on_device(self.position, bucket)
        try:
            with contextlib.ExitStack() as undo:
                optimise = getattr(self.stack.model, "_optimize_model_for_decode", None)
                if optimise is not None:
                    undo.enter_context(optimise())
                if self.compiled is not None:
                    for layer in self.stack.layers:
                        for module in layer.modules():
                            if isinstance(getattr(module, "layer_idx", None), int):
                                undo.enter_context(replaced(module, "layer_idx", 0))
                    # Batch sizes, kinds of layer and lengths each count as a recompilation of the same function.
                    undo.enter_context(torch._dynamo.config.patch(recompile_limit=64))
                    self.layer_pass.run_layer = self.compiled.runner(self.stack, self.cache)
                yield
        finally:
            self.layer_pass.run_layer = None
            self.cache.on_device(None)
