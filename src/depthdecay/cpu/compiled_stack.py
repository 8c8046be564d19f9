"""A model whose passes are one call into compiled code: prepares that call's arguments."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from depthdecay.cpu import kernel_library as native
from depthdecay.cpu.packed_weights import Rounded
from depthdecay.cpu.quantized_blocks import BFLOAT16, FLOAT32, Packed
from depthdecay.cpu.supported_models import PROJECTIONS, Form, hooked
from depthdecay.model.layers import KeptShape, LayerStack
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.speculative.short_head import ShortHead

_HUGE_PAGE = 2 << 20


class CompiledLayerStack(LayerStack):
    """A model whose passes can be one compiled call (compiled_rows.py): its weights as pointers for that call.

    The model's own weights are used in place: nothing is copied, and changed weights take effect with the next text.
    Quantized weights are a snapshot.
    """

    rounded: Rounded | None = None

    def prepare(self, code: native.Library, form: Form, weights: Rounded | None) -> None:
        self.code, self.form, self.rounded = code, form, weights
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._maps: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._short: tuple[ShortHead, torch.Tensor | None, native.ModelStruct] | None = None
        self._places = {name: _in_huge_pages(m.data) for name, m in weights.matrices.items()} if weights else {}
        self._read_weights()

    def refresh(self) -> bool:
        """Re-read the model. False if it has hooks or a patched forward, which the compiled call would skip."""
        if self.rounded is None:
            if hooked(self):
                return False
            self._read_weights()
        return True

    @property
    def is_rounded(self) -> bool:
        """Whether weights are quantized, so that the model's own forward would give different results."""
        return self.rounded is not None

    @property
    def has_compiled_pass(self) -> bool:
        return True

    def kept_shapes(self) -> list[KeptShape]:
        form = self.form
        kept = (form.key_value_heads, form.head_size)
        return [KeptShape(kept, kept, form.dtype, torch.device("cpu"))] * self.num_layers

    @property
    def weights(self) -> native.ModelStruct:
        return self._model

    def packed_matrix(self, name: str, packed: Packed, bias: int | None = None) -> native.Matrix:
        return native.Matrix(self._places[name].data_ptr(), bias, packed.rows, packed.columns, packed.kind)

    def shortened(self, short: ShortHead) -> native.ModelStruct:
        """The same model with a shortened LM head, which is read in place, so its contents may change."""
        if self._short is None or self._short[0] is not short:
            bias = None if short.bias is None else short.bias.float()
            model = native.ModelStruct.from_buffer_copy(self._model)
            model.head = float_matrix(short.weight, None if bias is None else bias.data_ptr())
            model.alive = [*self._model.alive, bias]
            self._short = (short, bias, model)
        return self._short[2]

    def maps_at(self, repairs: Repairs, depth: int) -> Any:
        """Repair maps by layer, as pointers for the call; built once per depth."""
        key = (id(repairs), depth)
        if key not in self._maps:
            maps = (ctypes.POINTER(native.Map) * self.num_layers)()
            made = {start: _map(repair) for start, repair in repairs.at(depth).items()}
            for start, (structure, _) in made.items():
                maps[start] = ctypes.pointer(structure)
            self._maps[key] = (maps, made, repairs)  # the last two keep the pointed-to tensors alive
        return self._maps[key][0]

    def angles_up_to(self, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary embedding's cosine and sine by position, (positions, head size), up to and with `last`."""
        if self._angles is None or last >= self._angles[0].shape[0]:
            known = max(512, 1 << last.bit_length())
            places = torch.arange(known).unsqueeze(0)
            cosine, sine = self.form.angles(torch.empty(0, dtype=torch.float32), places)
            self._angles = cosine[0].contiguous(), sine[0].contiguous()
        return self._angles

    def _read_weights(self) -> None:
        """Build the table of weight pointers. Norms and biases are small: 16-bit ones are widened to float32 here."""
        form = self.form
        alive: list[Any] = []

        def floats(tensor: torch.Tensor | None) -> int | None:
            if tensor is None:
                return None
            alive.append(tensor.detach().float().contiguous())
            return alive[-1].data_ptr()

        def matrix(name: str, linear: nn.Linear) -> native.Matrix:
            packed: Packed | None = None if self.rounded is None else self.rounded.matrices.get(name)
            if packed is not None:
                return self.packed_matrix(name, packed, floats(linear.bias))
            alive.append(linear.weight.detach())
            return float_matrix(alive[-1], floats(linear.bias))

        table = (native.Layer * len(form.layers))()
        for index, layer in enumerate(form.layers):
            for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm"):
                setattr(table[index], name, floats(getattr(getattr(layer, name), "weight", None)))
            for name in PROJECTIONS:
                setattr(table[index], name, matrix(f"{index}.{name}", layer.projections[name]))
            table[index].window = self.windows[index] or 0
        alive.append(form.embedding.weight.detach())
        embedding = float_matrix(alive[-1])
        alive.append(table)
        self._short = None
        self._model = native.ModelStruct(
            hidden=form.embedding.embedding_dim,
            heads=form.heads,
            key_value_heads=form.key_value_heads,
            head_size=form.head_size,
            neurons=form.layers[0].projections["gate"].out_features,
            layers=len(form.layers),
            epsilon=form.epsilon,
            scale=form.scale,
            layer=table,
            final_norm=floats(getattr(form.final_norm, "weight", None)),
            head=matrix("head", form.head),
            embedding=embedding,
        )
        # With the structure, not with this object: a text that has begun goes on with it when weights are read again.
        self._model.alive = alive

    def layer_bytes(self) -> tuple[int, ...]:
        found = super().layer_bytes()
        if self.rounded is None:
            return found
        sizes = list(found)
        for name, linear in self.form.matrices():
            packed = self.rounded.matrices.get(name)
            if packed is not None and name != "head":
                sizes[int(name.split(".")[0])] += packed.nbytes - linear.weight.nbytes
        return tuple(sizes)

    def head_bytes(self) -> int:
        packed = None if self.rounded is None else self.rounded.matrices.get("head")
        return super().head_bytes() if packed is None else packed.nbytes


def float_matrix(weight: torch.Tensor, bias: int | None = None) -> native.Matrix:
    kind = FLOAT32 if weight.dtype == torch.float32 else BFLOAT16
    return native.Matrix(weight.data_ptr(), bias, weight.shape[0], weight.shape[1], kind)


def _map(repair: Repair) -> tuple[native.Map, list[torch.Tensor]]:
    """A map as the compiled pass expects it, and the tensors that it points to."""
    kind = repair.bias.dtype if repair.bias.dtype in (torch.float32, torch.bfloat16) else torch.float32
    parts = [part.detach().to(kind).contiguous() for part in repair.parts]
    bias = repair.bias.detach().float().contiguous()
    found = native.Map(down=float_matrix(parts[0]), up=float_matrix(parts[1], bias.data_ptr()))
    if len(parts) == 6:
        found.gate, found.lift, found.out = (float_matrix(part) for part in parts[3:])
    return found, [*parts, bias]


def _in_huge_pages(data: torch.Tensor) -> torch.Tensor:
    """A copy in huge pages, if the system has them: small ones, as of a mapped file, cost many TLB misses."""
    import mmap

    size = -(-data.numel() // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=data.numel())
    copy.copy_(data)
    return copy
