"""A stack whose passes are one call of compiled code, and how a model gets one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from depthdecay.cache import PlannedCache
from depthdecay.cpu import library as native
from depthdecay.cpu.blocks import BFLOAT16, FLOAT32, Packed
from depthdecay.cpu.form import PROJECTIONS, Form, OtherForm, form_of, hooked
from depthdecay.cpu.threads import threads
from depthdecay.cpu.weights import QUANTIZED, Rounded, check_setting, rounded, widened_weights
from depthdecay.errors import DepthDecayError
from depthdecay.origin import Origin
from depthdecay.repairs import Repair
from depthdecay.short_head import ShortHead
from depthdecay.stack import LayerPass, Stack, patched, primary_device

# With the model's own weights longer passes are the model's own: for many tokens torch's products are the faster ones.
FEW_TOKENS = 16
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the largest logit, against the model's own forward
_HUGE_PAGE = 2 << 20


def open_stack(
    model: Any,
    *,
    quantize: str | None = None,
    origin: Origin | None = None,
    fast: bool | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Stack:
    """The model's layers with the fastest passes there are: compiled on a CPU where it can be, else the model's own.

    `quantize` says how weights are read (none, int8, int4); what cannot be so runs as it is, and a warning says why.
    """
    check_setting(quantize)
    plain = Stack.of(model)
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


def _fast_stack(
    plain: Stack,
    form: Form,
    setting: str | None,
    origin: Origin | None,
    fast: bool | None,
    say: Callable[[str], None],
) -> Stack:
    code = None if fast is False else _code()
    if code is None:
        if setting is None or rounded(form, setting, origin, say).is_exact:
            return plain
        return WidenedStack.over(plain, form, setting, origin)
    trial = CpuStack(plain.model, plain.owner, plain.layers, plain.windows)
    trial.prepare(code, form, None)
    difference = trial.difference()
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


def _code() -> native.Library | None:
    try:
        return native.library()
    except native.Unavailable as reason:
        _warn_once(f"without compiled code decoding on the CPU is several times slower: {reason}")
        return None


def widen_in_place(model: Any, setting: str, origin: Origin | None = None) -> None:
    """Give a model the weights that it has at a setting: calibration looks into layers, which compiled code hides.

    An output matrix that is the embedding too stays as it is: embeddings are not rounded.
    """
    check_setting(setting)
    plain = Stack.of(model)
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


class WidenedStack(Stack):
    """Rounded weights without compiled code: the model's own forward, given what the rounded weights stand for."""

    widened: dict[str, torch.Tensor]
    head: nn.Linear
    head_weight: torch.Tensor

    @classmethod
    def over(cls, plain: Stack, form: Form, setting: str, origin: Origin | None) -> WidenedStack:
        stack = cls(plain.model, plain.owner, plain.layers, plain.windows)
        names = {id(parameter): name for name, parameter in plain.model.named_parameters()}
        weights = widened_weights(form, setting, origin)
        stack.head, stack.head_weight = form.head, weights.pop("head", form.head.weight)
        linears = dict(form.matrices())
        stack.widened = {names[id(linears[name].weight)]: weight for name, weight in weights.items()}
        return stack

    def for_batches(self) -> Stack:
        return self

    def forward(self, **arguments: Any) -> Any:
        # The head may be the embedding too, which is not rounded: it is replaced by what it does.
        def said(state: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(state, self.head_weight, self.head.bias)

        with contextlib.nullcontext() if "forward" in self.head.__dict__ else patched(self.head, "forward", said):
            return torch.func.functional_call(self.model, self.widened, kwargs=arguments)


class RoundedStack(Stack):
    """Rounded weights for any cache: the model's own forward, in which each product with them is compiled code."""

    source: CpuStack  # whose weights these are
    products: list[tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]]

    @classmethod
    def over(cls, source: CpuStack, weights: Rounded) -> RoundedStack:
        stack = cls(source.model, source.owner, source.layers, source.windows)
        stack.source = source
        stack.products = [
            (linear, _product(source.code, source.packed_matrix(name, packed), linear, name in weights.kept))
            for name, linear in source.form.matrices()
            if (packed := weights.matrices.get(name)) is not None
        ]
        return stack

    def for_batches(self) -> Stack:
        return self

    def forward(self, **arguments: Any) -> Any:
        given = [(linear.__dict__, product) for linear, product in self.products if "forward" not in linear.__dict__]
        try:
            for attributes, product in given:
                attributes["forward"] = product
            return self.model(**arguments)
        finally:
            for attributes, _ in given:
                attributes.pop("forward", None)

    def layer_bytes(self) -> tuple[int, ...]:
        return self.source.layer_bytes()

    def head_bytes(self) -> int:
        return self.source.head_bytes()


def _product(
    code: native.Library, matrix: native.Matrix, linear: nn.Linear, is_exact: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """In the place of a linear module's forward; of many tokens torch's is faster, and used where weights are exact."""

    def product(state: torch.Tensor) -> torch.Tensor:
        if is_exact and state.numel() > FEW_TOKENS * matrix.columns:
            return nn.functional.linear(state, linear.weight, linear.bias)
        x = state.detach().reshape(-1, matrix.columns).float().contiguous()
        result = torch.empty((len(x), matrix.rows))
        code.product(ctypes.byref(matrix), x.data_ptr(), len(x), result.data_ptr(), threads())
        if linear.bias is not None:
            result += linear.bias
        return result.view(*state.shape[:-1], matrix.rows).to(state.dtype)

    return product


@dataclass
class _Text:
    """What the passes of one cache have in common."""

    keys: Any
    values: Any
    halves: bool
    rooms: list[int]


class CpuStack(Stack):
    """Passes over a few tokens by one compiled call; with rounded weights all passes.

    What it needs is read from the model itself. Its own weights are used where they lie, so nothing is copied and a
    change of them is seen by the next text; rounded ones are those of the time they were made.
    """

    rounded: Rounded | None = None
    _is_plain = True
    _short: tuple[ShortHead, torch.Tensor | None, native.Model] | None

    def prepare(self, code: native.Library, form: Form, weights: Rounded | None) -> None:
        self.code, self.form, self.rounded = code, form, weights
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._maps: dict[Any, Any] = {}
        self._text: tuple[PlannedCache, _Text] | None = None
        self._places = {name: _in_huge_pages(m.data) for name, m in weights.matrices.items()} if weights else {}
        self._read_weights()

    def run(
        self,
        layer_pass: LayerPass,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        position_ids: torch.Tensor,
        keep: int = 1,
        short: ShortHead | None = None,
    ) -> torch.Tensor:
        with self.exclusive():
            if cache.clock.filled == 0 and self.rounded is None:
                self._is_plain = not hooked(self)
                self._read_weights()
            if cache.clock.position is not None or not self._can_run(layer_pass, ids):
                return super().run(layer_pass, ids, mask, cache, position_ids, keep, short)
            return self._compiled(layer_pass, ids, mask, cache, position_ids, keep, short)

    def for_batches(self) -> Stack:
        return super().for_batches() if self.rounded is None else RoundedStack.over(self, self.rounded)

    @property
    def weights(self) -> native.Model:
        """What lies where, as the compiled pass takes it."""
        return self._model

    @property
    def vocabulary(self) -> int:
        return int(self._model.head.rows)

    def packed_matrix(self, name: str, packed: Packed, bias: int | None = None) -> native.Matrix:
        return native.Matrix(self._places[name].data_ptr(), bias, packed.rows, packed.columns, packed.kind)

    def _can_run(self, layer_pass: LayerPass, ids: torch.Tensor) -> bool:
        known = layer_pass.run_layer is None and all(isinstance(m, Repair) for m in layer_pass.repairs.values())
        return known and (self.rounded is not None or (ids.numel() <= FEW_TOKENS and self._is_plain))

    def _compiled(
        self,
        layer_pass: LayerPass,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: PlannedCache,
        position_ids: torch.Tensor,
        keep: int,
        short: ShortHead | None,
    ) -> torch.Tensor:
        filled, (batch, length) = cache.clock.filled, ids.shape
        text = self._text_of(cache, batch)
        maps, needed, runnings = self._route_of(layer_pass)
        room = min((text.rooms[layer] for layer in needed), default=filled + length)
        if filled + length > room:
            raise DepthDecayError(f"a layer was given position {filled + length}, but the plan left it room for {room}")
        rows, columns, firsts, kept = _tokens(batch, length, filled, mask)
        ids, positions = ids.reshape(-1), position_ids.expand(batch, length).reshape(-1)
        count = len(rows)
        if count not in runnings:
            numbers_by_layer = (count if layer in needed else 0 for layer in range(self.num_layers))
            runnings[count] = (ctypes.c_int64 * self.num_layers)(*numbers_by_layer)
        if count < len(ids):
            chosen = torch.tensor(kept)
            ids, positions = ids[chosen], positions[chosen]
        state = nn.functional.embedding(ids, self.form.embedding.weight).float()
        cosine, sine = self.angles_at(positions)
        # Of every text the last `keep` tokens; texts end in the same column.
        ends = [index for index in range(count) if columns[index] >= filled + length - keep]
        model = self._model if short is None else self._shortened(short)
        logits = torch.empty((batch, keep, model.head.rows))
        numbers = ctypes.c_int64 * count
        arguments = native.Pass(
            tokens=count,
            batch=batch,
            row=numbers(*rows),
            column=numbers(*columns),
            first=numbers(*firsts),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            state=state.data_ptr(),
            keys=text.keys,
            values=text.values,
            halves=text.halves,
            running=runnings[count],
            segment=ctypes.pointer(native.Segment(0, count, maps)),
            segments=1,
            wanted=(ctypes.c_int64 * len(ends))(*ends),
            logits_wanted=len(ends),
            logits=logits.data_ptr(),
            threads=threads(),
        )
        layer_pass.layers_executed += self.code.run(model, arguments)
        return logits

    def _shortened(self, short: ShortHead) -> native.Model:
        """The same model with fewer rows in its output matrix; they stay where they are while their content changes."""
        if self._short is None or self._short[0] is not short:
            bias = None if short.bias is None else short.bias.float()
            model = native.Model.from_buffer_copy(self._model)
            model.head = _float_matrix(short.weight, None if bias is None else bias.data_ptr())
            self._short = (short, bias, model)
        return self._short[2]

    def _text_of(self, cache: PlannedCache, batch: int) -> _Text:
        if self._text is not None and self._text[0] is cache and cache.clock.filled > 0:
            return self._text[1]
        form = self.form
        for layer in cache.planned:
            if layer.keys is None:
                example = torch.empty((batch, form.key_value_heads, 0, form.head_size), dtype=form.dtype)
                layer.lazy_initialization(example, example)
        pointers = ctypes.c_void_p * self.num_layers
        keys, values = ([states.data_ptr() for states in kept] for kept in zip(*_states(cache), strict=True))
        halves = cache.planned[0].keys is not None and cache.planned[0].keys.dtype == torch.bfloat16
        text = _Text(pointers(*keys), pointers(*values), halves, [layer.room for layer in cache.planned])
        self._text = (cache, text)
        return text

    def _route_of(self, layer_pass: LayerPass) -> tuple[Any, list[int], dict[int, Any]]:
        """Maps in the place of layers, the layers that run, and how many tokens run each; made once for each."""
        repairs: Mapping[int, Any] = layer_pass.repairs
        key = (layer_pass.dropped, tuple((start, id(repair)) for start, repair in repairs.items()))
        if key not in self._maps:
            needed = [layer for layer in range(self.num_layers) if layer not in layer_pass.dropped]
            own = {start: repair for start, repair in repairs.items() if start in layer_pass.dropped}
            maps, alive = made_maps(own, self.num_layers)
            self._maps[key] = (maps, needed, {}, alive, dict(repairs))  # the last two keep alive what is pointed at
        maps, needed, runnings = self._maps[key][:3]
        return maps, needed, runnings

    def angles_at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine by token, (tokens, head size), from a table that the model's own module fills."""
        last = int(positions.max()) if positions.numel() > 1 else int(positions)
        if self._angles is None or last >= self._angles[0].shape[0]:
            known = max(512, 1 << last.bit_length())
            places = torch.arange(known).unsqueeze(0)
            cosine, sine = self.form.angles(torch.empty(0, dtype=torch.float32), places)
            self._angles = cosine[0].contiguous(), sine[0].contiguous()
        cosine, sine = self._angles
        if positions.numel() == 1:
            return cosine[last], sine[last]
        return cosine[positions], sine[positions]

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
        self._model = native.Model(
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

    @torch.no_grad()
    def difference(self) -> float:
        """How far a compiled pass is from the model's own forward: embedding, first and last layer, output matrix."""
        count = min(5, self.form.embedding.num_embeddings)
        ids = torch.arange(count).unsqueeze(0) * (self.form.embedding.num_embeddings // count)
        positions = torch.arange(count).unsqueeze(0)
        between = frozenset(range(1, self.num_layers - 1))
        said = []
        for run in (super().run, self.run):
            cache = PlannedCache([count] * self.num_layers, self.windows)
            said.append(run(LayerPass(between), ids, None, cache, positions, count).float())
        return float((said[0] - said[1]).abs().max() / said[0].abs().max())

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


def _states(cache: PlannedCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for layer in cache.planned:
        assert layer.keys is not None
        assert layer.values is not None
        found.append((layer.keys, layer.values))
    return found


def _tokens(
    batch: int, length: int, filled: int, mask: torch.Tensor | None
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Of each token but the padding: its text, its column, where that text begins, and its place in `ids`."""
    begins = [0] * batch if mask is None else (mask.cumsum(1) == 0).sum(1).tolist()
    places = [
        (row, filled + column, begins[row], row * length + column)
        for row in range(batch)
        for column in range(length)
        if filled + column >= begins[row]
    ]
    rows, columns, firsts, kept = zip(*places, strict=True)
    return list(rows), list(columns), list(firsts), list(kept)


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


def made_maps(repairs: Mapping[int, Any], layers: int) -> tuple[Any, Any]:
    """Maps by layer as the compiled pass takes them, and what must live as long as they do."""
    maps = (ctypes.POINTER(native.Map) * layers)()
    made = {start: _map(repair) for start, repair in repairs.items()}
    for start, (structure, _) in made.items():
        maps[start] = ctypes.pointer(structure)
    return maps, made


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
