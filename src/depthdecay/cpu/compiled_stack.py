"""A model whose passes are one call of compiled code: how it gets there, and what that call is given."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from depthdecay.cpu import kernel_library as native
from depthdecay.cpu.packed_weights import QUANTIZED, Rounded, check_setting, rounded, widened_weights
from depthdecay.cpu.quantized_blocks import BFLOAT16, FLOAT32, Packed
from depthdecay.cpu.supported_models import PROJECTIONS, Form, OtherForm, form_of, hooked
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import KeptShape, LayerStack, primary_device
from depthdecay.model.load import LoadedModel
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.patches import patched
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import Part
from depthdecay.runners.forward import ForwardRunner
from depthdecay.runners.kv_blocks import KVBlocks
from depthdecay.speculative.short_head import ShortHead

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the largest logit, against the model's own forward
_HUGE_PAGE = 2 << 20


def open_stack(
    model: Any,
    *,
    quantize: str | None = None,
    origin: WeightsOrigin | None = None,
    fast: bool | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> LayerStack:
    """The model's layers with the fastest passes there are: compiled on a CPU where it can be, else the model's own.

    `quantize` says how weights are read (none, int8, int4); what cannot be so runs as it is, and a warning says why.
    """
    check_setting(quantize)
    plain = LayerStack.of(model)
    setting = quantize if quantize in QUANTIZED else None
    device = primary_device(plain.model)
    if device.type != "cpu":
        if setting is not None:
            raise DepthDecayError(f"quantize={quantize} is for models on a CPU, and this one is on {device}")
        return plain
    if fast is False and setting is None:
        return plain
    try:
        form = form_of(plain)
        if hooked(plain):
            raise OtherForm("code of somebody else hangs on it (hooks, or another forward)")
    except OtherForm as reason:
        if setting is not None or fast:
            _warn(f"{type(plain.model).__name__} runs as it is, in its own precision: {reason}")
        return plain
    return _fast_stack(plain, form, setting, origin, fast, say)


def own_setting(quantize: str | None, loaded: LoadedModel) -> str | None:
    """What was asked for; else of the embedded model its file's own blocks, which are the model itself."""
    if quantize is not None or loaded.source != "embedded" or loaded.model.device.type != "cpu":
        return quantize
    return "int4" if loaded.model.dtype == torch.float32 else None


def _fast_stack(
    plain: LayerStack,
    form: Form,
    setting: str | None,
    origin: WeightsOrigin | None,
    fast: bool | None,
    say: Callable[[str], None],
) -> LayerStack:
    code = None if fast is False else _code()
    if code is None:
        if setting is None or rounded(form, setting, origin, say).is_exact:
            return plain
        return WidenedStack.over(plain, form, setting, origin)
    trial = CompiledLayerStack(plain.model, plain.owner, plain.layers, plain.windows)
    trial.prepare(code, form, None)
    difference = _difference(trial)
    if not difference < _TOLERANCE[form.dtype]:
        if setting is not None or fast:
            _warn(
                f"{type(plain.model).__name__} runs as it is, in its own precision: a compiled pass says something "
                f"else (logits differ by {difference:.2g} of the largest)"
            )
        return plain
    if setting is not None:
        trial.prepare(code, form, rounded(form, setting, origin, say))
    return trial


@torch.no_grad()
def _difference(stack: CompiledLayerStack) -> float:
    """How far a compiled pass is from the model's own forward: embedding, first and last layer, output matrix."""
    from depthdecay.cpu.compiled_rows import CompiledRows

    layers, vocabulary = stack.num_layers, stack.form.embedding.num_embeddings
    count = min(5, vocabulary)
    ends = Plan.constant(layers, min(2, layers), drop_order=list(range(1, layers - 1)))
    part = Part(0, 0, [token * (vocabulary // count) for token in range(count)], min(2, layers), ends, count)
    said = []
    for way in (ForwardRunner, CompiledRows):
        blocks = KVBlocks.of_rows(stack.kept_shapes(), [[count] * layers])
        said.append(way(stack, blocks, Repairs()).run([part]).logits.float())
    return float((said[0] - said[1]).abs().max() / said[0].abs().max())


def _code() -> native.Library | None:
    try:
        return native.library()
    except native.Unavailable as reason:
        _warn_once(f"without compiled code decoding on the CPU is several times slower: {reason}")
        return None


def widen_in_place(model: Any, setting: str, origin: WeightsOrigin | None = None) -> None:
    """Give a model the weights that it has at a setting: calibration looks into layers, which compiled code hides.

    An output matrix that is the embedding too stays as it is: embeddings are not rounded.
    """
    check_setting(setting)
    plain = LayerStack.of(model)
    device = primary_device(plain.model)
    if device.type != "cpu":
        raise DepthDecayError(f"quantize={setting} is for models on a CPU, and this one is on {device}")
    try:
        form = form_of(plain)
    except OtherForm as reason:
        _warn(f"{type(plain.model).__name__} stays in its own precision: {reason}")
        return
    weights = widened_weights(form, setting, origin)
    with torch.no_grad():
        for name, linear in form.matrices():
            if name in weights and linear.weight is not form.embedding.weight:
                linear.weight.copy_(weights[name])


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


@functools.cache
def _warn_once(message: str) -> None:
    _warn(message)


class WidenedStack(LayerStack):
    """Rounded weights without compiled code: the model's own forward, given what the rounded weights stand for."""

    widened: dict[str, torch.Tensor]
    head: nn.Linear
    head_weight: torch.Tensor

    @classmethod
    def over(cls, plain: LayerStack, form: Form, setting: str, origin: WeightsOrigin | None) -> WidenedStack:
        stack = cls(plain.model, plain.owner, plain.layers, plain.windows)
        names = {id(parameter): name for name, parameter in plain.model.named_parameters()}
        weights = widened_weights(form, setting, origin)
        stack.head, stack.head_weight = form.head, weights.pop("head", form.head.weight)
        linears = dict(form.matrices())
        stack.widened = {names[id(linears[name].weight)]: weight for name, weight in weights.items()}
        return stack

    def forward(self, **arguments: Any) -> Any:
        # The head may be the embedding too, which is not rounded: it is replaced by what it does.
        def said(state: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(state, self.head_weight, self.head.bias)

        with contextlib.nullcontext() if "forward" in self.head.__dict__ else patched(self.head, "forward", said):
            return torch.func.functional_call(self.model, self.widened, kwargs=arguments)


class CompiledLayerStack(LayerStack):
    """A model whose passes can be one compiled call (compiled_rows.py): what lies where, as that call takes it.

    It is read from the model itself. Its own weights are used where they lie, so nothing is copied and a change of them
    is seen by the next text; rounded ones are those of the time they were made.
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
        """See the model as it is now; False where code of somebody else hangs on it, which a call would not run."""
        if self.rounded is None:
            if hooked(self):
                return False
            self._read_weights()
        return True

    @property
    def is_rounded(self) -> bool:
        """Whether the model's own forward would compute with other weights."""
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
        """The same model with fewer rows in its output matrix; they stay where they are while their content changes."""
        if self._short is None or self._short[0] is not short:
            bias = None if short.bias is None else short.bias.float()
            model = native.ModelStruct.from_buffer_copy(self._model)
            model.head = _float_matrix(short.weight, None if bias is None else bias.data_ptr())
            self._short = (short, bias, model)
        return self._short[2]

    def maps_at(self, repairs: Repairs, depth: int) -> Any:
        """Maps in the place of dropped layers, by layer, as a call takes them; made once for each depth."""
        key = (id(repairs), depth)
        if key not in self._maps:
            maps = (ctypes.POINTER(native.Map) * self.num_layers)()
            made = {start: _map(repair) for start, repair in repairs.at(depth).items()}
            for start, (structure, _) in made.items():
                maps[start] = ctypes.pointer(structure)
            self._maps[key] = (maps, made, repairs)  # the last two keep alive what is pointed at
        return self._maps[key][0]

    def angles_at(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine by token, (tokens, head size), from a table that the model's own module fills."""
        last = max(positions)
        if self._angles is None or last >= self._angles[0].shape[0]:
            known = max(512, 1 << last.bit_length())
            places = torch.arange(known).unsqueeze(0)
            cosine, sine = self.form.angles(torch.empty(0, dtype=torch.float32), places)
            self._angles = cosine[0].contiguous(), sine[0].contiguous()
        cosine, sine = self._angles
        if len(positions) == 1:
            return cosine[last], sine[last]
        chosen = torch.tensor(positions)
        return cosine[chosen], sine[chosen]

    def _read_weights(self) -> None:
        """The table of what lies where. Norms and biases are few: in 16 bits they are widened here."""
        form, alive = self.form, []

        def floats(tensor: torch.Tensor | None) -> int | None:
            if tensor is None:
                return None
            alive.append(tensor.detach().float().contiguous())
            return alive[-1].data_ptr()

        def matrix(name: str, linear: nn.Linear) -> native.Matrix:
            packed: Packed | None = None if self.rounded is None else self.rounded.matrices.get(name)
            if packed is not None:
                return self.packed_matrix(name, packed, floats(linear.bias))
            return _float_matrix(linear.weight.detach(), floats(linear.bias))

        table = (native.Layer * len(form.layers))()
        for index, layer in enumerate(form.layers):
            for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm"):
                setattr(table[index], name, floats(getattr(getattr(layer, name), "weight", None)))
            for name in PROJECTIONS:
                setattr(table[index], name, matrix(f"{index}.{name}", layer.projections[name]))
            table[index].window = self.windows[index] or 0
        self._alive, self._table, self._short = alive, table, None
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
        )

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


def _float_matrix(weight: torch.Tensor, bias: int | None = None) -> native.Matrix:
    kind = FLOAT32 if weight.dtype == torch.float32 else BFLOAT16
    return native.Matrix(weight.data_ptr(), bias, weight.shape[0], weight.shape[1], kind)


def _map(repair: Repair) -> tuple[native.Map, list[torch.Tensor]]:
    """A map as the compiled pass takes it, and the tensors that it points at."""
    kind = repair.bias.dtype if repair.bias.dtype in (torch.float32, torch.bfloat16) else torch.float32
    parts = [part.detach().to(kind).contiguous() for part in repair.parts]
    bias = repair.bias.detach().float().contiguous()
    found = native.Map(down=_float_matrix(parts[0]), up=_float_matrix(parts[1], bias.data_ptr()))
    if len(parts) == 6:
        found.gate, found.lift, found.out = (_float_matrix(part) for part in parts[3:])
    return found, [*parts, bias]


def _in_huge_pages(data: torch.Tensor) -> torch.Tensor:
    """A copy in memory of large pages, where the system has them: a file's own pages are small, and many to look up."""
    import mmap

    size = -(-data.numel() // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=data.numel())
    copy.copy_(data)
    return copy
