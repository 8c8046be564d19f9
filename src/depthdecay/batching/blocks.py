"""Keys and values in blocks: one store for all layers of a shape, so that what one layer frees another can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import DepthDecayError
from ..plan import Plan

BLOCK = 16  # positions; a row wastes half a block a layer on average, and tables stay short


@dataclass(frozen=True)
class Shape:
    """What one layer writes for one position."""

    key: tuple[int, int]  # heads, size of each
    value: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def block_bytes(self) -> int:
        numbers = self.key[0] * self.key[1] + self.value[0] * self.value[1]
        return BLOCK * numbers * torch.empty((), dtype=self.dtype).element_size()


class Store:
    """Blocks of one shape, and the list of those that nobody holds."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        self.shape = shape
        self.blocks = blocks
        # Block 0 is never given out: padding reads it, and its zeros disturb no sum. The others are read only where
        # they have been written, so they are not touched here: a machine gives memory that is used, not asked for.
        positions = (blocks + 1) * BLOCK
        try:
            self.keys = torch.empty((positions, *shape.key), dtype=shape.dtype, device=shape.device)
            self.values = torch.empty((positions, *shape.value), dtype=shape.dtype, device=shape.device)
        except RuntimeError:  # what torch raises on a CPU; on CUDA a kind of it
            size = blocks * shape.block_bytes / 1e9
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
        return taken

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


class Blocks:
    """Which row holds which blocks in which layer."""

    def __init__(self, shapes: Sequence[Shape], slots: int, positions: int, cache_bytes: int) -> None:
        """`shapes`: each layer's. `positions`: the longest text. `cache_bytes`: for all layers together."""
        self.layers = len(shapes)
        self.most = blocks_for(positions)
        kinds = list(dict.fromkeys(shapes))
        self.kind_of = [kinds.index(shape) for shape in shapes]
        # Layers are dropped in any order, so a store's share is that of its layers at full depth.
        a_position = sum(shape.block_bytes for shape in shapes)
        self.stores = [Store(kind, cache_bytes // a_position * shapes.count(kind)) for kind in kinds]
        # The last column stays 0: that is where padding looks.
        self.table = torch.zeros((self.layers, slots, self.most + 1), dtype=torch.long)
        self.held = [[0] * slots for _ in range(self.layers)]
        self.free_slots = list(range(slots - 1, -1, -1))
        self.promises: dict[int, list[int]] = {}

    def store(self, layer: int) -> Store:
        return self.stores[self.kind_of[layer]]

    def need(self, plan: Plan, prompt: int, new_tokens: int, index: int = 0) -> list[int]:
        """The most blocks of each kind that a row holds at once, from its token `index` to its end.

        The depth never rises, so each stretch of one depth holds most at its end. The last token is never read.
        """
        needs = [0] * len(self.stores)
        for depth in plan.visited_depths(new_tokens):
            end = plan.schedule.tokens_at_least(depth, new_tokens)
            if end <= index:
                continue
            layers = plan.layers(depth)
            for kind in range(len(needs)):
                held = sum(self.kind_of[layer] == kind for layer in layers)
                needs[kind] = max(needs[kind], held * blocks_for(prompt + end - 1))
        return needs

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
        for layer in layers:
            held = self.held[layer][slot]
            if held < wanted:
                taken = self.store(layer).take(wanted - held)
                self.table[layer, slot, held:wanted] = torch.tensor(taken)
                self.held[layer][slot] = wanted

    def drop(self, slot: int, layers: Sequence[int]) -> None:
        """The row runs these layers no more."""
        for layer in layers:
            held = self.held[layer][slot]
            if held:
                self.store(layer).give_back(self.table[layer, slot, :held].tolist())
                self.table[layer, slot, :held] = 0
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
            size = store.shape.block_bytes
            total += store.blocks * size
            used += (store.blocks - len(store.free)) * size
            promised += store.promised * size
        a_block = sum(self.store(layer).shape.block_bytes for layer in range(self.layers))
        return Usage(total, used, promised, max(0, sum(map(blocks_for, lengths)) * a_block - used))


def blocks_for(positions: int) -> int:
    return -(-positions // BLOCK)
