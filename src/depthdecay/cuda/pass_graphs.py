"""CUDA graphs of whole passes: one text, or several in lock-step, with a contiguous KV cache.

A graph is captured when a pass first needs it, one per depth, number of tokens and bucket of positions. It reads tokens
and positions on the device and advances them itself, so the host only chooses which graph to replay next.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from depthdecay.cuda.capture_or_fallback import Graphs, require_alike
from depthdecay.cuda.compiled_layers import CompiledLayers, Rows
from depthdecay.cuda.decode_attention import attention_in_steps, spans_of
from depthdecay.cuda.exactness import BATCHED, UNCOMPILED, Exactness
from depthdecay.cuda.kernels.host_copy import copy_to_host
from depthdecay.cuda.kernels.split_attention import MOST_TOKENS
from depthdecay.cuda.likeliest import take_step
from depthdecay.errors import NotCapturable
from depthdecay.library_internals import optimized_for_decoding
from depthdecay.model.kv_cache import OneLayer, PlannedCache, Prompt, bucket_for
from depthdecay.model.layers import LayerPass, LayerStack, primary_device
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import PLAIN, SLOTS, Ask, Part, Said


@dataclass(frozen=True)
class Captured:
    graph: Any
    layer_pass: LayerPass  # its record of the captured pass


def apart(positions: torch.Tensor) -> torch.Tensor:
    """Position ids in separate memory: if they alias another input, dynamo specializes on the number of tokens."""
    return positions.unsqueeze(0).clone()


def _twice(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A single token repeated at the same position, with position ids."""
    return ids.repeat(1, 2), positions.repeat(2), apart(positions.repeat(2))


class PassGraphs:
    """A `Runner` for texts in lock-step: their prompts, then single tokens at one depth.

    If a model cannot be captured (a layer synchronizes), steps run eagerly, with a warning.
    """

    def __init__(
        self,
        stack: LayerStack,
        plan: Plan,
        repairs: Repairs,
        compiled: CompiledLayers | None,
        *,
        batch: int,
        rooms: Sequence[int],
    ) -> None:
        self.stack = stack
        self.plan = plan
        self.repairs = repairs
        self.graphs = Graphs(compiled)
        self.cache = PlannedCache(list(rooms), stack.windows)
        self.layer_pass = LayerPass()
        self.takes_whole_masks = stack.takes_whole_masks
        # Graphs hold the addresses of these tensors, so they are allocated once and then refilled.
        device = primary_device(stack.model)
        self.batch, self.room = batch, max(rooms)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros((batch, 1), dtype=torch.long, device=device)
        self.likeliest = self.tokens[:, 0]
        self.position_ids = torch.zeros((batch, 1), dtype=torch.long, device=device)
        self.padding = torch.ones((batch, self.room), dtype=torch.bool, device=device)
        self.first = torch.zeros(batch, dtype=torch.long, device=device)  # column of each text's first token
        self.logits: torch.Tensor | None = None
        # A ring buffer of the last steps' greedy tokens. Its copy to the host is part of the graphs: launched apart, it
        # would take microseconds between two of them. Each step copies all slots, which changes none but its own.
        self.latest = torch.zeros((SLOTS, batch), dtype=torch.long, device=device)
        self.latest_host = torch.zeros((SLOTS, batch), dtype=torch.long, pin_memory=device.type == "cuda")
        self.arriving = self.latest_host.unbind()
        self.turn = torch.zeros(1, dtype=torch.long, device=device)  # the next step's slot
        self._turn = 0  # the same on the host
        # State that passes advance in place. Of the ring, a warm-up writes the next step's slot only, which is free.
        self.changing = [self.position, self.tokens, self.position_ids, self.turn]

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    @property
    def cache_bytes_uniform(self) -> int:
        return self.cache.nbytes_uniform

    def has_room(self, needs: Sequence[int]) -> bool:
        """Whether every layer's cache is large enough for so many positions."""
        return all(need <= layer.room for need, layer in zip(needs, self.cache.planned, strict=True))

    @property
    def filled(self) -> int:
        return self.cache.clock.filled

    @property
    def inexact(self) -> str | None:
        """Why a token's result may depend on how many run with it; None if it does not."""
        if self.batch > 1:
            return BATCHED
        exactness = self._exactness
        return UNCOMPILED if exactness is None else exactness.inexact

    @property
    def _exactness(self) -> Exactness | None:
        if self.graphs.compiled is None:
            return None
        self.graphs.compiled.exactness.examine(self.stack)
        return self.graphs.compiled.exactness

    def _rows_of(self, tokens: int) -> Rows:
        """How a pass over so many tokens per text is compiled."""
        return "few" if tokens > 1 or self.inexact is None else "one"

    @torch.no_grad()
    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        if ask.fed is None:
            return self._read(parts, ask)
        if ask.fed is not self.likeliest:
            self.likeliest.copy_(ask.fed)
        return self._step(parts, ask)

    def _read(self, parts: Sequence[Part], ask: Ask) -> Said:
        """Prefill: the prompts, padded on the left, through all layers with the model's own forward."""
        prompt = Prompt.pad([list(part.tokens) for part in parts], 0, self.tokens.device)
        self.cache.clock.filled = 0
        self.cache.on_device(None)
        self.position.fill_(prompt.length)
        self.position_ids.copy_(prompt.position_ids[:, -1:] + 1)
        self.turn.zero_()
        self._turn = 0
        # The allocator of pinned memory does not see the copies in graphs. This one tells it that the stream writes
        # here, so if these graphs are freed, it waits with reusing the memory until steps past a text's end have ended.
        self.latest_host.copy_(self.latest, non_blocking=True)
        # Steps always get a mask, even without padding: some models otherwise read a length from the device.
        self.padding.fill_(True)
        self.first.zero_()
        if prompt.mask is not None:
            self.padding[:, : prompt.length] = prompt.mask.bool()
            self.first += prompt.length - prompt.mask.sum(1)
        return self._eagerly(parts, ask, prompt.ids, prompt.mask, prompt.position_ids)

    def _step(self, parts: Sequence[Part], ask: Ask) -> Said:
        depth, bucket = parts[0].depth, bucket_for(self.filled + 1)
        try:
            key = ("step", depth, bucket, *ask.kind)
            captured = self.graph(key, depth, bucket, lambda: self._one_token(bucket, ask), tokens=1)
        except NotCapturable:
            padding = self.padding[:, : self.filled + 1].long()
            self.position += 1
            self.position_ids += 1
            return self._eagerly(parts, ask, self.tokens, padding, self.position_ids - 1)
        captured.graph.replay()
        self.cache.clock.filled += 1
        arriving = self.arriving[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        assert self.logits is not None
        return self._said(parts, ask, self.logits, captured.layer_pass, self.likeliest, arriving)

    def _said(
        self,
        parts: Sequence[Part],
        ask: Ask,
        logits: torch.Tensor,
        layer_pass: LayerPass,
        likeliest: torch.Tensor | None = None,
        arriving: torch.Tensor | None = None,
    ) -> Said:
        tokens = sum(len(part.tokens) for part in parts)
        counts = [0] * self.stack.num_layers
        for layer in layer_pass.executed:
            counts[layer] += tokens
        return Said.of_forward(parts, ask, logits, layer_pass, counts, likeliest, arriving)

    def _eagerly(
        self, parts: Sequence[Part], ask: Ask, ids: torch.Tensor, mask: Any, position_ids: torch.Tensor
    ) -> Said:
        self.go_to(parts[0].depth)
        logits = self.stack.run(self.layer_pass, ids, mask, self.cache, position_ids, ask=ask)[:, -1]
        self.cache.clock.filled += ids.shape[1]
        return self._said(parts, ask, logits, self.layer_pass)

    def go_to(self, depth: int) -> None:
        """Set the depth of the next pass."""
        self.layer_pass.dropped = frozenset(self.plan.dropped(depth))
        self.layer_pass.repairs = self.repairs.at(depth)
        self.layer_pass.executed.clear()

    def _one_token(self, bucket: int, ask: Ask) -> torch.Tensor:
        """The body of a step: the next token of every text, which the graph feeds back to itself."""
        if self.inexact is None:
            logits = self.several(self.tokens, self.position, bucket, ask)[:, -1]
        else:
            mask = self.mask(bucket, self.position)
            logits = self.stack.run(self.layer_pass, self.tokens, mask, self.cache, self.position_ids, ask=ask)[:, -1]
        if self.logits is None:
            self.logits = torch.empty_like(logits)
        # Greedy decoding feeds itself; a sampler overwrites the token before the next replay.
        advancing = (self.tokens, self.position, self.position_ids, self.latest, self.turn)
        self.as_few_kernels(take_step)(logits, self.logits, *advancing)
        copy_to_host(self.latest, self.latest_host)
        return logits

    def several(self, ids: torch.Tensor, positions: torch.Tensor, bucket: int, ask: Ask = PLAIN) -> torch.Tensor:
        """The logits of tokens (1, tokens) of the one text, at these positions.

        Where results must not depend on the number of tokens, a single token runs twice, since torch specializes on a
        size of 1. Both copies read and write the same cache entries, as both are at the same position.
        """
        tokens = ids.shape[1]
        if tokens == 1 and self.inexact is None:
            ids, positions, position_ids = self.as_few_kernels(_twice)(ids, positions)
        else:
            position_ids = apart(positions)
        self.cache.on_device(positions[:1], bucket, positions)
        mask, keep = self.mask(bucket, positions), ids.shape[1]
        logits = self.stack.run(self.layer_pass, ids, mask, self.cache, position_ids, keep=keep, ask=ask)
        return logits[:, :tokens]

    def graph(
        self,
        key: tuple[Any, ...],
        depth: int,
        bucket: int,
        body: Callable[[], torch.Tensor],
        tokens: int | None = None,
    ) -> Captured:
        """The graph of a pass, captured on first use. `body` runs the pass and returns its logits.

        `tokens`: per text; None for a draft, a single token whose rounding does not matter.
        """
        if key not in self.graphs.by_key:
            with self.stack.exclusive():
                captured = self.graphs.attempt(lambda: self._capture(depth, bucket, body, tokens))
            self.graphs.by_key[key] = captured
        found: Captured = self.graphs.by_key[key]
        return found

    def _capture(self, depth: int, bucket: int, body: Callable[[], torch.Tensor], tokens: int | None) -> Captured:
        def rows() -> Rows:
            return "one" if tokens is None else self._rows_of(tokens)

        def plain() -> torch.Tensor:
            self.go_to(depth)
            with self._decoding_layout(bucket):
                return body()

        def run() -> torch.Tensor:
            self.go_to(depth)
            with self._decoding_layout(bucket), self._compiled(rows()):
                return body()

        def warm_up() -> None:
            """Before capture, check the first compiled pass of a kind against the plain layers.

            Compiled layers share one index. A layer that uses it for anything besides the cache would be silently
            wrong.
            """
            if self.graphs.compiled is None:
                if self.graphs.capturer.pool is None:
                    self._without_a_trace(plain)
                return
            if tokens is not None:
                self._try_bits()
            if rows() in self.graphs.compared:
                self._without_a_trace(run)
                return
            expected = self._without_a_trace(plain)
            require_alike(self._without_a_trace(run), expected, "compiled layers")
            self.graphs.compared.add(rows())

        graph = self.graphs.capture(warm_up, run)
        return Captured(graph, self.layer_pass.noted())

    def _try_bits(self) -> None:
        """Once, compare a pass over the largest number of tokens bitwise with the same tokens in smaller passes."""
        exactness = self._exactness
        if self.inexact is not None or exactness is None or exactness.tried:
            return
        first = min(self.filled, *(layer.room - MOST_TOKENS for layer in self.cache.planned))
        bucket = bucket_for(first + MOST_TOKENS)
        ids = torch.arange(MOST_TOKENS, device=self.tokens.device).unsqueeze(0) * 31 % self.stack.config.vocab_size

        def said(widths: Sequence[int]) -> torch.Tensor:
            logits = []
            for end, width in zip(itertools.accumulate(widths), widths, strict=True):
                positions = torch.arange(first + end - width, first + end, device=ids.device)
                self.go_to(self.stack.num_layers)
                with self._decoding_layout(bucket), self._compiled("few"):
                    logits.append(self.several(ids[:, end - width : end].clone(), positions, bucket))
            return torch.cat(logits, dim=1).view(torch.uint8)

        with self.cache.kept(first, first + MOST_TOKENS):
            exactness.tell(torch.equal(said((MOST_TOKENS,)), said((1, 2, 4, 8, 1))))

    def _without_a_trace(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self.unchanged():
            return run().clone()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores the state that passes advance. Cache entries they write will be overwritten anyway."""
        before = [tensor.clone() for tensor in self.changing]
        try:
            yield
        finally:
            for tensor, value in zip(self.changing, before, strict=True):
                tensor.copy_(value)

    @contextlib.contextmanager
    def _decoding_layout(self, bucket: int) -> Iterator[None]:
        """Passes inside take their position from the device and attend to the first `bucket` positions."""
        self.cache.on_device(self.position, bucket)
        try:
            with optimized_for_decoding(self.stack.model), attention_in_steps(self.stack):
                yield
        finally:
            self.cache.on_device(None)

    @contextlib.contextmanager
    def _compiled(self, rows: Rows) -> Iterator[None]:
        """Run the layers compiled, if compilation is on."""
        if self.graphs.compiled is None:
            yield
            return
        own = [OneLayer(layer) for layer in self.cache.planned]
        with self.graphs.compiled.routed(self.stack, self.layer_pass, self.cache, own, rows):
            yield

    def mask(self, bucket: int, columns: torch.Tensor) -> torch.Tensor:
        """The mask to give the model. Given padding only, the model builds a mask itself, in a dozen small kernels."""
        if not self.takes_whole_masks:
            return self.padding[:, :bucket]
        spans: torch.Tensor = self.as_few_kernels(spans_of)(self.first, columns)
        return spans

    def as_few_kernels(self, plain: Callable[..., Any], rows: Rows = "one") -> Callable[..., Any]:
        """Compiled if the layers are: generated kernels overlap safely only when compiled while layers are routed."""
        inside = self.layer_pass.run_layer is not None
        return self.graphs.compiled.function(plain, rows=rows) if inside and self.graphs.compiled is not None else plain
