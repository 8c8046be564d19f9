"""The KV cache: one small object per layer, each sized to what the plan says the layer will need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from depthdecay.errors import DepthDecayError
from depthdecay.plan.plan import Plan


@dataclass
class Clock:
    """The current position, shared by all layers of one cache.

    `filled` is the host's count of written positions. During graph decoding the device keeps its own in `position`
    (a one-element tensor that the graph advances), and attention reads the first `bucket` positions, masked.
    """

    filled: int = 0
    position: torch.Tensor | None = None
    bucket: int = 0
    columns: torch.Tensor | None = None  # where a pass over several tokens writes; `position` is the first of them


class LayerCache(CacheLayerMixin):
    """One layer's keys and values, as a transformers cache layer.

    Stored as (position, batch, head, dim). So the strides do not depend on the layer's room, and one compiled layer
    serves caches of any size.
    """

    is_croppable = False

    def __init__(self, clock: Clock, room: int, window: int | None = None) -> None:
        super().__init__()
        self.clock = clock
        self.room = room
        self.window = window
        self.is_sliding = window is not None
        self.position: torch.Tensor | None = None
        self.key_view: torch.Tensor | None = None
        self.value_view: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._empty(key_states)
        self.values = self._empty(value_states)
        self.is_initialized = True

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        # Zeros, not uninitialized: masked positions of a bucket still enter the softmax, and 0 * NaN is NaN.
        return torch.zeros((self.room, batch, heads, dim), dtype=states.dtype, device=states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.position is not None and self.key_view is not None and self.value_view is not None:
            # inductor does index_put_ on the stored layout in place; other forms copy the whole cache.
            self.key_view.index_put_((self.position,), key_states.permute(2, 0, 1, 3))
            self.value_view.index_put_((self.position,), value_states.permute(2, 0, 1, 3))
            return self.key_view.permute(1, 2, 0, 3), self.value_view.permute(1, 2, 0, 3)
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start, end = self.clock.filled, self.clock.filled + key_states.shape[2]
        if end > self.room:
            raise DepthDecayError(f"a layer was given position {end}, but the plan reserved only {self.room} for it")
        self.keys[start:end] = key_states.permute(2, 0, 1, 3)
        self.values[start:end] = value_states.permute(2, 0, 1, 3)
        first = self._first_visible()
        return self.keys[first:end].permute(1, 2, 0, 3), self.values[first:end].permute(1, 2, 0, 3)

    def _first_visible(self) -> int:
        return 0 if self.window is None else max(0, self.clock.filled - self.window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.clock.position is not None:
            return self.clock.bucket, 0
        first = self._first_visible()
        return self.clock.filled + query_length - first, first

    def get_seq_length(self) -> int:
        position = self.clock.position
        return self.clock.filled if position is None else position  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1

    def enter_bucket(self) -> None:
        """Set the views that a graph reads and writes to the clock's bucket (or clear them outside graphs)."""
        self.position = self.clock.position if self.clock.columns is None else self.clock.columns
        if self.position is None or self.keys is None or self.values is None:
            self.key_view = self.value_view = None
            return
        bucket = min(self.clock.bucket, self.room)
        self.key_view = self.keys[:bucket]
        self.value_view = self.values[:bucket]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values) if t is not None)


class PlannedCache(Cache):
    """A transformers cache whose layers have the given sizes and share one clock."""

    def __init__(self, rooms: list[int], windows: tuple[int | None, ...], layer: type[LayerCache] = LayerCache) -> None:
        self.clock = Clock()
        self.planned = [layer(self.clock, room, window) for room, window in zip(rooms, windows, strict=True)]
        super().__init__(layers=list(self.planned))

    @property
    def is_compileable(self) -> bool:
        """True while a device position is in use: transformers then always builds a mask, as a graph needs."""
        return self.clock.position is not None

    def on_device(self, position: torch.Tensor | None, bucket: int = 0, columns: torch.Tensor | None = None) -> None:
        """Hand the clock to the device (graph decoding over `bucket` positions), or back to the host with None."""
        self.clock.position = position
        self.clock.bucket = bucket
        self.clock.columns = columns
        for layer in self.planned:
            layer.enter_bucket()

    @contextlib.contextmanager
    def kept(self, start: int, end: int) -> Iterator[None]:
        """Restore positions `start` to `end` (exclusive) on exit, undoing writes made inside."""
        written = [states[start:end] for layer in self.planned for states in (layer.keys, layer.values)]  # type: ignore[index]
        before = [states.clone() for states in written]
        try:
            yield
        finally:
            for states, value in zip(written, before, strict=True):
                states.copy_(value)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.planned)

    @property
    def nbytes_uniform(self) -> int:
        """The size of the same cache if every layer were as large as the largest."""
        largest = max(layer.room for layer in self.planned)
        return sum(layer.nbytes * largest // max(layer.room, 1) for layer in self.planned)


class OneLayer:
    """The cache object passed to a compiled layer: the same type for all, so that one compilation serves all."""

    def __init__(self, layer: LayerCache) -> None:
        self.layer = layer

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that a pass over a bucket reads and writes; their first dimension is positions or tokens."""
        found = (self.layer.position, self.layer.key_view, self.layer.value_view)
        return [tensor for tensor in found if tensor is not None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer.update(key_states, value_states)


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts, padded on the left."""

    ids: torch.Tensor  # (batch, length)
    mask: torch.Tensor | None  # (batch, length) of 0 and 1, None without padding
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


BUCKET = 128  # small enough that short texts do not pay for a long cache, large enough to keep graphs few


def bucket_for(filled: int) -> int:
    """How many positions attention covers once `filled` are written: multiples of a step that grows with the text."""
    step = BUCKET
    while filled > step * 16:  # at most about 16 buckets per doubling: bounded waste (6%) and number of graphs
        step *= 2
    return -(-filled // step) * step


def rooms(plan: Plan, prompt_length: int, new_tokens: int, *, in_buckets: bool) -> list[int]:
    """Positions each layer needs: the prompt's, and one for every later pass that still runs the layer."""
    needs = (prompt_length + plan.last_token_of_layer(layer, new_tokens) - 1 for layer in range(plan.num_layers))
    return [bucket_for(need) if in_buckets else need for need in needs]


LEAST_ROOM = 512


def room_for(positions: int, batch: int) -> int:
    """How many positions to allocate for texts of this length. Graphs are tied to one cache, so a single row, which is
    cheap, gets more than it needs: the next text may be longer."""
    room = bucket_for(positions)
    return room if batch > 1 else max(LEAST_ROOM, 1 << (room - 1).bit_length())
