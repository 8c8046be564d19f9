"""Lossless decoding on CUDA: a graph for every depth, number of tokens and bucket of positions that a pass may have."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from .cache import bucket_for
from .decoding import Prompt
from .errors import one_line
from .graphs import Capturer, CompiledLayers, OnDevice
from .lossless import LosslessDecoder
from .plan import Plan
from .repairs import Repairs
from .stack import Stack

# Numbers of tokens that passes are captured for; a shorter one is padded behind, where nobody looks.
SIZES = (1, 2, 3, 5, 9, 17)


@dataclass
class Slot:
    """What a graph over so many tokens reads and writes; it must stay where it is."""

    ids: torch.Tensor  # (batch, size)
    positions: torch.Tensor  # (batch, size)
    steps: torch.Tensor  # (size)
    logits: torch.Tensor | None = None  # (batch, size, vocabulary)


class LosslessGraphDecoder(OnDevice, LosslessDecoder):
    """The same windows as graphs. Where a model cannot be captured, passes run eagerly, and a warning says so."""

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        prompt: Prompt,
        new_tokens: int,
        repairs: Repairs,
        longest: int,
        compiled: CompiledLayers | None,
    ) -> None:
        super().__init__(stack, plan, prompt, new_tokens, repairs, longest)
        self.compiled = compiled
        self.capturer = Capturer()
        self.can_capture = True
        self.graphs: dict[tuple[int, int, int], Any] = {}
        self.slots: dict[int, Slot] = {}
        self.start = torch.zeros(1, dtype=torch.long, device=prompt.ids.device)
        self.position = self.start

    def _room(self, columns: int) -> int:
        return bucket_for(columns + SIZES[-1])

    def _pass(self, ids: torch.Tensor, positions: torch.Tensor, depth: int, keep: int = 1) -> torch.Tensor:
        width = ids.shape[1]
        size = next((size for size in SIZES if size >= width), None)
        if size is None or not self.can_capture:
            return super()._pass(ids, positions, depth, keep)
        slot = self._slot(size)
        slot.ids[:, :width].copy_(ids)
        slot.positions[:, :width].copy_(positions)
        self.start.fill_(self.filled)
        graph = self._graph(depth, size, bucket_for(self.filled + size))
        if graph is None:
            return super()._pass(ids, positions, depth, keep)
        graph.replay()
        self.cache.clock.filled += width
        assert slot.logits is not None
        return slot.logits[:, width - keep : width]

    def _slot(self, size: int) -> Slot:
        if size not in self.slots:
            device = self.mask.device
            zeros = torch.zeros((2, self.batch, size), dtype=torch.long, device=device)
            self.slots[size] = Slot(zeros[0], zeros[1], torch.arange(size, device=device))
        return self.slots[size]

    def _graph(self, depth: int, size: int, bucket: int) -> Any:
        key = depth, size, bucket
        if key not in self.graphs:
            with self.stack.exclusive():
                try:
                    self.graphs[key] = self._capture(*key)
                except Exception as error:
                    reason = one_line(error)
                    if self.compiled is not None:
                        warnings.warn(f"layers could not be compiled and run as they are: {reason}", stacklevel=2)
                        self.compiled = None
                        return self._graph(depth, size, bucket)
                    warnings.warn(f"this model cannot run as CUDA graphs and runs eagerly: {reason}", stacklevel=2)
                    self.can_capture = False
                    return None
        return self.graphs[key]

    def _capture(self, depth: int, size: int, bucket: int) -> Any:
        self.go_to(depth)

        def run() -> None:
            self._columns(size, bucket)

        with self._decoding_layout(bucket), self._shared_layers():
            return self.capturer.capture(run, run)

    def _columns(self, size: int, bucket: int) -> None:
        """A pass over the slot's tokens, written from the device's position on."""
        slot = self.slots[size]
        self.cache.on_device(self.start, bucket, self.start + slot.steps)
        mask = self.mask[:, :bucket]
        logits = self.stack.run(self.layer_pass, slot.ids, mask, self.cache, slot.positions, keep=size)
        if slot.logits is None:
            slot.logits = torch.empty_like(logits)
        slot.logits.copy_(logits)
