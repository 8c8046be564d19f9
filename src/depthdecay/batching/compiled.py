"""Passes of a batch by one compiled call: rows at their own positions and depths, over keys and values in blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from ..cpu import library as native
from ..cpu.form import hooked
from ..cpu.stack import FEW_TOKENS, CpuStack, made_maps
from ..cpu.threads import threads
from ..repairs import Repairs
from ..stack import Stack
from .blocks import BLOCK, Blocks
from .parts import Part, Profile, Tokens


class CompiledRows:
    """Passes over few tokens; of many, torch's products are the faster ones."""

    def __init__(self, stack: CpuStack, blocks: Blocks, repairs: Repairs) -> None:
        self.stack, self.blocks = stack, blocks
        self.maps = {depth: made_maps(repairs.at(depth), stack.num_layers) for depth in repairs.at_depth}
        self.no_maps = made_maps({}, stack.num_layers)
        pointers = ctypes.c_void_p * stack.num_layers
        stores = [blocks.store(layer) for layer in range(stack.num_layers)]
        self.keys = pointers(*(store.keys.data_ptr() for store in stores))
        self.values = pointers(*(store.values.data_ptr() for store in stores))
        self.halves = stores[0].keys.dtype == torch.bfloat16

    @classmethod
    def of(cls, stack: Stack, blocks: Blocks, repairs: Repairs) -> CompiledRows | None:
        """Where the engine's own passes are compiled and the model is as it was when that was tried."""
        return cls(stack, blocks, repairs) if isinstance(stack, CpuStack) and not hooked(stack) else None

    def has_room(self, tokens: int) -> bool:
        return tokens <= FEW_TOKENS

    @torch.no_grad()
    def run(self, parts: Sequence[Part]) -> tuple[torch.Tensor, list[int]]:
        """The logits behind each part's last token, and how many tokens ran each layer. Deepest rows come first."""
        stack, profile, tokens = self.stack, Profile.of(parts), Tokens.of(parts)
        segments = (native.Segment * len(profile.segments))()
        for place, (depth, (first, held)) in enumerate(profile.segments.items()):
            segments[place] = native.Segment(first, held, self.maps.get(depth, self.no_maps)[0])
        state = nn.functional.embedding(torch.tensor(tokens.ids), stack.form.embedding.weight).float()
        cosine, sine = stack.angles_at(torch.tensor(tokens.positions))
        logits = torch.empty((len(parts), stack.vocabulary))
        numbers = ctypes.c_int64 * len(tokens.ids)
        arguments = native.Pass(
            tokens=len(tokens.ids),
            batch=self.blocks.table.shape[1],
            row=numbers(*tokens.slots),
            column=numbers(*tokens.positions),
            first=numbers(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            state=state.data_ptr(),
            keys=self.keys,
            values=self.values,
            table=self.blocks.table.data_ptr(),
            most=self.blocks.table.shape[2],
            block=BLOCK,
            halves=self.halves,
            running=(ctypes.c_int64 * stack.num_layers)(*profile.counts),
            segment=segments,
            segments=len(segments),
            wanted=(ctypes.c_int64 * len(parts))(*tokens.last),
            logits_wanted=len(parts),
            logits=logits.data_ptr(),
            threads=threads(),
        )
        with stack.exclusive():
            stack.code.run(stack.weights, arguments)
        return logits, profile.counts
