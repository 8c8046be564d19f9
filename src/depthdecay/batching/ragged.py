"""One pass over rows at different positions and depths, through the model's own forward.

Every row's text ends in the last column, as in a batch that is padded on the left. So transformers' own masks, also
those of sliding windows, are right for all rows, and none of them is copied here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..attention import grouped_attention
from ..repairs import Repairs
from ..stack import LayerPass, Stack, primary_device
from .blocks import BLOCK, Blocks, Shape
from .parts import Part

Map = Callable[[torch.Tensor], torch.Tensor]


class Columns:
    """Where the rows of a pass lie: which column holds which position, and where in the blocks that is."""

    def __init__(self, parts: Sequence[Part], blocks: Blocks, device: torch.device) -> None:
        lengths = torch.tensor([part.length for part in parts])
        counts = torch.tensor([len(part.tokens) for part in parts])
        self.queries = int(counts.max())
        self.width = int((lengths + counts).max())
        positions = torch.arange(self.width) - (self.width - lengths - counts).unsqueeze(1)  # below 0: padding
        is_text = positions >= 0
        self.mask = None if bool(is_text.all()) else is_text.long().to(device)
        new = positions[:, self.width - self.queries :]
        self.position_ids = new.clamp(min=0).to(device)
        # A row with fewer new tokens than others fills up with columns that are not written anywhere.
        is_new = torch.arange(self.queries) >= (self.queries - counts).unsqueeze(1)
        self.is_new = None if bool(is_new.all()) else is_new.to(device)
        self.table = blocks.table[:, [part.slot for part in parts]].to(device)
        self.block = torch.where(is_text, positions // BLOCK, blocks.most).to(device)
        self.offset = (positions % BLOCK).to(device)

    def places(self, layer: int, rows: int, first: int) -> torch.Tensor:
        """Where the columns from `first` on of the first rows lie in the layer's store."""
        block = torch.gather(self.table[layer, :rows], 1, self.block[:rows, first:])
        return block.mul_(BLOCK).add_(self.offset[:rows, first:])


class RaggedLayer(CacheLayerMixin):
    """One layer's blocks behind transformers' cache contract, for the first rows of a pass."""

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
        columns, rows = self.cache.columns, key_states.shape[0]
        store = self.cache.blocks.store(self.layer)
        first = self._first_visible()
        places = columns.places(self.layer, rows, first)
        new = places[:, places.shape[1] - columns.queries :]
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if columns.is_new is None:
            new, keys, values = new.reshape(-1), keys.flatten(0, 1), values.flatten(0, 1)
        else:
            is_new = columns.is_new[:rows]
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
    """A transformers cache over blocks, for whatever rows the pass at hand has."""

    columns: Columns

    def __init__(self, blocks: Blocks, windows: Sequence[int | None]) -> None:
        self.blocks = blocks
        super().__init__(layers=[RaggedLayer(self, layer, window) for layer, window in enumerate(windows)])

    @property
    def is_compileable(self) -> bool:
        return False


class RaggedPass:
    """Rows sorted by depth, deepest first: as ladders are nested, every layer works on the first so many of them."""

    def __init__(self, parts: Sequence[Part], repairs: Repairs) -> None:
        depths = [part.depth for part in parts]
        assert depths == sorted(depths, reverse=True)
        layers = parts[0].plan.num_layers
        self.rows = len(parts)
        running = [frozenset(part.plan.layers(part.depth)) for part in parts]
        self.rows_of = [sum(layer in own for own in running) for layer in range(layers)]
        self.segments = _segments(depths)
        self.maps = {depth: repairs.at(depth) for depth in set(depths)}
        self.tokens_run = [0] * layers  # of each layer, counted where they run
        self.tokens_of_first = list(itertools.accumulate((len(part.tokens) for part in parts), initial=0))
        idle = frozenset(layer for layer, rows in enumerate(self.rows_of) if rows == 0)
        self.layer_pass = LayerPass(idle, {layer: self._maps_behind(layer, 0) for layer in idle}, 0, self._run_layer)

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
        """What rows from `count` on get in the place of this layer: rows of one depth share a repair map."""
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


def run_ragged(stack: Stack, cache: RaggedCache, parts: Sequence[Part], repairs: Repairs) -> tuple[torch.Tensor, Any]:
    """The logits behind each row's last token, and the pass with its counts."""
    device = primary_device(stack.model)
    cache.columns = columns = Columns(parts, cache.blocks, device)
    filled = [[0] * (columns.queries - len(part.tokens)) + list(part.tokens) for part in parts]
    ragged = RaggedPass(parts, repairs)
    with torch.no_grad(), grouped_attention(stack.model.config):
        ids = torch.tensor(filled, device=device)
        logits = stack.run(ragged.layer_pass, ids, columns.mask, cache, columns.position_ids)
    return logits[:, -1], ragged


def shapes_of(stack: Stack) -> list[Shape]:
    """What each layer writes, seen in a pass over one token; it warms the model up too."""
    from transformers.cache_utils import DynamicCache

    found: dict[int, Shape] = {}

    class Watched(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            key, value = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
            found[layer_idx] = Shape(key, value, keys.dtype, keys.device)
            return super().update(keys, values, layer_idx, *args, **kwargs)

    device = primary_device(stack.model)
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)
    cache = Watched(config=stack.config)
    with torch.no_grad():
        stack.run(LayerPass(), ids, None, cache, torch.zeros_like(ids))
    return [found[layer] for layer in range(stack.num_layers)]


def _segments(depths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, behind the last, depth) for each run of equal depths."""
    segments: list[tuple[int, int, int]] = []
    for row, depth in enumerate(depths):
        if segments and segments[-1][2] == depth:
            segments[-1] = segments[-1][0], row + 1, depth
        else:
            segments.append((row, row + 1, depth))
    return segments


def first_rows(value: Any, count: int, rows: int) -> Any:
    """The first rows of whatever a layer is given: states, masks, rotary embeddings, alone or in tuples."""
    if isinstance(value, torch.Tensor):
        return value[:count] if value.dim() > 0 and value.shape[0] == rows else value
    if type(value) in (tuple, list):
        return type(value)(first_rows(item, count, rows) for item in value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {name: first_rows(item, count, rows) for name, item in value.items()}
    return value
