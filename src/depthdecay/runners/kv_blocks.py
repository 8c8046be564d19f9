"""A KV cache in blocks: one store for all layers of a shape, so that one layer can reuse what another frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import KeptShape
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import Part

BLOCK = 16  # positions; a row wastes half a block per layer on average, and block tables stay short


class Store:
    """Blocks of one shape, and the list of free ones."""

    def __init__(self, shape: KeptShape, blocks: int) -> None:
        self.blocks = blocks
        self.block_bytes = BLOCK * shape.nbytes
        # Block 0 is never handed out: padding reads it, and its zeros do not affect sums. The others are read only
        # after being written, so they stay uninitialized: the system only commits memory that is touched. The last
        # block is never handed out either: dummy rows that pad a graph write there.
        positions = (blocks + 2) * BLOCK
        self.scratch = (blocks + 1) * BLOCK
        try:
            self.keys = torch.empty((positions, *shape.key), dtype=shape.dtype, device=shape.device)
            self.values = torch.empty((positions, *shape.value), dtype=shape.dtype, device=shape.device)
        except RuntimeError:  # torch raises it on a CPU, and a subclass on CUDA
            size = blocks * self.block_bytes / 1e9
            raise DepthDecayError(
                f"a KV cache of {size:.1f} GB does not fit into the memory of {shape.device}; choose a smaller one"
            ) from None
        self.keys[:BLOCK] = 0
        self.values[:BLOCK] = 0
        self.free = list(range(blocks, 0, -1))
        self.promised = 0  # reserved: the most that rows in the batch may hold at once
        self._gathered = [self.keys[:0], self.values[:0]]

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise DepthDecayError(f"{count} KV cache blocks were requested, but {len(self.free)} are free")
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken[::-1]  # in ascending order

    def give_back(self, blocks: Sequence[int]) -> None:
        self.free.extend(blocks)

    def gather(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at these indices, in memory that the next call reuses: layers run one after the other."""
        count = places.numel()
        if self._gathered[0].shape[0] < count:
            self._gathered = [
                torch.empty((count, *t.shape[1:]), dtype=t.dtype, device=t.device) for t in (self.keys, self.values)
            ]
        keys, values = (room[:count] for room in self._gathered)
        torch.index_select(self.keys, 0, places, out=keys)
        torch.index_select(self.values, 0, places, out=values)
        return keys, values


@dataclass(frozen=True)
class Usage:
    """Current KV cache size in bytes. `saved`: how much more the rows would hold at full depth."""

    total: int
    used: int
    promised: int
    saved: int

    @property
    def free(self) -> int:
        return self.total - self.used


class KVBlocks:
    """Which row holds which blocks in which layer."""

    def __init__(self, shapes: Sequence[KeptShape], slots: int, positions: int, blocks: Sequence[int]) -> None:
        """`shapes`: per layer. `positions`: the longest text. `blocks`: how many each layer adds to its store."""
        self.layers = len(shapes)
        self.most = blocks_for(positions)
        kinds = list(dict.fromkeys(shapes))
        self.kind_of = [kinds.index(shape) for shape in shapes]
        counts = [0] * len(kinds)
        for kind, count in zip(self.kind_of, blocks, strict=True):
            counts[kind] += count
        self.stores = [Store(kind, count) for kind, count in zip(kinds, counts, strict=True)]
        # The last column stays 0: padding reads it.
        self.table = torch.zeros((self.layers, slots, self.most + 1), dtype=torch.long)
        self._entries = self.table.numpy()  # shares memory: writing single entries takes a tenth of the time
        self.extended: set[int] = set()  # slots whose tables have grown since they were last copied
        self.held = [[0] * slots for _ in range(self.layers)]
        self.free_slots = list(range(slots - 1, -1, -1))
        self.promises: dict[int, list[int]] = {}
        self.stretches: dict[tuple[int, int], int] = {}  # (layer, slot): start of contiguous blocks

    @classmethod
    def within(cls, shapes: Sequence[KeptShape], slots: int, positions: int, cache_bytes: int) -> KVBlocks:
        """As many blocks as fit. Layers are dropped in any order, so each adds the same number."""
        a_block = BLOCK * sum(shape.nbytes for shape in shapes)
        return cls(shapes, slots, positions, [cache_bytes // a_block] * len(shapes))

    @classmethod
    def of_rows(cls, shapes: Sequence[KeptShape], rooms: Sequence[Sequence[int]]) -> KVBlocks:
        """Exactly the given sizes, per row and layer, each contiguous: for rows that start and end together."""
        own = [sum(map(blocks_for, layer)) for layer in zip(*rooms, strict=True)]
        blocks = cls(shapes, len(rooms), max(map(max, rooms)), own)
        for slot, room in enumerate(rooms):
            blocks.promises[slot] = [0] * len(blocks.stores)
            for layer, positions in enumerate(room):
                blocks.extend(slot, [layer], positions)
                blocks.stretches[layer, slot] = int(blocks.table[layer, slot, 0]) * BLOCK
        return blocks

    @property
    def longest(self) -> int:
        """The maximum length of a text in positions."""
        return self.most * BLOCK

    @property
    def nbytes(self) -> int:
        return sum(store.blocks * store.block_bytes for store in self.stores)

    @property
    def nbytes_uniform(self) -> int:
        """The size for rows of the same lengths if every layer were as large as the largest."""
        longest = sum(max(held) for held in zip(*self.held, strict=True))
        return longest * sum(self.store(layer).block_bytes for layer in range(self.layers))

    def make_room(self, part: Part) -> None:
        """Allocate blocks for the part's positions before a pass writes them; its row already holds earlier ones."""
        if blocks_for(part.end) > blocks_for(part.length):
            self.extend(part.slot, part.plan.layers(part.depth), part.end)

    def store(self, layer: int) -> Store:
        return self.stores[self.kind_of[layer]]

    def needs(self, plan: Plan, prompt: int, new_tokens: int) -> dict[int, list[int]]:
        """The most blocks per store that a row holds at once, from when it reaches a depth to its end.

        The depth never rises, so a row holds the most blocks at the end of each depth. The last token is never read.
        """
        ends = {depth: index + 1 for index, depth in enumerate(plan.depths(new_tokens))}
        found: dict[int, list[int]] = {}
        most = [0] * len(self.stores)
        for depth, end in reversed(ends.items()):
            held = [0] * len(self.stores)
            for layer in plan.layers(depth):
                held[self.kind_of[layer]] += blocks_for(prompt + end - 1)
            most = [max(pair) for pair in zip(most, held, strict=True)]
            found[depth] = most
        return dict(reversed(found.items()))

    def can_ever_hold(self, needs: Sequence[int]) -> bool:
        return all(need <= store.blocks for need, store in zip(needs, self.stores, strict=True))

    def can_hold(self, needs: Sequence[int]) -> bool:
        """Whether this fits beside what rows in the batch may still need, so that no row waits for another's blocks."""
        fits = all(need <= store.blocks - store.promised for need, store in zip(needs, self.stores, strict=True))
        return fits and bool(self.free_slots)

    def enter(self, needs: Sequence[int]) -> int:
        """A slot for a new row, with `needs` blocks reserved for it."""
        slot = self.free_slots.pop()
        self.promises[slot] = [0] * len(self.stores)
        self.promise(slot, needs)
        return slot

    def promise(self, slot: int, needs: Sequence[int]) -> None:
        for kind, (store, need) in enumerate(zip(self.stores, needs, strict=True)):
            store.promised += need - self.promises[slot][kind]
        self.promises[slot] = list(needs)

    def extend(self, slot: int, layers: Sequence[int], length: int) -> None:
        """Allocate blocks so that the row's layers hold `length` positions."""
        wanted = blocks_for(length)
        short = [layer for layer in layers if self.held[layer][slot] < wanted]
        for layer in short:
            held = self.held[layer][slot]
            self._entries[layer, slot, held:wanted] = self.store(layer).take(wanted - held)
            self.held[layer][slot] = wanted
        if short:
            self.extended.add(slot)

    def drop(self, slot: int, layers: Sequence[int]) -> None:
        """Free the blocks of layers that the row no longer runs."""
        for layer in layers:
            held = self.held[layer][slot]
            if held:
                self.store(layer).give_back(self._entries[layer, slot, :held].tolist())
                self._entries[layer, slot, :held] = 0
                self.held[layer][slot] = 0

    def leave(self, slot: int) -> None:
        self.drop(slot, range(self.layers))
        self.promise(slot, [0] * len(self.stores))
        del self.promises[slot]
        self.free_slots.append(slot)

    def usage(self, lengths: Sequence[int]) -> Usage:
        """Current usage; `lengths` of the rows in the batch give what full depth would hold."""
        total, used, promised = 0, 0, 0
        for store in self.stores:
            size = store.block_bytes
            total += store.blocks * size
            used += (store.blocks - len(store.free)) * size
            promised += store.promised * size
        a_block = sum(self.store(layer).block_bytes for layer in range(self.layers))
        return Usage(total, used, promised, max(0, sum(map(blocks_for, lengths)) * a_block - used))


def blocks_for(positions: int) -> int:
    return -(-positions // BLOCK)
