"""Passes of a batch by one compiled call: rows at their own positions and depths, over keys and values in blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from depthdecay.batching.blocks import BLOCK, Blocks
from depthdecay.batching.ragged import Part
from depthdecay.cpu import library as native
from depthdecay.cpu.form import hooked
from depthdecay.cpu.stack import FEW_TOKENS, CpuStack, made_maps
from depthdecay.cpu.threads import threads
from depthdecay.repairs import Repairs


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
    def of(cls, stack: Any, blocks: Blocks, repairs: Repairs) -> CompiledRows | None:
        """Where the engine's own passes are compiled and the model is as it was when that was tried."""
        return cls(stack, blocks, repairs) if isinstance(stack, CpuStack) and not hooked(stack) else None

    def has_room(self, tokens: int) -> bool:
        return tokens <= FEW_TOKENS

    @torch.no_grad()
    def run(self, parts: Sequence[Part]) -> tuple[torch.Tensor, list[int]]:
        """The logits behind each part's last token, and how many tokens ran each layer. Deepest rows come first."""
        stack, layers = self.stack, range(self.stack.num_layers)
        rows = [part.slot for part in parts for _ in part.tokens]
        columns = [column for part in parts for column in range(part.length, part.length + len(part.tokens))]
        ids = torch.tensor([token for part in parts for token in part.tokens])
        count = len(rows)
        running = [0] * len(layers)
        segments: dict[int, list[int]] = {}
        last: list[int] = []
        for part in parts:
            first = last[-1] + 1 if last else 0
            segments.setdefault(part.depth, [first, 0])[1] += len(part.tokens)
            for layer in part.plan.layers(part.depth):
                running[layer] += len(part.tokens)
            last.append(first + len(part.tokens) - 1)
        made = (native.Segment * len(segments))()
        for place, (depth, (first, held)) in enumerate(segments.items()):
            made[place] = native.Segment(first, held, self.maps.get(depth, self.no_maps)[0])
        state = nn.functional.embedding(ids, stack.form.embedding.weight).float()
        cosine, sine = stack.angles_at(torch.tensor(columns))
        logits = torch.empty((len(parts), stack.vocabulary))
        numbers = ctypes.c_int64 * count
        arguments = native.Pass(
            tokens=count,
            batch=self.blocks.table.shape[1],
            row=numbers(*rows),
            column=numbers(*columns),
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
            running=(ctypes.c_int64 * len(layers))(*running),
            segment=made,
            segments=len(segments),
            wanted=(ctypes.c_int64 * len(last))(*last),
            logits_wanted=len(last),
            logits=logits.data_ptr(),
            threads=threads(),
        )
        with stack.exclusive():
            stack.code.run(stack.weights, arguments)
        return logits, running
