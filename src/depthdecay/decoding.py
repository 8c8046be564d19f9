"""Prefill at full depth, then one step at a depth: eagerly, or as one CUDA graph per depth."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .cache import OneLayer, PlannedCache, bucket_for
from .plan import Plan
from .stack import LayerPass, Stack, replaced


class Decoder(Protocol):
    """One batch in decoding. Tokens and logits stay on the device; the host only says which step is next."""

    tokens: torch.Tensor  # (batch, 1): what the next step reads
    logits: torch.Tensor  # (batch, vocabulary): what the last pass said
    cache: PlannedCache
    feeds_itself: bool  # after a step, `tokens` holds its greedy choice already

    def prefill(self, prompt: Prompt) -> int:
        """Read the prompts through all layers; return the number of layers executed."""

    def step(self, index: int) -> int:
        """Run the pass that produces T_index; return the number of layers executed."""


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts, padded on the left."""

    ids: torch.Tensor  # (batch, length)
    mask: torch.Tensor | None  # (batch, length) of 0 and 1, None where nothing is padded
    position_ids: torch.Tensor

    @classmethod
    def pad(cls, prompts: list[list[int]], pad_token_id: int, device: torch.device) -> Prompt:
        length = max(map(len, prompts))
        ids = torch.tensor([[pad_token_id] * (length - len(p)) + p for p in prompts])
        lengths = torch.tensor([[len(p)] for p in prompts])
        positions = torch.arange(length).unsqueeze(0) - (length - lengths)
        padded = bool((lengths != length).any())
        mask = (positions >= 0).long().to(device) if padded else None
        return cls(ids.to(device), mask, positions.clamp(min=0).to(device))

    @property
    def length(self) -> int:
        return self.ids.shape[1]


def rooms(plan: Plan, prompt_length: int, new_tokens: int, *, in_buckets: bool) -> list[int]:
    """Positions each layer needs: the prompt, and one for every later pass that still runs the layer."""
    needs = (prompt_length + plan.last_token_of_layer(layer, new_tokens) - 1 for layer in range(plan.num_layers))
    return [bucket_for(need) if in_buckets else need for need in needs]


class EagerDecoder:
    """Calls the model's own forward at every step. The path of CPUs, of models on several GPUs, and of every fallback."""

    feeds_itself = False

    def __init__(self, stack: Stack, plan: Plan, cache: PlannedCache, new_tokens: int) -> None:
        self.stack = stack
        self.plan = plan
        self.cache = cache
        self.new_tokens = new_tokens
        self.layer_pass = LayerPass()
        self.forward_arguments = _accepted_arguments(stack)
        self.padding: torch.Tensor | None = None

    def prefill(self, prompt: Prompt) -> int:
        self.cache.clock.filled = 0
        self.cache.on_device(None)
        if prompt.mask is not None:
            later = prompt.mask.new_ones((prompt.mask.shape[0], self.new_tokens))
            self.padding = torch.cat([prompt.mask, later], dim=1)
        self.position_ids = prompt.position_ids[:, -1:].clone()
        return self._run(prompt.ids, prompt.position_ids, dropped=frozenset())

    def step(self, index: int) -> int:
        self.position_ids += 1
        dropped = frozenset(self.plan.dropped(self.plan.depth(index)))
        return self._run(self.tokens, self.position_ids, dropped)

    def _run(self, ids: torch.Tensor, position_ids: torch.Tensor, dropped: frozenset[int]) -> int:
        filled = self.cache.clock.filled + ids.shape[1]
        padding = None if self.padding is None else self.padding[:, :filled]
        self.layer_pass.dropped, self.layer_pass.layers_executed = dropped, 0
        self.logits = self.run_model(ids, position_ids, padding)
        self.cache.clock.filled = filled
        if ids.shape[1] > 1 or not hasattr(self, "tokens"):
            self.tokens = ids[:, -1:].clone()
        return self.layer_pass.layers_executed

    def run_model(self, ids: torch.Tensor, position_ids: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """The model's own forward, with the routed layers; logits of the last position."""
        arguments: dict[str, Any] = {"position_ids": position_ids, "logits_to_keep": 1}
        arguments = {name: value for name, value in arguments.items() if name in self.forward_arguments}
        with self.stack.routed(self.layer_pass):
            output = self.stack.model(
                input_ids=ids, attention_mask=padding, past_key_values=self.cache, use_cache=True, **arguments
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def _accepted_arguments(stack: Stack) -> frozenset[str]:
    """Optional arguments that this model's forward takes by name (older architectures have no position_ids)."""
    return frozenset(inspect.signature(type(stack.model).forward).parameters)


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    layers_executed: int


@dataclass
class CompiledLayers:
    """One torch.compile per kind of layer, shared by all layers of the kind: weights and cache are inputs."""

    kinds: dict[tuple[type, int | None], Any] = field(default_factory=dict)

    def runner(self, stack: Stack, cache: PlannedCache) -> Any:
        views = [OneLayer(layer) for layer in cache.planned]

        def run_layer(index: int, layer: Any, _forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kind = (type(layer), stack.windows[index])
            if kind not in self.kinds:
                self.kinds[kind] = torch.compile(type(layer).forward)
            if "past_key_values" in kwargs:
                kwargs = {**kwargs, "past_key_values": views[index]}
            else:
                args = tuple(views[index] if arg is cache else arg for arg in args)
            return self.kinds[kind](layer, *args, **kwargs)

        return run_layer


class GraphDecoder(EagerDecoder):
    """Decoding as CUDA graphs, one per depth and bucket of positions, captured when first needed.

    A graph advances token and position by itself, so the host replays graphs without ever waiting for the device.
    """

    def __init__(
        self, stack: Stack, plan: Plan, cache: PlannedCache, new_tokens: int, compiled: CompiledLayers | None
    ) -> None:
        super().__init__(stack, plan, cache, new_tokens)
        self.compiled = compiled
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.pool: Any = None
        self.capture_seconds = 0.0
        self.position: torch.Tensor | None = None
        self.last_logits: torch.Tensor | None = None

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
        graph.graph.replay()
        self.cache.clock.filled += 1
        return graph.layers_executed

    def prepare(self, index: int, filled: int | None = None) -> _Graph:
        """The graph of T_index's pass, captured now if this depth has not been met at this length of text."""
        depth = self.plan.depth(index)
        bucket = bucket_for((self.cache.clock.filled if filled is None else filled) + 1)
        if (depth, bucket) not in self.graphs:
            self.graphs[depth, bucket] = self._capture(depth, bucket)
        return self.graphs[depth, bucket]

    def _capture(self, depth: int, bucket: int) -> _Graph:
        self.layer_pass.dropped = frozenset(self.plan.dropped(depth))
        graph = torch.cuda.CUDAGraph()
        tokens = self.static_tokens.clone()
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
        self.static_tokens.copy_(tokens)
        return _Graph(graph, self.layer_pass.layers_executed)

    def _pass(self, bucket: int) -> None:
        padding = self.static_padding[:, :bucket] if self.has_padding else None
        logits = self.run_model(self.static_tokens, self.static_position_ids, padding)
        self.static_logits.copy_(logits)
        # Greedy decoding feeds itself; a sampler overwrites this before the next replay.
        self.static_tokens.copy_(logits.argmax(dim=-1, keepdim=True))

    @contextlib.contextmanager
    def _decoding_layout(self, bucket: int) -> Iterator[None]:
        """The state in which passes are traced: the device's clock, and the same layer index everywhere when compiling."""
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
                    self.layer_pass.run_layer = self.compiled.runner(self.stack, self.cache)
                yield
        finally:
            self.layer_pass.run_layer = None
            self.cache.on_device(None)
