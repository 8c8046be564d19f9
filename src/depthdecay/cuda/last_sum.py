"""The sum that ends a layer, left to the next layer's first kernel.

A decoder layer ends by adding the MLP's product to the residual stream, and the next one starts by normalizing that
sum. Compiled one by one, layers need a kernel for each: 30 microseconds a step of a 1.5B model. So a layer returns the
two addends, the product still in its split-K parts, and the next layer adds them where it normalizes them, as it does
with the sum in its own middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from depthdecay.cuda.gate_pattern import VIEWS


@torch.library.custom_op("depthdecay::addends", mutates_args=())
def addends(total: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors whose sum is `total` (1, tokens, width): one like it, and float32 parts (parts, tokens, width).

    Where `total` was just computed as a sum with a product in parts, `give_addends` replaces this with its addends.
    """
    return total.clone(), total.new_zeros((parts, *total.shape[1:]), dtype=torch.float32)


@addends.register_fake
def _(total: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(total), total.new_empty((parts, *total.shape[1:]), dtype=torch.float32)


def added(rest: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """The sum of a layer's two addends."""
    return rest + parts.sum(0).to(rest.dtype)


def in_addends(forward: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """A layer's forward that takes and returns addends. Any other output than a tensor is returned as it is."""

    def run(layer: Any, rest: torch.Tensor, left: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(layer, added(rest, left), *args, **kwargs)
        return torch.ops.depthdecay.addends(output, parts) if isinstance(output, torch.Tensor) else output

    return run


def give_addends(graph: fx.Graph) -> None:
    """Replace each `addends` of a sum that ends in a product in parts by the residual and these parts."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.depthdecay.addends.default):
        found = _addends_of(*node.args)
        if found is None:
            continue
        for item in list(node.users):
            item.replace_all_uses_with(found[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


def _addends_of(total: Any, parts: Any) -> tuple[fx.Node, fx.Node] | None:
    """The two terms of a sum, if one of them is a product of so many parts and has the sum's shape."""
    if not isinstance(total, fx.Node) or total.target is not torch.ops.aten.add.Tensor or total.kwargs:
        return None
    for rest, product in (total.args, total.args[::-1]):
        left = _parts_of(product)
        if left is None or not isinstance(rest, fx.Node):
            continue
        alike = rest.meta["val"].shape == total.meta["val"].shape and rest.meta["val"].dtype == total.meta["val"].dtype
        if alike and left.meta["val"].shape[0] == parts and left.meta["val"].shape[1:] == total.meta["val"].shape[1:]:
            return rest, left
    return None


def _parts_of(product: Any) -> fx.Node | None:
    """The float32 parts of which a product is the whole sum."""
    node = product
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    for step in (
        torch.ops.aten.slice.Tensor,
        torch.ops.prims.convert_element_type.default,
        torch.ops.aten.sum.dim_IntList,
    ):
        if not isinstance(node, fx.Node) or node.target is not step:
            return None
        node = node.args[0]
    is_product = isinstance(node, fx.Node) and node.target is torch.ops.depthdecay.skinny_gemm.default
    return node if is_product and len(node.args[1]) == 1 else None  # type: ignore[arg-type]


class Carried:
    """What the layers of one pass have left to be added, between one layer and the next."""

    def __init__(self, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.add = add
        self.rest: torch.Tensor | None = None
        self.left: torch.Tensor | None = None

    def leave(self, rest: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Keep a layer's second addend until its first one, which the model passes on, comes back."""
        self.rest, self.left = rest, left
        return rest

    def take(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What is still to be added to a state, if anything; it is then no longer kept."""
        left, rest = self.left, self.rest
        self.left = self.rest = None
        if left is not None and hidden is not rest:
            raise RuntimeError("the model changes the state between layers, so a layer can't leave its last sum out")
        return left

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """A state with everything added."""
        left = self.take(hidden)
        return hidden if left is None else self.add(hidden, left)
