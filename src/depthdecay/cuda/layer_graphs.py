"""CUDA graphs of single layers: one per layer and number of rows, replayed in sequence.

Whole-step graphs would need one per combination of row depths, practically one per batch. Layer graphs cover them all:
the number of layers times a few row counts. Launching one costs the host far less than the roughly 100 µs that the
device needs for a layer of a 7B model. Row counts are rounded up, since a layer takes as long as reading its weights.
Padding rows keep their state, write their keys to a scratch position, and attend to nothing. So no row affects another.

Every row is one token. A few tokens of a prompt are a few rows: all keys are written before any row attends, and each
row attends up to its own position. So prompts are prefilled within the decode steps of other requests.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from depthdecay.cuda.capture_or_fallback import Graphs
from depthdecay.cuda.compiled_layers import CompiledLayers, Rows, one_cache, one_index
from depthdecay.cuda.kernels.paged_attention import Paged, attend_paged
from depthdecay.errors import NotCapturable
from depthdecay.library_internals import attention_named, attention_registered, optimized_for_decoding
from depthdecay.model.grouped_attention import is_plain, scaling_of
from depthdecay.model.layers import LayerPass, LayerStack, primary_device
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.runners.contract import PLAIN, Ask, Part, Profile, Said, Tokens
from depthdecay.runners.forward import first_rows
from depthdecay.runners.kv_blocks import BLOCK, KVBlocks

_NUMBERS = itertools.count()


class _LastLayer(Exception):
    """Stops the forward: everything before the layers has run, and each layer's arguments are recorded."""


def bucket_of(rows: int) -> int:
    """The row count of the graph that runs so many rows: a power of two, above 64 a multiple of 64."""
    return -(-rows // 64) * 64 if rows > 64 else 1 << (rows - 1).bit_length()


class PagedLayer(CacheLayerMixin):
    """Holds a layer's new keys and values until attention runs. A compiled layer gets this as its whole cache."""

    is_croppable = False
    is_sliding = False
    is_initialized = True

    def __init__(self, steps: LayerGraphs, layer: int) -> None:
        super().__init__()
        self.steps = steps
        self.layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps.asking = self, key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class LayerGraphs:
    """Passes over single-token rows as graphs that are captured on first use, all in one memory pool.

    Raises `NotCapturable` if something cannot be captured.
    """

    exact = False  # whether results are batch-invariant: `cuda/exact_layer_graphs`
    rows_kind: Rows = "many"  # how layers are compiled
    states: torch.Tensor  # hidden states of all rows, between layers
    places: torch.Tensor  # (layer, row): where the row's new key is written
    logits: torch.Tensor

    def __init__(
        self, stack: LayerStack, blocks: KVBlocks, repairs: Repairs, rows: int, compiled: CompiledLayers | None
    ) -> None:
        self.stack = stack
        self.blocks = blocks
        self.graphs = Graphs(compiled, "a batch of this model")
        self.rows = bucket_of(rows)
        self.maps = {
            depth: {layer: self._map_of(repair) for layer, repair in repairs.at(depth).items()}
            for depth in repairs.at_depth
        }
        self.cache = Cache(layers=[PagedLayer(self, layer) for layer in range(stack.num_layers)])
        self.asking: tuple[PagedLayer, torch.Tensor, torch.Tensor] | None = None
        self.attention = torch.compiler.disable(self._attend)  # stored: compiled layers guard on its identity
        self.name = f"depthdecay_rows_{next(_NUMBERS)}"  # unique: another model's may be registered at the same time
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._warm: set[tuple[Any, ...]] = set()
        # Graphs read and write at fixed addresses: everything that changes between steps is in these two tensors.
        self.device = primary_device(stack.model)
        layers, depths = stack.num_layers, stack.num_layers + 1
        sizes = [self.rows] * 4 + [layers, depths, depths]
        self.inputs = torch.zeros(sum(sizes), dtype=torch.long, device=self.device)
        self.tokens, self.positions, self.slots, self.last, self.counts, self.starts, self.helds = self.inputs.split(
            sizes
        )
        slots, entries = blocks.table.shape[1], -(-blocks.most // 4) * 4
        self.table = torch.zeros((slots, layers, entries), dtype=torch.int32, device=self.device)
        self.paged = Paged(self.table, self.slots, self.positions, self.counts)
        self.order = torch.arange(self.rows, device=self.device)
        self.scratch = torch.tensor([blocks.store(layer).scratch for layer in range(layers)], device=self.device)
        self.mask = torch.ones((self.rows, 1), dtype=torch.long, device=self.device)  # so that no model builds one

    def takes(self, tokens: int) -> bool:
        return tokens <= self.rows

    def bucket(self, rows: int) -> int:
        """The row count of the graph that runs so many rows."""
        return bucket_of(rows)

    @property
    def buckets(self) -> list[int]:
        """All row counts, largest first."""
        return sorted({self.bucket(rows) for rows in range(1, self.rows + 1)}, reverse=True)

    @torch.no_grad()
    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        """Run a pass without synchronizing with the device."""
        profile, tokens = Profile.of(parts), Tokens.of(parts)
        with self._on_device(), self.stack.exclusive():
            self._send(tokens, profile)
            self._frame_graph("head", self._head).replay()
            states = {}
            for layer, count in enumerate(profile.counts):
                if count:
                    self._layer_graph(layer, self.bucket(count)).replay()
                for depth, (_, held) in profile.segments.items():
                    if layer in self.maps.get(depth, ()):
                        self._map_graph(depth, layer, self.bucket(held)).replay()
                if layer in ask.states:
                    states[layer] = self.states[: len(tokens.ids)].flatten(0, -2).clone()
            return Said(self._behind_layers(len(tokens.wanted)), profile.counts, states=states)

    def _behind_layers(self, wanted: int) -> torch.Tensor:
        """The requested logits."""
        self._frame_graph("tail", self._tail).replay()
        return self.logits.index_select(0, self.last[:wanted])

    def capture_layers(self) -> None:
        """Capture every layer's graphs ahead of time. No row is active, so nothing that they write is ever read."""
        with torch.no_grad(), self._on_device(), self.stack.exclusive():
            self.inputs.zero_()
            self._frame_graph("head", self._head).replay()
            for rows in self.buckets:
                for layer in range(self.stack.num_layers):
                    self._layer_graph(layer, rows)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Streams and graphs belong to the current device, which may not be the model's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _send(self, tokens: Tokens, profile: Profile) -> None:
        """Upload all inputs of the step's graphs in one copy, and the block tables that have grown in another.

        From fresh pinned memory each time: torch's allocator reuses a pinned block only once its copy has completed.
        """
        assert len(tokens.ids) <= self.rows
        starts, helds = [0] * len(self.starts), [0] * len(self.helds)
        for depth, (first, held) in profile.segments.items():
            starts[depth], helds[depth] = first, held
        given = (tokens.ids, tokens.positions, tokens.slots, tokens.wanted)
        by_row = [value for values in given for value in _filled(values, self.rows)]
        self._copy(self.inputs, torch.tensor(by_row + profile.counts + starts + helds))
        grown = sorted(self.blocks.extended)
        if grown:
            width = max(max(held[slot] for slot in grown) for held in self.blocks.held)
            tables = self.blocks.table[:, grown, :width].transpose(0, 1).to(torch.int32)
            where = self._copy(None, torch.tensor(grown))
            self.table[:, :, :width].index_copy_(0, where, self._copy(None, tables.contiguous()))
            self.blocks.extended.clear()

    def _copy(self, target: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
        """Start an asynchronous copy from the host; without a target, to a new tensor."""
        if self.device.type == "cuda":
            source = source.pin_memory()
        if target is None:
            return source.to(self.device, non_blocking=True)
        return target.copy_(source, non_blocking=True)

    def _graph(self, key: tuple[Any, ...], warm_up: Callable[[], Any], run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if key not in self.graphs.by_key:
            with self._own_attention():
                self.graphs.by_key[key] = self.graphs.capture(warm_up, run)
        found: torch.cuda.CUDAGraph = self.graphs.by_key[key]
        return found

    def _frame_graph(self, name: str, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The part of the model before its layers, or after them."""
        return self._graph((name,), run, run)

    def _layer_graph(self, layer: int, rows: int) -> torch.cuda.CUDAGraph:
        found: torch.cuda.CUDAGraph | None = self.graphs.by_key.get(("layer", layer, rows))
        if found is not None:
            return found
        # Everything captured must have run once before (compilation, autotuning); one layer per kind is enough.
        kind = type(self.stack.layers[layer]), self.stack.windows[layer], rows, self.graphs.compiled is None

        def warm_up() -> None:
            if kind not in self._warm:
                self._warm_layer(layer, rows)
                self._warm.add(kind)

        def run() -> None:
            own = self.states[:rows]
            torch.where(self._is_own(rows, self.counts[layer]), self._layer(layer, rows), own, out=own)

        return self._graph(("layer", layer, rows), warm_up, run)

    def _warm_layer(self, layer: int, rows: int) -> None:
        self._layer(layer, rows)

    def _map_of(self, repair: Repair) -> Callable[[torch.Tensor], torch.Tensor]:
        return repair

    def _map_graph(self, depth: int, layer: int, rows: int) -> torch.cuda.CUDAGraph:
        repair = self.maps[depth][layer]

        def repaired() -> tuple[torch.Tensor, torch.Tensor]:
            where = self.order[:rows] + self.starts[depth]  # may exceed the rows: `states` has twice as many
            own = self.states.index_select(0, where)
            return where, torch.where(self._is_own(rows, self.helds[depth]), repair(own), own)

        def run() -> None:
            where, states = repaired()
            self.states.index_copy_(0, where, states)

        return self._graph(("map", depth, layer, rows), repaired, run)

    def _is_own(self, rows: int, count: torch.Tensor) -> torch.Tensor:
        own = self.order[:rows] < count
        return own.view(-1, *[1] * (self.states.dim() - 1))

    def _head(self) -> None:
        """Compute where new keys go, and run the model's forward up to its layers, recording each layer's arguments."""
        block = self.table[self.slots, :, self.positions // BLOCK].long()  # (row, layer)
        places = (block * BLOCK + (self.positions % BLOCK).unsqueeze(1)).t()
        self.places = torch.where(self.order < self.counts.unsqueeze(1), places, self.scratch.unsqueeze(1))

        def note(index: int, _layer: Any, _forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if index == 0:
                if not hasattr(self, "states"):  # during warm-up, before the capture
                    self.states = hidden.new_zeros((2 * self.rows, *hidden.shape[1:]))
                self.states[: self.rows].copy_(hidden)
            elif hidden.data_ptr() != self.states.data_ptr():
                raise RuntimeError("the model changes hidden states between its layers, so they cannot run one by one")
            self.calls[index] = args, kwargs
            if index == self.stack.num_layers - 1:
                raise _LastLayer
            return self.stack.answer(index, self.states[: self.rows])

        with contextlib.suppress(_LastLayer):
            self._forward(note)

    def _tail(self) -> None:
        """The model's forward after its layers. The part before them runs again, which costs next to nothing."""
        self.logits = self._forward(lambda index, *_: self.stack.answer(index, self.states[: self.rows]))

    def _forward(self, run_layer: Callable[..., Any], rows: int | None = None) -> torch.Tensor:
        """The model's own forward over the first `rows` rows, or all, with its layers replaced by `run_layer`."""
        tokens, positions, mask = (own[:rows] for own in (self.tokens, self.positions, self.mask))
        layer_pass = LayerPass(run_layer=run_layer)
        return self.stack.run(layer_pass, tokens.unsqueeze(1), mask, self.cache, positions.unsqueeze(1))[:, -1]

    def _layer(self, index: int, rows: int) -> torch.Tensor:
        """A layer's output for the first `rows` rows."""
        args, kwargs = first_rows(self.calls[index], rows, self.rows)
        own = self.states[:rows]
        if args:
            args = (own, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": own}
        compiled = self.graphs.compiled
        if compiled is None:
            output = self.stack.layers[index](*args, **kwargs)
        else:  # compiled in a few pieces: attention is a graph break
            args, kwargs = one_cache(args, kwargs, self.cache, self.cache.layers[index])
            with one_index(self.stack):
                output = compiled.layer(self.stack, index, self.rows_kind, args, kwargs)
        if self.asking is not None:
            raise RuntimeError("the model does not use transformers' attention interface, which our attention replaces")
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    @contextlib.contextmanager
    def _own_attention(self) -> Iterator[None]:
        """While open, the model calls `_attend` and builds no masks: transformers has no mask function for our name.

        Only for models that take position ids: others would assume that all rows are at the same position.
        """
        if "position_ids" not in self.stack.forward_arguments:
            raise NotCapturable("the model's forward takes no position_ids, which rows at different positions need")
        modules = [self.stack.model, *self.stack.owner.modules()]
        configs = list({id(module.config): module.config for module in modules if hasattr(module, "config")}.values())
        with contextlib.ExitStack() as undo:
            for config in configs:
                undo.enter_context(attention_named(config, self.name))
            undo.enter_context(attention_registered(self.name, self.attention))
            undo.enter_context(optimized_for_decoding(self.stack.model))  # without it, experts synchronize
            self.asking = None
            yield

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        """Write each row's new key and value, then attend to all positions up to the row's own."""
        asking, self.asking = self.asking, None
        softcap = kwargs.pop("softcap", None)
        if asking is None or asking[1].data_ptr() != key.data_ptr() or mask is not None or not is_plain(kwargs):
            raise RuntimeError("the model's attention is not a plain causal softmax, which is all that our kernel does")
        layer = asking[0].layer
        store, window = self.blocks.store(layer), self.stack.windows[layer]
        places = self.places[layer, : key.shape[0]]
        store.keys.index_copy_(0, places, key[:, :, 0])
        store.values.index_copy_(0, places, value[:, :, 0])
        asked = (store.keys, store.values, self.paged, layer, scaling_of(query, kwargs), window, softcap)
        return (attend_paged(query, *asked, exact=True) if self.exact else attend_paged(query, *asked)), None


def _filled(values: list[int], count: int) -> list[int]:
    return values + [0] * (count - len(values))
