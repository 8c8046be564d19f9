"""Layers compiled once per kind, with our own kernels. Weights and cache are inputs, so layers of a kind share code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from depthdecay.cuda.exactness import Exactness
from depthdecay.cuda.experts import experts_apart
from depthdecay.cuda.kernels import gemv
from depthdecay.cuda.kernels.dependent_launch import waiting_first
from depthdecay.cuda.last_sum import Carried, added, in_addends
from depthdecay.library_internals import vary_sizes
from depthdecay.model.devices import overlaps_kernels
from depthdecay.model.kv_cache import OneLayer
from depthdecay.model.layers import LayerPass, LayerStack
from depthdecay.model.repairs import repaired_at_once
from depthdecay.patches import patched, replaced_each

# How many rows a pass multiplies matrices with: one; 2 to 16 ("few"); any number in a batch, with cuBLAS ("many") or
# with our own batch-invariant kernels ("any"). "few" and "any" are compiled once, with a dynamic number of rows (a size
# of 1 torch always specializes), and a row's result depends neither on the other rows nor on their number.
Rows = Literal["one", "few", "many", "any"]
Kind = tuple[type, int | None, Rows]  # a layer's class and window
CARRYING: Rows = "few"  # how layers are compiled that leave their last sum to the next one


def inductor_options(rows: Rows = "one") -> dict[str, Any]:
    """How layers are compiled: with our kernels for products with one or a few rows, and with overlapping launches."""
    from depthdecay.cuda.gemv_pass import GemvPass

    # Graphs of single layers are replayed with other graphs in between, so there is nothing to overlap with.
    overlap = overlaps_kernels() and rows in ("one", "few")
    kernels = GemvPass(overlap, "one" if rows == "many" else rows)
    options = {"post_grad_custom_pre_pass": kernels, "triton.enable_pdl": overlap}
    if overlap:
        # Small kernels that do not depend on each other (rotary embedding of queries and keys, writing to the cache)
        # become one: 1.50 to 1.44 ms a step of a 1.5B model. inductor would store a rotated key before it is written to
        # the cache, as it reads more and computes more than these numbers allow (realize_*); that is a kernel more.
        # With realize_reads_threshold=16 as well, so that each would sum the parts of more products, a step took 0.8%
        # longer.
        options |= {"combo_kernels": True, "realize_acc_reads_threshold": 64, "realize_opcount_threshold": 100}
    if is_exact(rows):
        # Split reductions depend on the number of rows: inductor splits a sum across programs when rows are few. And
        # within a kernel it does not round to 16 bits where the model does, so that a state would depend on whether it
        # is stored. Nor may a product with few outputs, such as a router's, be padded for cuBLAS where that is faster.
        options |= {"split_reductions": False, "emulate_precision_casts": True, "shape_padding": False}
    return options


def is_exact(rows: Rows) -> bool:
    """Whether a row's result is bitwise independent of how many rows run together."""
    return rows in ("few", "any")


@dataclass
class CompiledLayers:
    """One torch.compile per kind of layer, and per function around the layers."""

    kinds: dict[Kind, Any] = field(default_factory=dict)
    in_addends: dict[Kind, Any] = field(default_factory=dict)  # None: found not to end in a sum that can be left out
    functions: dict[Any, Any] = field(default_factory=dict)
    exactness: Exactness = field(default_factory=Exactness)
    zeros: dict[Any, torch.Tensor] = field(default_factory=dict)  # the first layer's second addend, by its shape

    def layer(self, stack: LayerStack, index: int, rows: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer. Meanwhile all layers must have one index, and the cache passed in must be this layer's own."""
        layer = stack.layers[index]
        kind = (type(layer), stack.windows[index], rows)
        if kind not in self.kinds:
            self.kinds[kind] = torch.compile(type(layer).forward, options=inductor_options(rows))
        if is_exact(rows):
            free_rows((args, kwargs), rows)
        return self.kinds[kind](layer, *args, **kwargs)

    def carrying_layer(
        self, stack: LayerStack, index: int, carried: Carried, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The same for layers in sequence, each of which leaves its last sum to the next one if it is of that form."""
        layer, mlp, rows = stack.layers[index], stack.gated_mlp(index), CARRYING
        kind = (type(layer), stack.windows[index], rows)
        hidden, *others = args
        if mlp is None or len(hidden) > 1 or self.in_addends.get(kind, ...) is None:
            return self.layer(stack, index, rows, (carried.whole(hidden), *others), kwargs)
        parts, left = gemv.tiling([mlp.down]).parts, carried.take(hidden)
        given = hidden, self._zeros((parts, *hidden.shape[1:]), hidden.device) if left is None else left
        is_first = kind not in self.in_addends
        if is_first:
            plain = in_addends(type(layer).forward, parts)
            self.in_addends[kind] = torch.compile(plain, options=inductor_options(rows))
        free_rows((given, others, kwargs), rows)
        output = self.in_addends[kind](layer, *given, *others, **kwargs)
        if is_first and not leaves_out(output, given[1]):
            # Nothing is left out. Run it as other layers of its kind will; it writes the same keys and values again.
            self.in_addends[kind] = None
            return self.layer(stack, index, rows, (added(*given), *others), kwargs)
        return carried.leave(*output)

    def _zeros(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Zeros that graphs may keep reading; made in the warm-up before a capture."""
        if (shape, device) not in self.zeros:
            self.zeros[shape, device] = torch.zeros(shape, device=device)
        return self.zeros[shape, device]

    def _added(self, rest: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        free_rows((rest, left), CARRYING)
        total: torch.Tensor = self.function(added, rows=CARRYING)(rest, left)
        return total

    def function(
        self, plain: Callable[..., Any], dynamic: bool | None = None, rows: Rows = "one"
    ) -> Callable[..., Any]:
        """Fuse a function of many small operations: in a shallow pass, small kernels take a sixth of the time."""
        if (plain, rows) not in self.functions:
            self.functions[plain, rows] = torch.compile(plain, dynamic=dynamic, options=inductor_options(rows))
        compiled: Callable[..., Any] = self.functions[plain, rows]
        return compiled

    def repair(self, repair: Any) -> Any:
        """A repair map, run by one compiled function that all maps share; compiled once per map shape."""
        compiled = self.function(repaired_at_once, dynamic=False)
        return lambda hidden: compiled(hidden, *repair.parts_at_once)

    def _repair(self, repair: Any, carried: Carried) -> Any:
        repaired = self.repair(repair)
        return lambda hidden: repaired(carried.whole(hidden))

    @contextlib.contextmanager
    def routed(
        self, stack: LayerStack, layer_pass: LayerPass, cache: Any, own: list[Any], rows: Rows
    ) -> Iterator[None]:
        """While open, a pass runs its layers, its repairs and the modules around them compiled.

        `own`: the cache that each layer gets instead of the whole one; with one shared index it would use layer 0's.
        """

        carried = Carried(self._added)

        def run_layer(index: int, _layer: Any, _forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = one_cache(args, kwargs, cache, own[index])
            if rows != CARRYING or not args:
                return self.layer(stack, index, rows, args, kwargs)
            output = self.carrying_layer(stack, index, carried, args, kwargs)
            is_last = all(later in layer_pass.dropped for later in range(index + 1, stack.num_layers))
            return carried.whole(output) if is_last or index in layer_pass.asked else output

        plain = layer_pass.repairs
        experts = experts_apart(stack) if is_exact(rows) else contextlib.nullcontext()
        with one_index(stack), waiting_first(), experts, self.beside(stack, rows):
            layer_pass.run_layer = run_layer
            layer_pass.repairs = {index: self._repair(repair, carried) for index, repair in plain.items()}
            try:
                yield
            finally:
                layer_pass.run_layer = None
                layer_pass.repairs = plain

    @contextlib.contextmanager
    def beside(self, stack: LayerStack, rows: Rows) -> Iterator[None]:
        """While open, the modules around the layers are compiled too: the final norm and the rotary embedding.

        In exact modes also the LM head, since cuBLAS picks its kernel by the number of rows.
        """
        with contextlib.ExitStack() as undo:
            for module in stack.owner.children():
                if type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
                    forward = functools.partial(self._with_rows, type(module).forward, rows, module)
                    undo.enter_context(patched(module, "forward", forward))
            head: Any = stack.model.get_output_embeddings()
            if is_exact(rows) and type(head) is nn.Linear:
                undo.enter_context(patched(head, "forward", functools.partial(self._output, head, rows)))
            yield

    def _with_rows(self, plain: Callable[..., Any], rows: Rows, *args: Any, **kwargs: Any) -> Any:
        if is_exact(rows):
            free_rows((args, kwargs), rows)
        return self.function(plain, rows=rows)(*args, **kwargs)

    def _output(self, head: nn.Linear, rows: Rows, hidden: torch.Tensor) -> torch.Tensor:
        free_rows(hidden, rows)
        logits: torch.Tensor = self.function(_linear, rows=rows)(hidden, head.weight, head.bias)
        return logits


def leaves_out(output: Any, left: torch.Tensor) -> bool:
    """Whether a layer has returned two addends; some layers return tuples of their own."""
    if not isinstance(output, tuple) or len(output) != 2 or not isinstance(output[1], torch.Tensor):
        return False
    return output[1].shape == left.shape and bool(output[1].any())


def _linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(hidden, weight, bias)


# Which dimensions of an argument count tokens or positions, keyed by its number of dimensions. A "few" pass runs tokens
# of one text; in an "any" pass the batch dimension varies too.
_FREE: dict[str, dict[int, tuple[int, ...]]] = {
    "few": {1: (0,), 2: (1,), 3: (1,), 4: (2, 3)},
    "any": {1: (0,), 2: (0, 1), 3: (0, 1), 4: (0, 2, 3)},
}


def free_rows(given: Any, rows: Rows = "few") -> None:
    """Mark the token and position dimensions of a function's arguments as dynamic before it is first compiled.

    Otherwise dynamo specializes on the first size it sees, and that compilation may sum in a different order.
    """
    if isinstance(given, torch.Tensor):
        if not isinstance(given, nn.Parameter):
            vary_sizes(given, _FREE[rows].get(given.dim(), ()))
    elif isinstance(given, OneLayer):
        for tensor in given.tensors:  # (position, …)
            vary_sizes(tensor, (0,))
    elif isinstance(given, tuple | list):
        for one in given:
            free_rows(one, rows)
    elif isinstance(given, dict):
        free_rows(tuple(given.values()), rows)


def one_cache(args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any, own: Any) -> Any:
    """A layer's arguments, with its own cache layer instead of the whole cache."""
    if sum(value is cache for value in (*args, *kwargs.values())) != 1:  # the argument's name varies by architecture
        raise RuntimeError("expected the layer to take the KV cache as exactly one argument")
    return (
        tuple(own if value is cache else value for value in args),
        {name: own if value is cache else value for name, value in kwargs.items()},
    )


@contextlib.contextmanager
def one_index(stack: LayerStack) -> Iterator[None]:
    """While open, all layers have the same index, so that one compilation serves them all."""
    indexed = stack.attending
    # Batch sizes, layer kinds and lengths each count as a recompilation of the same function.
    with replaced_each(indexed, "layer_idx", [0] * len(indexed)), torch.compiler.config.patch(recompile_limit=64):  # type: ignore[attr-defined]
        yield
