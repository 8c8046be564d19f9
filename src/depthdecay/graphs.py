"""Decoding on CUDA: one graph per depth, layers compiled once per kind, no waiting for the device within a step."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .attention import attention_in_steps
from .cache import OneLayer, PlannedCache, bucket_for
from .decoding import EagerDecoder, Prompt
from .devices import overlaps_kernels
from .errors import one_line
from .overlap import can_wait_first, waiting_first
from .plan import Plan
from .repairs import Repairs, repaired_at_once
from .stack import LayerPass, Stack, patched, replaced


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    layers_executed: int


def inductor_options(few: bool = False) -> dict[str, Any]:
    """How layers are compiled: our own kernels for products with one row, or a few, and kernels that overlap."""
    from .gemv import GemvPass

    overlap = overlaps_kernels()
    return {"post_grad_custom_pre_pass": GemvPass(overlap, few), "triton.enable_pdl": overlap and can_wait_first()}


@dataclass
class CompiledLayers:
    """One torch.compile per kind of layer, shared by all layers of the kind: weights and cache are inputs."""

    kinds: dict[tuple[type, int | None, bool], Any] = field(default_factory=dict)
    functions: dict[Any, Any] = field(default_factory=dict)
    _repaired: Any = None

    def function(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A function of many small steps as a few kernels: in a shallow pass small kernels are a sixth of the time."""
        if plain not in self.functions:
            self.functions[plain] = torch.compile(plain, options=inductor_options())
        compiled: Callable[..., Any] = self.functions[plain]
        return compiled

    @contextlib.contextmanager
    def beside(self, stack: Stack) -> Iterator[None]:
        """While open, what stands beside the layers is compiled too: the last norm, and the rotary embedding."""
        with contextlib.ExitStack() as undo:
            for module in stack.owner.children():
                if type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
                    forward = functools.partial(self.function(type(module).forward), module)
                    undo.enter_context(patched(module, "forward", forward))
            yield

    def repair(self, repair: Any) -> Any:
        """A repair map as one compiled function that all maps share, for each of their few shapes."""
        if self._repaired is None:
            self._repaired = torch.compile(repaired_at_once, dynamic=False, options=inductor_options())
        return lambda hidden: self._repaired(hidden, *repair.parts_at_once)

    def runner(self, stack: Stack, cache: PlannedCache, few: bool = False) -> Any:
        """Runs a layer compiled; `few` where passes have more than one row and never more than 16."""
        views = [OneLayer(layer) for layer in cache.planned]

        def run_layer(index: int, layer: Any, _forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kind = (type(layer), stack.windows[index], few)
            if kind not in self.kinds:
                self.kinds[kind] = torch.compile(type(layer).forward, options=inductor_options(few))
            args, kwargs = one_cache(args, kwargs, cache, views[index])
            return self.kinds[kind](layer, *args, **kwargs)

        return run_layer


def one_cache(args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any, own: Any) -> Any:
    """What a layer is called with, its own part in the place of the whole cache, of which it would use layer 0's."""
    if sum(value is cache for value in (*args, *kwargs.values())) != 1:  # architectures name the argument differently
        raise RuntimeError("a layer does not take the cache as one argument")
    return (
        tuple(own if value is cache else value for value in args),
        {name: own if value is cache else value for name, value in kwargs.items()},
    )


@contextlib.contextmanager
def one_index(layers: Iterable[Any]) -> Iterator[None]:
    """While open, all layers have the same index, so that one compilation serves all."""
    with contextlib.ExitStack() as undo:
        for layer in layers:
            for module in layer.modules():
                if isinstance(getattr(module, "layer_idx", None), int):
                    undo.enter_context(replaced(module, "layer_idx", 0))
        # Batch sizes, kinds of layer and lengths each count as a recompilation of the same function.
        undo.enter_context(torch._dynamo.config.patch(recompile_limit=64))
        yield


class Capturer:
    """Captures passes as CUDA graphs, all in one pool of memory and on one side stream."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.side_stream: torch.cuda.Stream | None = None

    def capture(self, warm_up: Callable[[], None], run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of `run`. Inside it nothing may be initialised or compiled, so `warm_up` goes ahead."""
        graph = torch.cuda.CUDAGraph()
        if self.side_stream is None:
            self.side_stream = torch.cuda.Stream()  # one for all captures: cuBLAS keeps a workspace for every stream
        side = self.side_stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up()
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            side.synchronize()
            # cuBLAS keeps its workspaces outside the pool and others may free them (transformers' compiled generate
            # does). Cleared, they are allocated anew inside the capture, and the graph owns what it writes to.
            torch._C._cuda_clearCublasWorkspaces()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # ending a broken capture fails too, and would hide the reason
                    graph.capture_end()
                raise
            graph.capture_end()
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.current_stream().wait_stream(side)
        return graph


def whole_mask(padding: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Which positions each query sees (batch, 1, queries, positions): those up to its own column, but no padding."""
    places = torch.arange(padding.shape[1], device=padding.device)
    return (places <= columns.unsqueeze(1)) & (padding != 0)[:, None, None, :]


class OnDevice:
    """What decoders have in common whose passes go by a clock on the device."""

    stack: Stack
    cache: PlannedCache
    compiled: CompiledLayers | None
    layer_pass: LayerPass
    position: torch.Tensor | None

    @contextlib.contextmanager
    def _decoding_layout(self, bucket: int) -> Iterator[None]:
        """Passes inside go by the device's clock, over the first `bucket` positions."""
        optimise = getattr(self.stack.model, "_optimize_model_for_decode", contextlib.nullcontext)
        self.cache.on_device(self.position, bucket)
        try:
            with optimise(), attention_in_steps(self.stack.model.config):
                yield
        finally:
            self.cache.on_device(None)

    def _mask(self, padding: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """What the model is given to mask by; from padding alone it makes the rest itself, in a dozen small kernels."""
        if not self.stack.takes_whole_masks:
            return padding
        mask: torch.Tensor = self._as_few_kernels(whole_mask)(padding, columns)
        return mask

    def _as_few_kernels(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Compiled wherever layers are: generated kernels are safe to overlap only if they are made in that place."""
        inside = self.layer_pass.run_layer is not None
        return self.compiled.function(plain) if inside and self.compiled is not None else plain

    @contextlib.contextmanager
    def _shared_layers(self, few: bool = False) -> Iterator[None]:
        """Compiled layers, where asked for: one index for all of them, so that one compilation serves all."""
        if self.compiled is None:
            yield
            return
        with contextlib.ExitStack() as undo:
            undo.enter_context(one_index(self.stack.layers))
            undo.enter_context(waiting_first())
            undo.enter_context(self.compiled.beside(self.stack))
            plain = self.layer_pass.repairs
            self.layer_pass.run_layer = self.compiled.runner(self.stack, self.cache, few)
            self.layer_pass.repairs = {index: self.compiled.repair(repair) for index, repair in plain.items()}
            try:
                yield
            finally:
                self.layer_pass.run_layer = None
                self.layer_pass.repairs = plain


class GraphDecoder(OnDevice, EagerDecoder):
    """Decoding as CUDA graphs, one per depth and bucket of positions, captured when first needed.

    A graph advances token and position by itself, so the host replays graphs without ever waiting for the device.
    Where a model cannot be captured (a layer that synchronises), decoding goes on eagerly, and a warning says so.
    """

    feeds_itself = True

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        cache: PlannedCache,
        new_tokens: int,
        compiled: CompiledLayers | None,
        repairs: Repairs | None = None,
    ) -> None:
        super().__init__(stack, plan, cache, new_tokens, repairs)
        self.compiled = compiled
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.capturer = Capturer()
        self.is_compared = False  # compiled layers have been held against the plain ones
        self.position: torch.Tensor | None = None

    def prefill(self, prompt: Prompt) -> int:
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
        self.position.fill_(prompt.length)
        self.static_position_ids.copy_(prompt.position_ids[:, -1:] + 1)
        # Always given, also where nothing is padded: some models otherwise build one by a length read off the device.
        self.static_padding.fill_(True)
        if prompt.mask is not None:
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
            with self.stack.exclusive():
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
            reason = one_line(error)
            if self.compiled is None:
                warnings.warn(f"this model cannot run as CUDA graphs and runs eagerly: {reason}", stacklevel=2)
                return None
            warnings.warn(f"layers could not be compiled and run as they are: {reason}", stacklevel=2)
            self.compiled = None
            return self._capture_or_explain(depth, bucket)
        finally:
            self.static_tokens.copy_(tokens)

    def _capture(self, depth: int, bucket: int) -> _Graph:
        self.go_to(depth)

        def run() -> None:
            self.layer_pass.layers_executed = 0
            with self._shared_layers():
                self._pass(bucket)
            assert self.position is not None
            self.position += 1
            self.static_position_ids += 1

        with self._decoding_layout(bucket):
            graph = self.capturer.capture(lambda: self._warm_up(bucket), run)
        return _Graph(graph, self.layer_pass.layers_executed)

    def _warm_up(self, bucket: int) -> None:
        """A pass ahead of the capture, inside which nothing may be initialised or compiled.

        It writes only where the real step will write again. The first compiled one is held against the plain layers:
        compiled layers all have the same index, and one that used its index for more than the cache would be wrong
        without a word.
        """
        if self.compiled is None:
            if self.capturer.pool is None:
                self._pass(bucket)
            return
        tokens = self.static_tokens.clone()
        expected = None
        if not self.is_compared:
            self._pass(bucket)
            expected = self.static_logits.clone().float()
            self.static_tokens.copy_(tokens)
        with self._shared_layers():
            self._pass(bucket)
        self.static_tokens.copy_(tokens)
        if expected is not None:
            error = float((self.static_logits.float() - expected).norm() / expected.norm())
            if not error <= (1e-2 if self.static_logits.dtype == torch.float32 else 0.15):
                raise RuntimeError(f"compiled layers differ from the plain ones by {error:.3g} of the logits")
            self.is_compared = True

    def _pass(self, bucket: int) -> None:
        assert self.position is not None
        mask = self._mask(self.static_padding[:, :bucket], self.position)
        logits = self.stack.run(self.layer_pass, self.static_tokens, mask, self.cache, self.static_position_ids)[:, -1]
        self.static_logits.copy_(logits)
        # Greedy decoding feeds itself; a sampler overwrites this before the next replay.
        self.static_tokens.copy_(logits.argmax(dim=-1, keepdim=True))
