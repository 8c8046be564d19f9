"""Matrix times one vector at the speed of memory: what a layer is made of when one sequence decodes.

cuBLAS reaches 63 to 94% of an H200's copy bandwidth on these shapes and one launch per matrix; the kernel here 80 to
100%, with one launch for all matrices that read the same vector (query, key and value; gate and up). It is put into a
compiled layer by rewriting the traced graph, so it serves every architecture and no modelling code is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton: CPU-only builds never reach the kernel
    triton = None

MOST_MATRICES = 4  # that one launch can serve
BLOCK = 1024  # columns a program reads at once; with 4 warps within 1% of the best of 40 settings on every shape tried

if triton is not None:

    @triton.jit
    def _gemv_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        w0_ptr,
        w1_ptr,
        w2_ptr,
        w3_ptr,
        y_ptr,
        end0,
        end1,
        end2,
        columns,
        BLOCK: tl.constexpr,
        EVEN: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        w_ptr = w0_ptr + row * columns
        if row >= end2:
            w_ptr = w3_ptr + (row - end2) * columns
        elif row >= end1:
            w_ptr = w2_ptr + (row - end1) * columns
        elif row >= end0:
            w_ptr = w1_ptr + (row - end0) * columns
        lanes = tl.arange(0, BLOCK)
        inside = lanes < columns
        # Weights do not depend on the kernel before, so their first block is on its way while that one still ends.
        if EVEN:
            w = tl.load(w_ptr + lanes, eviction_policy="evict_first")
        else:
            w = tl.load(w_ptr + lanes, mask=inside, other=0.0, eviction_policy="evict_first")
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        x = tl.load(x_ptr + lanes, mask=inside, other=0.0)
        total = w.to(tl.float32) * x.to(tl.float32)
        for start in range(BLOCK, columns, BLOCK):
            if EVEN:
                w = tl.load(w_ptr + start + lanes, eviction_policy="evict_first")
                x = tl.load(x_ptr + start + lanes)
            else:
                inside = start + lanes < columns
                w = tl.load(w_ptr + start + lanes, mask=inside, other=0.0, eviction_policy="evict_first")
                x = tl.load(x_ptr + start + lanes, mask=inside, other=0.0)
            total += w.to(tl.float32) * x.to(tl.float32)
        tl.store(y_ptr + row, tl.sum(total, 0).to(y_ptr.dtype.element_ty))


@torch.library.custom_op("depthdecay::gemv", mutates_args=())
def gemv(x: torch.Tensor, weights: Sequence[torch.Tensor], overlap: bool) -> torch.Tensor:
    """x (1, columns) times the transpose of each weight (rows, columns), the results side by side.

    `overlap` lets the kernel start before the one ahead of it has ended (programmatic dependent launch).
    """
    if not x.is_cuda:
        return torch.cat([x @ weight.t() for weight in weights], dim=1)
    rows = [weight.shape[0] for weight in weights]
    columns = x.shape[1]
    y = x.new_empty((1, sum(rows)))
    padded = list(weights) + [weights[0]] * (MOST_MATRICES - len(weights))
    ends = [sum(rows[: i + 1]) for i in range(MOST_MATRICES - 1)]
    block = min(BLOCK, triton.next_power_of_2(columns))
    _gemv_kernel[(sum(rows),)](
        x,
        *padded,
        y,
        *ends,
        columns,
        BLOCK=block,
        EVEN=columns % block == 0,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return y


@gemv.register_fake
def _(x: torch.Tensor, weights: Sequence[torch.Tensor], overlap: bool) -> torch.Tensor:
    return x.new_empty((1, sum(weight.shape[0] for weight in weights)))


class GemvPass(CustomGraphPass):
    """Replaces matrix products with one row by `gemv`, those that share their input by one call."""

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap

    def __call__(self, graph: fx.Graph) -> None:
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            if _weight_of(node) is not None:
                groups.setdefault(_source_of(_vector_of(node)), []).append(node)
        for products in groups.values():
            for start in range(0, len(products), MOST_MATRICES):
                _replace(graph, products[start : start + MOST_MATRICES], self.overlap)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,), extra=str(self.overlap))


def _vector_of(node: fx.Node) -> fx.Node:
    vector = node.args[1] if node.target is torch.ops.aten.addmm.default else node.args[0]
    assert isinstance(vector, fx.Node)
    return vector


def _source_of(node: fx.Node) -> fx.Node:
    """The tensor behind reshapes: each product comes with its own view of the same vector."""
    views = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
    while node.target in views and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _weight_of(node: fx.Node) -> fx.Node | None:
    """The (rows, columns) matrix of a product that `gemv` can do, else None."""
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
    half = value.dtype in (torch.bfloat16, torch.float16) and vector.dtype == value.dtype
    one_row = vector.dim() == 2 and vector.shape[0] == 1
    return weight if is_transpose and half and one_row and value.is_contiguous() else None


def _replace(graph: fx.Graph, products: list[fx.Node], overlap: bool) -> None:
    vector = _vector_of(products[0])
    weights = [weight for weight in map(_weight_of, products) if weight is not None]
    with graph.inserting_before(products[0]):
        joined = graph.call_function(torch.ops.depthdecay.gemv.default, (vector, weights, overlap))
        rows = [weight.meta["val"].shape[0] for weight in weights]
        x = vector.meta["val"]
        joined.meta["val"] = x.new_empty((1, sum(rows)))
        start = 0
        for product, width in zip(products, rows, strict=True):
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
