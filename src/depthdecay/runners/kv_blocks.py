"""Keys and values in blocks: one store for all layers of a shape, so that what one layer frees another can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import KeptShape
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import Part

BLOCK = 16  # positions; a row wastes half a block a layer on average, and tables stay short


class Store:
    """Blocks of one shape, and the list of those that nobody holds."""

    def __init__(self, shape: KeptShape, blocks: int) -> None:
        self.blocks = blocks
        self.block_bytes = BLOCK * shape.nbytes
        # Block 0 is never given out: padding reads it, and its zeros disturb no sum. The others are read only where
        # they have been written, so they are not touched here: a machine gives memory that is used, not asked for.
        # Nor is the last: there, rows that only fill a graph up write what nobody reads.
        positions = (blocks + 2) * BLOCK
        self.scratch = (blocks + 1) * BLOCK
        try:
            self.keys = torch.empty((positions, *shape.key), dtype=shape.dtype, device=shape.device)
            self.values = torch.empty((positions, *shape.value), dtype=shape.dtype, device=shape.device)
        except RuntimeError:  # what torch raises on a CPU; on CUDA a kind of it
            size = blocks * self.block_bytes / 1e9
            raise DepthDecayError(
                f"{size:.1f} GB for keys and values do not fit into the memory of {shape.device}; give them less room"
            ) from None
        self.keys[:BLOCK] = 0
        self.values[:BLOCK] = 0
        self.free = list(range(blocks, 0, -1))
        self.promised = 0  # what rows in the batch may still come to hold at once
        self._gathered = [self.keys[:0], self.values[:0]]

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise DepthDecayError(f"{count} blocks of keys and values were asked for, but {len(self.free)} are free")
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken[::-1]  # new blocks in the order of their places

    def give_back(self, blocks: Sequence[int]) -> None:
        self.free.extend(blocks)

    def gather(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at these places, in memory that the next call reuses: layers run one after the other."""
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
    """Bytes of keys and values now. `saved`: what rows at full depth would hold more than these."""

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
        """`shapes`: each layer's. `positions`: the longest text. `blocks`: how many each layer brings to its kind."""
        self.layers = len(shapes)
        self.most = blocks_for(positions)
        kinds = list(dict.fromkeys(shapes))
        self.kind_of = [kinds.index(shape) for shape in shapes]
        counts = [0] * len(kinds)
        for kind, count in zip(self.kind_of, blocks, strict=True):
            counts[kind] += count
        self.stores = [Store(kind, count) for kind, count in zip(kinds, counts, strict=True)]
        # The last column stays 0: that is where padding looks.
        self.table = torch.zeros((self.layers, slots, self.most + 1), dtype=torch.long)
        self._entries = self.table.numpy()  # the same memory: single entries are written in a tenth of the time
        self.extended: set[int] = set()  # slots whose tables have grown since a copy of them was last made
        self.held = [[0] * slots for _ in range(self.layers)]
        self.free_slots = list(range(slots - 1, -1, -1))
        self.promises: dict[int, list[int]] = {}
        self.stretches: dict[tuple[int, int], int] = {}  # (layer, slot): where blocks that lie in one stretch begin

    @classmethod
    def within(cls, shapes: Sequence[KeptShape], slots: int, positions: int, cache_bytes: int) -> KVBlocks:
        """As many as fit. Layers are dropped in any order, so each brings the same number."""
        a_block = BLOCK * sum(shape.nbytes for shape in shapes)
        return cls(shapes, slots, positions, [cache_bytes // a_block] * len(shapes))

    @classmethod
    def of_rows(cls, shapes: Sequence[KeptShape], rooms: Sequence[Sequence[int]]) -> KVBlocks:
        """Just the rooms given, by row and layer, each in one stretch of a store: rows that come and go together."""
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
        """Positions that a text may have."""
        return self.most * BLOCK

    @property
    def nbytes(self) -> int:
        return sum(store.blocks * store.block_bytes for store in self.stores)

    @property
    def nbytes_uniform(self) -> int:
        """What rows of the same lengths would take if every layer had as much room as the one that has most."""
        longest = sum(max(held) for held in zip(*self.held, strict=True))
        return longest * sum(self.store(layer).block_bytes for layer in range(self.layers))

    def make_room(self, part: Part) -> None:
        """Before a pass writes the part's positions; its row holds blocks for those before them."""
        if blocks_for(part.end) > blocks_for(part.length):
            self.extend(part.slot, part.plan.layers(part.depth), part.end)

    def store(self, layer: int) -> Store:
        return self.stores[self.kind_of[layer]]

    def needs(self, plan: Plan, prompt: int, new_tokens: int) -> dict[int, list[int]]:
        """The most blocks of each kind that a row holds at once, from where it comes to a depth to its end.

        The depth never rises, so each stretch of one depth holds most at its end. The last token is never read.
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
        """Beside what the rows in the batch may still come to need: so no row ever waits for another's blocks."""
        fits = all(need <= store.blocks - store.promised for need, store in zip(needs, self.stores, strict=True))
        return fits and bool(self.free_slots)

    def enter(self, needs: Sequence[int]) -> int:
        """A slot for a new row, with so many blocks promised to it."""
        slot = self.free_slots.pop()
        self.promises[slot] = [0] * len(self.stores)
        self.promise(slot, needs)
        return slot

    def promise(self, slot: int, needs: Sequence[int]) -> None:
        for kind, (store, need) in enumerate(zip(self.stores, needs, strict=True)):
            store.promised += need - self.promises[slot][kind]
        self.promises[slot] = list(needs)

    def extend(self, slot: int, layers: Sequence[int], length: int) -> None:
        """Let the row's layers reach `length` positions."""
        wanted = blocks_for(length)
        short = [layer for layer in layers if self.held[layer][slot] < wanted]
        for layer in short:
            held = self.held[layer][slot]
            self._entries[layer, slot, held:wanted] = self.store(layer).take(wanted - held)
            self.held[layer][slot] = wanted
        if short:
            self.extended.add(slot)

    def drop(self, slot: int, layers: Sequence[int]) -> None:
        """The row runs these layers no more."""
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
        """With the lengths of the rows in the batch, for what full depth would hold."""
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
