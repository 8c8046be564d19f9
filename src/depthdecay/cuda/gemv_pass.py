"""Puts our kernels for products into a compiled layer by rewriting its traced graph.

So they serve every architecture, and no modelling code is touched.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from depthdecay import library_internals as internals
from depthdecay.cuda import layer_patterns
from depthdecay.cuda.kernels import dependent_launch as waiting
from depthdecay.cuda.kernels import expert_products, fused_product, gemv
from depthdecay.cuda.layer_patterns import Norm, gate_behind, is_view, norm_before, residual_behind, source_of

FUSED = frozenset(("norm", "gate", "residual", "later"))  # what products of a few rows take along

_GraphPass: Any = internals.graph_pass_class()


class GemvPass(_GraphPass):
    """Replaces matrix products with one row by `gemv`, those that share their input by one call.

    With rows "few", products with 2 to 16 rows are replaced too, by `skinny_gemm`; with "any", all are.
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
            source = source_of(_vector_of(node))
            alone = self._is_skinny(node) and not gemv.can_join(weight.meta["val"])
            groups.setdefault((source, node) if alone else source, []).append(node)
        calls = [
            products[start : start + gemv.MOST_MATRICES]
            for products in groups.values()
            for start in range(0, len(products), gemv.MOST_MATRICES)
        ]
        # Behind a layer's first products comes its attention, which reads little.
        behind = [weight for products in calls[1:3] for weight in _weights_of(products)]
        for products in calls:
            later = behind[: fused_product.MOST_LATER] if products is calls[0] and "later" in FUSED else []
            if not (self.rows == "few" and self._fuse(graph, products, later)):
                self._replace(graph, products)
        graph.eliminate_dead_code()

    def _is_skinny(self, product: fx.Node) -> bool:
        """Whether a product goes to `skinny_gemm`; else it has one row and goes to `gemv`, which sums otherwise."""
        return self.rows == "any" or not _is_one(_vector_of(product).meta["val"])

    def _fits(self, product: fx.Node, weight: torch.Tensor) -> bool:
        if not self._is_skinny(product):
            return True
        count = _vector_of(product).meta["val"].shape[0]
        # A number of rows that is a symbol stands for the sizes of verifications, which are few.
        few = self.rows == "few" and (isinstance(count, torch.SymInt) or count <= gemv.MOST_ROWS)
        return (few or self.rows == "any") and gemv.is_even(weight)

    def _fuse(self, graph: fx.Graph, products: list[fx.Node], later: list[fx.Node]) -> bool:
        """Replace products together with what stands around them, if anything does that a kernel takes along.

        `later`: matrices that products behind attention will read.
        """
        vector = _vector_of(products[0])
        if not all(map(self._is_skinny, products)) or not is_view(vector):
            return False
        around = _around(products)
        if around is None:
            return False
        weights = _weights_of(around.products)
        rows = fused_product.rows_of([weight.meta["val"] for weight in weights], around.gated)
        x = vector.meta["val"]
        answer = x.new_empty((x.shape[0], rows))
        with graph.inserting_before(products[0]):
            source, weight, epsilon, residual = vector, None, 0.0, None
            if around.norm is not None:
                before, weight, epsilon = around.norm
                source = _reshaped(graph, before, vector.args[1], x)
            if around.residual is not None:
                residual = _reshaped(graph, around.residual, [vector.args[1][0], rows], answer)  # type: ignore[index]
            joined = graph.call_function(
                torch.ops.depthdecay.fused_product.default,
                (source, weights, weight, epsilon, residual, around.gated, later, self.overlap),
            )
            joined.meta["val"] = answer
            if around.last is not None:
                shape = next(iter(products[0].users)).args[1]  # of the view behind it
                around.last.replace_all_uses_with(_reshaped(graph, joined, shape, around.last.meta["val"]))
        if around.last is None:
            _share_out(graph, joined, products)
        return True

    def _replace(self, graph: fx.Graph, products: list[fx.Node]) -> None:
        vector = _vector_of(products[0])
        weights = _weights_of(products)
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
        _share_out(graph, joined, products)

    def uuid(self) -> Any:
        return internals.files_key(
            # Traced graphs hold the parts that both kinds of products come in; the last two say where kernels wait.
            (
                *(__file__, layer_patterns.__file__, gemv.__file__, fused_product.__file__, expert_products.__file__),
                *(waiting.__file__, internals.__file__),
            ),
            extra=f"{self.overlap} {self.rows} {sorted(FUSED)}",
        )


class _Around(NamedTuple):
    """What a kernel takes along with products: a norm before them, and what is behind up to the node `last`."""

    products: list[fx.Node]  # the gate first
    norm: Norm | None
    gated: bool = False
    residual: fx.Node | None = None
    last: fx.Node | None = None


def _around(products: list[fx.Node]) -> _Around | None:
    """What stands around products and goes into one kernel with them; None where nothing does."""
    values = [weight.meta["val"] for weight in _weights_of(products)]
    normed = "norm" in FUSED and fused_product.can_norm(values)
    norm = norm_before(_vector_of(products[0]), products) if normed else None
    if "gate" in FUSED and len(products) == 2 and fused_product.can_fuse(values, gated=True):
        for pair in (products, products[::-1]):
            last = gate_behind(*pair)
            if last is not None:
                return _Around(pair, norm, gated=True, last=last)
    if not fused_product.can_fuse(values, gated=False):
        return None
    if "residual" in FUSED and len(products) == 1 and fused_product.can_add(values):
        summed = residual_behind(products[0])
        if summed is not None:
            return _Around(products, norm, residual=summed[1], last=summed[0])
    return _Around(products, norm) if norm is not None else None


def _weights_of(products: list[fx.Node]) -> list[fx.Node]:
    return [weight for weight in map(_weight_of, products) if weight is not None]


def _vector_of(node: fx.Node) -> fx.Node:
    vector = node.args[1] if node.target is torch.ops.aten.addmm.default else node.args[0]
    assert isinstance(vector, fx.Node)
    return vector


def _weight_of(node: fx.Node) -> fx.Node | None:
    """The (rows, columns) matrix of a product that our kernels can do; else None."""
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


def _reshaped(graph: fx.Graph, node: fx.Node, shape: Any, value: torch.Tensor) -> fx.Node:
    view = graph.call_function(torch.ops.aten.reshape.default, (node, shape))
    view.meta["val"] = value
    return view


def _share_out(graph: fx.Graph, joined: fx.Node, products: list[fx.Node]) -> None:
    """Give each product's users its columns of what was multiplied at once."""
    start = 0
    for product in products:
        width = product.meta["val"].shape[1]
        with graph.inserting_after(joined):
            part = graph.call_function(torch.ops.aten.slice.Tensor, (joined, 1, start, start + width))
        part.meta["val"] = joined.meta["val"][:, start : start + width]
        start += width
        if product.target is torch.ops.aten.addmm.default:
            with graph.inserting_before(product):  # a bias may be computed later than the first product
                biased = graph.call_function(torch.ops.aten.add.Tensor, (part, product.args[0]))
            biased.meta["val"] = product.meta["val"]
            part = biased
        product.replace_all_uses_with(part)
    for product in products:
        graph.erase_node(product)
