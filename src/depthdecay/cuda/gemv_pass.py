"""An inductor pass that replaces matrix products in a compiled layer's FX graph with our kernels.

It works for every architecture, without touching modelling code.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from depthdecay import library_internals as internals
from depthdecay.cuda import gate_pattern, last_sum
from depthdecay.cuda.gate_pattern import VIEWS, gated_by
from depthdecay.cuda.kernels import dependent_launch as waiting
from depthdecay.cuda.kernels import expert_products, gated_product, gemv

_GraphPass: Any = internals.graph_pass_class()


class GemvPass(_GraphPass):
    """Replaces matrix products with one row by `gemv`; products that share an input become one call.

    With rows "few", products with 2 to 16 rows are replaced by `skinny_gemm` as well; with "any", all are.
    """

    def __init__(self, overlap: bool, rows: Literal["one", "few", "any"] = "one") -> None:
        self.overlap = overlap
        self.rows = rows

    def __call__(self, graph: fx.Graph) -> None:
        groups: dict[Any, list[fx.Node]] = {}
        for node in graph.nodes:
            weight = _weight_of(node)
            if weight is None or not self._fits(node, weight.meta["val"]):
                continue
            source = _source_of(_vector_of(node))
            alone = self._is_skinny(node) and not gemv.can_join(weight.meta["val"])
            groups.setdefault((source, node) if alone else source, []).append(node)
        for products in groups.values():
            if self.rows == "few" and len(products) == 2 and self._gate(graph, products):
                continue
            for start in range(0, len(products), gemv.MOST_MATRICES):
                self._replace(graph, products[start : start + gemv.MOST_MATRICES])
        last_sum.give_addends(graph)
        _multiply_outer(graph)
        graph.eliminate_dead_code()

    def _is_skinny(self, product: fx.Node) -> bool:
        """Whether a product uses `skinny_gemm`. Otherwise it has one row and uses `gemv`, which sums differently."""
        return self.rows == "any" or not _is_one(_vector_of(product).meta["val"])

    def _fits(self, product: fx.Node, weight: torch.Tensor) -> bool:
        if not self._is_skinny(product):
            return True
        count = _vector_of(product).meta["val"].shape[0]
        # In a "few" compilation a symbolic number of rows is the width of a verification, which is at most 16.
        few = self.rows == "few" and (isinstance(count, torch.SymInt) or count <= gemv.MOST_ROWS)
        return (few or self.rows == "any") and gemv.is_even(weight)

    def _gate(self, graph: fx.Graph, products: list[fx.Node]) -> bool:
        """Replace two products and the activation that joins them by one call; False if they are not of that form."""
        for gate, up in (products, products[::-1]):
            last, weights = gated_by(gate, up), [_weight_of(gate), _weight_of(up)]
            values = [weight.meta["val"] for weight in weights if weight is not None]
            alike = values[0].shape == values[1].shape and gated_product.height_for(values[0]) is not None
            if last is None or not alike or not all(map(self._is_skinny, products)):
                continue
            x, rows = _vector_of(gate), values[0].shape[0]
            with graph.inserting_before(last):
                joined = graph.call_function(torch.ops.depthdecay.gated_product.default, (x, *weights, self.overlap))
                joined.meta["val"] = x.meta["val"].new_empty((x.meta["val"].shape[0], rows))
                shape = next(iter(gate.users)).args[1]  # of the view through which the products are used
                viewed = graph.call_function(torch.ops.aten.reshape.default, (joined, shape))
                viewed.meta["val"] = last.meta["val"]
            last.replace_all_uses_with(viewed)
            return True
        return False

    def _replace(self, graph: fx.Graph, products: list[fx.Node]) -> None:
        vector = _vector_of(products[0])
        weights = [weight for weight in map(_weight_of, products) if weight is not None]
        with graph.inserting_before(products[0]):
            rows = [weight.meta["val"].shape[0] for weight in weights]
            x = vector.meta["val"]
            if not self._is_skinny(products[0]):
                joined = graph.call_function(torch.ops.depthdecay.gemv.default, (vector, weights, self.overlap))
                joined.meta["val"] = x.new_empty((1, sum(rows)))
            else:
                parts = graph.call_function(torch.ops.depthdecay.skinny_gemm.default, (vector, weights, self.overlap))
                shape = (gemv.tiling([weight.meta["val"] for weight in weights]).parts, x.shape[0], sum(rows))
                parts.meta["val"] = x.new_empty(shape, dtype=torch.float32)
                summed = graph.call_function(torch.ops.aten.sum.dim_IntList, (parts, [0]))
                summed.meta["val"] = x.new_empty(shape[1:], dtype=torch.float32)
                joined = graph.call_function(torch.ops.prims.convert_element_type.default, (summed, x.dtype))
                joined.meta["val"] = x.new_empty(shape[1:])
            start = 0
            for product, width in zip(products, rows, strict=True):
                part = graph.call_function(torch.ops.aten.slice.Tensor, (joined, 1, start, start + width))
                part.meta["val"] = joined.meta["val"][:, start : start + width]
                start += width
                if product.target is torch.ops.aten.addmm.default:
                    with graph.inserting_before(product):  # the bias may be computed after the first product
                        biased = graph.call_function(torch.ops.aten.add.Tensor, (part, product.args[0]))
                    biased.meta["val"] = product.meta["val"]
                    part = biased
                product.replace_all_uses_with(part)
        for product in products:
            graph.erase_node(product)

    def uuid(self) -> Any:
        return internals.files_key(
            # All files that shape the generated code: product kernels and their tilings, and where kernels wait.
            (
                *(__file__, gate_pattern.__file__, gemv.__file__, gated_product.__file__, expert_products.__file__),
                *(last_sum.__file__, waiting.__file__, internals.__file__),
            ),
            # Constants that step_profile.py varies, and that decide shapes in the graph or the form of kernels.
            extra=f"{self.overlap} {self.rows} {gated_product.TILES} {waiting.LONGEST_ROW} "
            f"{gemv.MOST_PARTS} {gemv.MOST_SHARED_PARTS}",
        )


def _multiply_outer(graph: fx.Graph) -> None:
    """Products over a single column, as rotary embedding multiplies frequencies by positions, without cuBLAS.

    Each element is one multiplication, so the bits are the same, and it becomes part of a neighbouring kernel.
    """
    for target in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            columns = node.args[0].meta["val"].shape[-1]
            if not isinstance(columns, torch.SymInt) and columns == 1:
                node.target = torch.ops.aten.mul.Tensor


def _vector_of(node: fx.Node) -> fx.Node:
    vector = node.args[1] if node.target is torch.ops.aten.addmm.default else node.args[0]
    assert isinstance(vector, fx.Node)
    return vector


def _source_of(node: fx.Node) -> fx.Node:
    """The tensor before any reshapes: each product has its own view of the same vector."""
    while node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _weight_of(node: fx.Node) -> fx.Node | None:
    """The (rows, columns) weight of a product that our kernels support, else None."""
    if node.op != "call_function" or node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return None
    if node.target is torch.ops.aten.addmm.default and node.kwargs:
        return None  # alpha or beta
    transposed = node.args[-1]
    if not isinstance(transposed, fx.Node) or transposed.target is not torch.ops.aten.permute.default:
        return None
    weight = transposed.args[0]
    if not isinstance(weight, fx.Node) or weight.op != "placeholder":
        return None
    value, vector = weight.meta["val"], _vector_of(node).meta["val"]
    is_transpose = list(transposed.args[1]) == [1, 0]  # type: ignore[arg-type]
    known = not any(isinstance(size, torch.SymInt) for size in value.shape)
    readable = value.dtype in gemv.DTYPES and vector.dtype == value.dtype and value.is_contiguous()
    return weight if is_transpose and known and readable and vector.dim() == 2 else None


def _is_one(vector: torch.Tensor) -> bool:
    return not isinstance(vector.shape[0], torch.SymInt) and vector.shape[0] == 1
