"""Passes on a CPU as one compiled call: texts at their own positions and depths, over a KV cache in blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from depthdecay.cpu import kernel_library as native
from depthdecay.cpu.compiled_stack import CompiledLayerStack
from depthdecay.cpu.threads import threads
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.runners.contract import PLAIN, Ask, Part, Profile, Said, Tokens
from depthdecay.runners.kv_blocks import BLOCK, KVBlocks

# Longest passes that are compiled when weights are unquantized. Above, torch's matrix products are faster; in bfloat16
# sooner, since processors have instructions for it.
FEW_TOKENS = {torch.float32: 64, torch.bfloat16: 16}


class CompiledRows:
    """Runs the passes of some texts, with the weights as of construction."""

    def __init__(self, stack: CompiledLayerStack, blocks: KVBlocks, repairs: Repairs) -> None:
        self.stack, self.blocks, self.repairs = stack, blocks, repairs
        pointers = ctypes.c_void_p * stack.num_layers
        stores = [blocks.store(layer) for layer in range(stack.num_layers)]
        self.keys = pointers(*(store.keys.data_ptr() for store in stores))
        self.values = pointers(*(store.values.data_ptr() for store in stores))
        self.halves = stores[0].keys.dtype == torch.bfloat16
        self.most = FEW_TOKENS[stack.form.dtype]

    @classmethod
    def of(cls, stack: LayerStack, blocks: KVBlocks, repairs: Repairs) -> CompiledRows | None:
        """A runner, if the model has a compiled pass and is unmodified since that was checked; else None."""
        return cls(stack, blocks, repairs) if isinstance(stack, CompiledLayerStack) and stack.refresh() else None

    def takes(self, tokens: int) -> bool:
        """Whether passes over so many tokens run here. Quantized ones always do: only this pass can read them."""
        return tokens <= self.most or self.stack.is_rounded

    @property
    def is_exact(self) -> bool:
        """Whether results are batch-invariant. The compiled call sums in the same order for any number of tokens.

        Without quantization torch takes over in long passes, and only those of several texts depend on what else is in
        them: a single one has its prompt, the same in every mode, and windows after it.
        """
        return self.stack.is_rounded or self.blocks.table.shape[1] == 1

    @torch.no_grad()
    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        stack, profile, tokens = self.stack, Profile.of(parts), Tokens.of(parts)
        ids = torch.tensor(tokens.ids) if ask.fed is None else ask.fed.contiguous()
        state = torch.empty((len(ids), stack.form.embedding.embedding_dim))
        cosine, sine = stack.angles_up_to(max(tokens.positions))
        model = stack.weights if ask.short is None else stack.shortened(ask.short)
        logits = torch.empty((len(tokens.wanted), model.head.rows))
        numbers = ctypes.c_int64 * len(tokens.ids)
        arguments = native.Pass(
            tokens=len(tokens.ids),
            batch=self.blocks.table.shape[1],
            ids=ids.data_ptr(),
            row=numbers(*tokens.slots),
            column=numbers(*tokens.positions),
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
            segment=self._segments(profile),
            segments=len(profile.segments),
            wanted=(ctypes.c_int64 * len(tokens.wanted))(*tokens.wanted),
            logits_wanted=len(tokens.wanted),
            logits=logits.data_ptr(),
            threads=threads(),
        )
        states = {layer: torch.empty_like(state) for layer in ask.states}
        if states:
            places = (states[layer].data_ptr() if layer in states else None for layer in range(stack.num_layers))
            arguments.saved = (ctypes.c_void_p * stack.num_layers)(*places)
        with stack.exclusive():
            executed = stack.code.run(model, arguments)
        if executed < 0:
            raise IndexError(f"a token id is not below {model.embedding.rows}, the number of embeddings")
        assert executed == sum(count > 0 for count in profile.counts)
        return Said(logits, profile.counts, None if ask.short is None else ask.short.ids, states=states)

    def _segments(self, profile: Profile) -> ctypes.Array[native.Segment]:
        """Which tokens run at which depth, and the maps that replace the layers dropped there."""
        found = (native.Segment * len(profile.segments))()
        for place, (depth, (first, held)) in enumerate(profile.segments.items()):
            found[place] = native.Segment(first, held, self.stack.maps_at(self.repairs, depth))
        return found
