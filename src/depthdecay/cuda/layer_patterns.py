"""Finds in a traced layer what a product can do on its way: a norm before it, a gate or the residual behind it.

Only what is found exactly as the common architectures write it; all else stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default
_VIEWS = (_aten.view.default, _aten.reshape.default)


class Norm(NamedTuple):
    """An RMSNorm: of what, its weight, and what it adds to the mean of squares."""

    source: fx.Node
    weight: fx.Node
    epsilon: float


def is_view(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in _VIEWS


def source_of(node: fx.Node) -> fx.Node:
    """The tensor behind reshapes: each product comes with its own view of the same vector."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def norm_before(vector: fx.Node, products: Sequence[fx.Node]) -> Norm | None:
    """The norm that gives these products their vector and serves nobody else."""
    scaled = source_of(vector)
    if not _is(scaled, _aten.mul.Tensor) or not _only_feeds(scaled, set(products)):
        return None
    weight, rounded = scaled.args
    if not _is_weight(weight):
        weight, rounded = rounded, weight
    if not _is_weight(weight) or not _is(rounded, _convert):
        return None
    normed = rounded.args[0]  # type: ignore[union-attr]
    if not _is(normed, _aten.mul.Tensor):
        return None
    value, root = normed.args  # type: ignore[union-attr]
    if not _is_32_bits(value) or not _is(root, _aten.rsqrt.default):
        return None
    raised = root.args[0]  # type: ignore[union-attr]
    if not _is(raised, _aten.add.Tensor) or not isinstance(raised.args[1], float):  # type: ignore[union-attr]
        return None
    mean, epsilon = raised.args  # type: ignore[union-attr]
    if not _is(mean, _aten.mean.dim) or list(mean.args[1]) != [-1]:  # type: ignore[union-attr, arg-type]
        return None
    squares = mean.args[0]  # type: ignore[union-attr]
    if not _is(squares, _aten.pow.Tensor_Scalar) or squares.args != (value, 2):  # type: ignore[union-attr]
        return None
    source = value.args[0]  # type: ignore[union-attr]
    kinds = {node.meta["val"].dtype for node in (source, weight, scaled)}  # type: ignore[union-attr]
    return Norm(source, weight, epsilon) if len(kinds) == 1 else None  # type: ignore[arg-type]


def gate_behind(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The SiLU of one product times the other, where nothing else looks at either."""
    gate_view, up_view = _seen(gate), _seen(up)
    if gate_view is None or up_view is None:
        return None
    value, product = _only_user(gate_view), _only_user(up_view)
    if not _is(product, _aten.mul.Tensor) or not _is_32_bits(value):
        return None
    (active,) = [arg for arg in product.args if arg is not up_view] or [None]  # type: ignore[union-attr]
    if not _is(active, _convert) or _only_user(active) is not product:  # type: ignore[arg-type]
        return None
    return product if _is_silu(active.args[0], value) else None  # type: ignore[union-attr]


def _is_silu(node: Any, value: Any) -> bool:
    """x / (1 + exp(-x)), or x * sigmoid(x)."""
    if _is(node, _aten.mul.Tensor):
        others = [arg for arg in node.args if arg is not value]
        return len(value.users) == 2 and len(others) == 1 and _is(others[0], _aten.sigmoid.default)
    if not _is(node, _aten.div.Tensor) or node.args[0] is not value or len(value.users) != 2:
        return False
    raised = node.args[1]
    if not _is(raised, _aten.add.Tensor) or raised.args[1] != 1 or not _is(raised.args[0], _aten.exp.default):
        return False
    negative = raised.args[0].args[0]
    return _is(negative, _aten.neg.default) and negative.args[0] is value


def residual_behind(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The sum of a product with something of its shape that is known before, and that something."""
    view = _seen(product)
    total = None if view is None else _only_user(view)
    if product.target is not _aten.mm.default or not _is(total, _aten.add.Tensor) or total.kwargs:  # type: ignore[union-attr]
        return None
    others = [arg for arg in total.args if arg is not view]  # type: ignore[union-attr]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or not others[0] < product:
        return None
    mine, other = view.meta["val"], others[0].meta["val"]  # type: ignore[union-attr]
    alike = mine.dtype == other.dtype and [str(size) for size in mine.shape] == [str(size) for size in other.shape]
    return (total, others[0]) if alike else None  # type: ignore[return-value]


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _is_32_bits(node: Any) -> bool:
    return _is(node, _convert) and node.args[1] is torch.float32


def _is_weight(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.meta["val"].dim() == 1


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _seen(product: fx.Node) -> fx.Node | None:
    """The one view that others have of a product."""
    view = _only_user(product)
    return view if view is not None and is_view(view) else None


def _only_feeds(node: fx.Node, products: set[fx.Node]) -> bool:
    """Whether only these products use a tensor, or its views."""
    return all(user in products or (is_view(user) and _only_feeds(user, products)) for user in node.users)
