"""A draft head on a CPU as one compiled call: the same call as a model's pass, for a model of one layer.

The head's layer differs from a model's in one way: queries, keys and values read the normalized token concatenated with
the normalized state. Weights are quantized like the model's.
"""

from __future__ import annotations

import ctypes

import torch

from depthdecay.cpu import kernel_library as native
from depthdecay.cpu.compiled_stack import CompiledLayerStack, float_matrix
from depthdecay.cpu.quantized_blocks import Packed, can_hold, packed, rounded_to_4, rounded_to_8
from depthdecay.cpu.threads import threads
from depthdecay.speculative.head_text import FirstLayers, HeadText, PlacedHead


class CompiledHead(PlacedHead):
    """A head with its weights as the compiled call expects them."""

    def __init__(self, placed: PlacedHead, stack: CompiledLayerStack) -> None:
        self.__dict__.update(placed.__dict__)
        self.code = stack.code
        self.setting = None if stack.rounded is None else stack.rounded.setting
        self._alive: list[torch.Tensor] = []
        self._packed_bytes = 0
        head, shape = self.head, self.head.shape
        layer = native.Layer(
            attention_norm=self._floats(head.state_norm.weight),
            mlp_norm=self._floats(head.mlp_norm.weight),
            **{
                name: self._matrix(getattr(head, name).weight)
                for name in ("query", "key", "value", "output", "gate", "up", "down")
            },
        )
        self._layer = (native.Layer * 1)(layer)
        bias = None if self.bias is None else self._floats(self.bias)
        self._alive.append(self.embedding.weight.detach())
        embedding = float_matrix(self._alive[-1])
        self.model = native.ModelStruct(
            hidden=shape.hidden,
            heads=shape.heads,
            key_value_heads=shape.key_value_heads,
            head_size=shape.head_size,
            neurons=shape.neurons,
            layers=1,
            epsilon=shape.epsilon,
            scale=shape.head_size**-0.5,
            layer=self._layer,
            final_norm=self._floats(head.norm.weight),
            head=self._matrix(self.weight, bias, bits=8),
            # In the same call: torch's own product would leave its threads spinning on the cores that passes need.
            embedding=embedding,
            join=self._matrix(head.fc.weight, bits=8),
            beside_norm=self._floats(head.token_norm.weight),
        )
        none = (ctypes.POINTER(native.Map) * 1)()
        self._no_maps = none
        self._angles = self._angles_up_to(0)

    @classmethod
    def of(cls, placed: PlacedHead) -> CompiledHead | None:
        """A compiled head, if the model has compiled passes and the head does not use the model's layers; else None."""
        stack = placed.stack
        if not isinstance(stack, CompiledLayerStack) or placed.head.shape.first_layers:
            return None
        return cls(placed, stack)

    @property
    def nbytes(self) -> int:
        return self._packed_bytes

    def text(self, first_layers: FirstLayers | None = None) -> CompiledHeadText:
        return CompiledHeadText(self)

    def angles(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine by place in the cache, which has no position 0: (places, head size), up to a position."""
        if end > len(self._angles[0]):
            self._angles = self._angles_up_to(end)
        cosine, sine = self._angles
        return cosine[1:], sine[1:]

    def _angles_up_to(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(max(512, 1 << end.bit_length()))[None]
        cosine, sine = (part[0, 0].contiguous() for part in self.head.angles(positions, torch.float32))
        return cosine, sine

    def _floats(self, tensor: torch.Tensor) -> int:
        self._alive.append(tensor.detach().float().contiguous())
        return self._alive[-1].data_ptr()

    def _matrix(self, weight: torch.Tensor, bias: int | None = None, bits: int = 4) -> native.Matrix:
        """Quantized like the model's matrices; the LM head's rows are always int8, as the model's are."""
        weight = weight.detach().contiguous()
        if self.setting is None or not can_hold(weight):
            self._alive.append(weight if weight.dtype == torch.bfloat16 else weight.float())
            self._packed_bytes += self._alive[-1].nbytes
            return float_matrix(self._alive[-1], bias)
        is_coarse = self.setting == "int4" and bits == 4
        found: Packed = packed(rounded_to_4(weight) if is_coarse else rounded_to_8(weight))
        self._alive.append(found.data)
        self._packed_bytes += found.nbytes
        return native.Matrix(found.data.data_ptr(), bias, found.rows, found.columns, found.kind)


class CompiledHeadText(HeadText):
    """One text, whose positions are contiguous in one block."""

    placed: CompiledHead

    def _run(
        self, given: torch.Tensor, before: torch.Tensor, position: int, wants_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = before[0].float().clone(memory_format=torch.contiguous_format)
        return self._call(given, state, None, position, wants_logits)

    def _run_verified(
        self, given: torch.Tensor, states: torch.Tensor, wants_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = torch.empty((len(states), self.head.shape.hidden))
        return self._call(given, state, states.float().contiguous(), self.length, wants_logits)

    def _call(
        self,
        given: torch.Tensor,
        state: torch.Tensor,
        joined: torch.Tensor | None,
        position: int,
        wants_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One compiled call, from the state before each token, or from states that the call joins to it."""
        count, placed = given.shape[1], self.placed
        end = position + count
        self._make_room(end, state)
        assert self.keys is not None
        assert self.values is not None
        beside = given[0].float().contiguous()
        cosine, sine = placed.angles(end)
        logits = torch.empty((1 if wants_logits else 0, len(self.head.vocabulary)))
        numbers = ctypes.c_int64 * count
        whole = native.Segment(0, count, placed._no_maps)
        table = ctypes.c_int64(0)
        pointer = ctypes.c_void_p * 1
        arguments = native.Pass(
            tokens=count,
            batch=1,
            row=numbers(),
            column=numbers(*range(position - 1, end - 1)),  # position 0 has no key
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            state=state.data_ptr(),
            keys=pointer(self.keys.data_ptr()),
            values=pointer(self.values.data_ptr()),
            table=ctypes.addressof(table),
            most=1,
            block=self.keys.shape[0],
            halves=0,
            running=numbers(count),
            segment=ctypes.pointer(whole),
            segments=1,
            wanted=numbers(count - 1),
            logits_wanted=len(logits),
            logits=logits.data_ptr(),
            threads=threads(),
            beside=beside.data_ptr(),
            joined=None if joined is None else joined.data_ptr(),
        )
        placed.code.run(placed.model, arguments)
        return state[None].to(placed.weight.dtype), logits if wants_logits else None

    def _make_room(self, positions: int, like: torch.Tensor) -> None:
        """(position, heads, size), the layout of a block in the compiled pass."""
        held = 0 if self.keys is None else self.keys.shape[0]
        if positions <= held:
            return
        shape = (self.grown(held, positions), self.head.shape.key_value_heads, self.head.shape.head_size)
        for name in ("keys", "values"):
            old, new = getattr(self, name), torch.zeros(shape)
            if old is not None:
                new[:held] = old
            setattr(self, name, new)
