"""Finds the activation of a gated MLP in a traced layer: SiLU of one product times another.

Only as the common architectures write it in 16 bits; anything else is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default
VIEWS = (_aten.view.default, _aten.reshape.default)


def gated_by(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The SiLU of one product times the other, if nothing else uses either."""
    gate_view, up_view = _only_view(gate), _only_view(up)
    if gate_view is None or up_view is None:
        return None
    value, product = _only_user(gate_view), _only_user(up_view)
    if not _is(product, _aten.mul.Tensor) or not _is(value, _convert) or value.args[1] is not torch.float32:
        return None
    active = [arg for arg in product.args if arg is not up_view]
    if len(active) != 1 or not _is(active[0], _convert) or _only_user(active[0]) is not product:
        return None
    return product if _is_silu(active[0].args[0], value) else None


def _is_silu(node: Any, value: fx.Node) -> bool:
    """x / (1 + exp(-x)), or x * sigmoid(x)."""
    if len(value.users) != 2:
        return False
    if _is(node, _aten.mul.Tensor):
        others = [arg for arg in node.args if arg is not value]
        return len(others) == 1 and _is(others[0], _aten.sigmoid.default) and others[0].args[0] is value
    if not _is(node, _aten.div.Tensor) or node.args[0] is not value:
        return False
    raised = node.args[1]
    if not _is(raised, _aten.add.Tensor) or raised.args[1] != 1 or not _is(raised.args[0], _aten.exp.default):
        return False
    negative = raised.args[0].args[0]
    return _is(negative, _aten.neg.default) and negative.args[0] is value


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _only_view(product: fx.Node) -> fx.Node | None:
    """The one view through which others use a product."""
    view = _only_user(product)
    return view if view is not None and view.target in VIEWS else None
