"""Passes through the model's own forward: every architecture, every device, texts at different positions and depths.

Every text ends in the last column, as in a left-padded batch. So transformers' own masks, including those of sliding
windows, are right for all of them, and no mask code is copied here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from depthdecay.model.grouped_attention import grouped_attention
from depthdecay.model.layers import LayerPass, LayerStack, primary_device
from depthdecay.model.repairs import Repairs
from depthdecay.runners.contract import PLAIN, Ask, Part, Said
from depthdecay.runners.kv_blocks import BLOCK, KVBlocks

Map = Callable[[torch.Tensor], torch.Tensor]


class ForwardRunner:
    """Keys and values are in blocks, gathered for each layer unless a single text's are contiguous."""

    def __init__(self, stack: LayerStack, blocks: KVBlocks, repairs: Repairs) -> None:
        self.stack = stack
        self.blocks = blocks
        self.repairs = repairs
        self.cache = RaggedCache(blocks, stack.windows)

    @torch.no_grad()
    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        if len(parts) > 1 and any(part.wanted > 1 for part in parts):  # as one part, it would pad the others
            parts = [single for part in parts for single in (part.singly() if part.wanted > 1 else [part])]
        device = primary_device(self.stack.model)
        self.cache.columns = columns = Columns(parts, self.blocks, device)
        ragged = RaggedPass(parts, self.repairs)
        if ask.fed is None:
            filled = [[0] * (columns.queries - len(part.tokens)) + list(part.tokens) for part in parts]
            ids = torch.tensor(filled, device=device)
        else:
            ids = ask.fed.unsqueeze(1)
        keep = max(part.wanted for part in parts)
        with grouped_attention(self.stack):
            logits = self.stack.run(
                ragged.layer_pass, ids, columns.mask, self.cache, columns.position_ids, max(keep, 1), ask
            )
        said = logits[0] if len(parts) == 1 else logits[:, -1]
        if any(part.wanted == 0 for part in parts):
            said = said[torch.tensor([part.wanted > 0 for part in parts], device=said.device)]
        return Said.of_forward(parts, ask, said, ragged.layer_pass, ragged.tokens_run)


class Columns:
    """The layout of a pass: which column holds which position, and where that is in the blocks."""

    def __init__(self, parts: Sequence[Part], blocks: KVBlocks, device: torch.device) -> None:
        self.blocks = blocks
        self.device = device
        self.slots = [part.slot for part in parts]
        lengths = torch.tensor([part.length for part in parts])
        counts = torch.tensor([len(part.tokens) for part in parts])
        self.queries = max(len(part.tokens) for part in parts)
        self.width = max(part.end for part in parts)
        self.positions = torch.arange(self.width) - (self.width - lengths - counts).unsqueeze(1)  # below 0: padding
        self.is_text = self.positions >= 0
        alike = len({part.end for part in parts}) == 1
        self.mask = None if alike else self.is_text.long().to(device)
        self.position_ids = self.positions[:, self.width - self.queries :].clamp(min=0).to(device)
        # A text with fewer new tokens than others is padded with columns that are not written to the cache.
        is_new = torch.arange(self.queries) >= (self.queries - counts).unsqueeze(1)
        self.is_new = None if bool(is_new.all()) else is_new.to(device)

    def stretch(self, layer: int) -> int | None:
        """Where a single text begins in the layer's store, if its blocks are contiguous."""
        return self.blocks.stretches.get((layer, self.slots[0])) if len(self.slots) == 1 else None

    def places(self, layer: int, rows: int, first: int) -> torch.Tensor:
        """Indices in the layer's store of the first rows' columns from `first` on."""
        table, block, offset = self._within
        places = torch.gather(table[layer, :rows], 1, block[:rows, first:])
        return places.mul_(BLOCK).add_(offset[:rows, first:])

    @functools.cached_property
    def _within(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = torch.where(self.is_text, self.positions // BLOCK, self.blocks.most)
        parts = (self.blocks.table[:, self.slots], block, self.positions % BLOCK)
        return parts[0].to(self.device), parts[1].to(self.device), parts[2].to(self.device)


class RaggedLayer(CacheLayerMixin):
    """One layer's blocks as a transformers cache layer, for the first rows of a pass."""

    is_croppable = False

    def __init__(self, cache: RaggedCache, layer: int, window: int | None) -> None:
        super().__init__()
        self.cache = cache
        self.layer = layer
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns, blocks = self.cache.columns, self.cache.blocks
        store, first, start = blocks.store(self.layer), self._first_visible(), columns.stretch(self.layer)
        if start is not None:
            end = start + columns.width
            store.keys[end - columns.queries : end] = key_states[0].transpose(0, 1)
            store.values[end - columns.queries : end] = value_states[0].transpose(0, 1)
            kept = (store.keys[start + first : end], store.values[start + first : end])
            return kept[0].transpose(0, 1).unsqueeze(0), kept[1].transpose(0, 1).unsqueeze(0)
        rows, device = key_states.shape[0], store.keys.device
        places = columns.places(self.layer, rows, first).to(device)
        new = places[:, places.shape[1] - columns.queries :]
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if columns.is_new is None:
            new, keys, values = new.reshape(-1), keys.flatten(0, 1), values.flatten(0, 1)
        else:
            is_new = columns.is_new[:rows].to(device)
            new, keys, values = new[is_new], keys[is_new], values[is_new]
        store.keys.index_copy_(0, new, keys)
        store.values.index_copy_(0, new, values)
        keys, values = store.gather(places.reshape(-1))
        shape = (rows, columns.width - first)
        return keys.unflatten(0, shape).transpose(1, 2), values.unflatten(0, shape).transpose(1, 2)

    def _first_visible(self) -> int:
        columns = self.cache.columns
        return 0 if self.window is None else max(0, columns.width - columns.queries - self.window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_visible()
        return self.cache.columns.width - first, first

    def get_seq_length(self) -> int:
        return self.cache.columns.width - self.cache.columns.queries

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """A transformers cache over blocks, for the texts of the current pass."""

    columns: Columns

    def __init__(self, blocks: KVBlocks, windows: Sequence[int | None]) -> None:
        self.blocks = blocks
        super().__init__(layers=[RaggedLayer(self, layer, window) for layer, window in enumerate(windows)])

    @property
    def is_compileable(self) -> bool:
        return False


class RaggedPass:
    """Parts sorted by depth, deepest first. Since ladders are nested, every layer runs on the first few of them."""

    def __init__(self, parts: Sequence[Part], repairs: Repairs) -> None:
        depths = [part.depth for part in parts]
        assert depths == sorted(depths, reverse=True)
        layers = parts[0].plan.num_layers
        self.rows = len(parts)
        running = {depth: parts[depths.index(depth)].plan.layers(depth) for depth in set(depths)}
        self.rows_of = [0] * layers
        for depth in depths:
            for layer in running[depth]:
                self.rows_of[layer] += 1
        self.segments = _segments(depths)
        self.maps = {depth: repairs.at(depth) for depth in set(depths)}
        self.tokens_run = [0] * layers  # per layer, counted where they run
        self.tokens_of_first = list(itertools.accumulate((len(part.tokens) for part in parts), initial=0))
        idle = frozenset(layer for layer, rows in enumerate(self.rows_of) if rows == 0)
        maps = {layer: self._maps_behind(layer, 0) for layer in idle}
        self.layer_pass = LayerPass(idle, maps, run_layer=self._run_layer)

    def _run_layer(self, index: int, layer: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = self.rows_of[index]
        self.tokens_run[index] += self.tokens_of_first[count]
        if count == self.rows:
            return forward(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        args = tuple(first_rows(value, count, self.rows) for value in args)
        kwargs = {name: first_rows(value, count, self.rows) for name, value in kwargs.items()}
        output = forward(*args, **kwargs)
        rest = self._maps_behind(index, count)(hidden)[count:]
        if isinstance(output, tuple):
            return torch.cat([output[0], rest]), *output[1:]
        return torch.cat([output, rest])

    def _maps_behind(self, layer: int, count: int) -> Map:
        """What replaces this layer for rows from `count` on; rows of one depth share a repair map."""
        work = [
            (start, end, self.maps[depth][layer])
            for start, end, depth in self.segments
            if start >= count and layer in self.maps[depth]
        ]

        def repair(hidden: torch.Tensor) -> torch.Tensor:
            if not work:
                return hidden
            hidden = hidden.clone()
            for start, end, repaired in work:
                hidden[start:end] = repaired(hidden[start:end])
            return hidden

        return repair


def _segments(depths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, last row + 1, depth) for each run of equal depths."""
    segments: list[tuple[int, int, int]] = []
    for row, depth in enumerate(depths):
        if segments and segments[-1][2] == depth:
            segments[-1] = segments[-1][0], row + 1, depth
        else:
            segments.append((row, row + 1, depth))
    return segments


def first_rows(value: Any, count: int, rows: int) -> Any:
    """The first rows of any layer argument: hidden states, masks, rotary embeddings, alone or in containers."""
    if isinstance(value, torch.Tensor):
        return value[:count] if value.dim() > 0 and value.shape[0] == rows else value
    if type(value) in (tuple, list):
        return type(value)(first_rows(item, count, rows) for item in value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {name: first_rows(item, count, rows) for name, item in value.items()}
    return value
