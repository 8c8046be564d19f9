"""A gated MLP's first two products with a few rows, and its activation, in one kernel: SiLU of one times the other.

A kernel of its own for the activation takes two microseconds, whatever it does, in which memory is idle. Here a program
multiplies the same rows of both matrices, so that it has both results at its end. As in `gemv`, a row's result does not
depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from depthdecay.cuda.kernels import gemv

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from depthdecay.cuda.kernels.gemv import prefetch_lines
except ImportError:  # no Triton: CPU-only builds never reach the kernel
    triton = None

STAGES = 3
# Rows of each matrix per program, and how many programs there may be: at least one per SM of an H200, and all resident.
TILES = ((32, range(132, 397)), (64, range(132, 265)))

if triton is not None:

    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
    def _gated_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        gate_ptr,
        up_ptr,
        y_ptr,
        rows,
        count,
        columns,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        AHEAD: tl.constexpr,
        LINE: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * ROWS
        outputs = tl.arange(0, ROWS)
        lanes = tl.arange(0, COLUMNS)
        vector = tl.arange(0, 16)
        start = (row + outputs) * columns
        place = start[:, None] + lanes[None, :]
        gate_ptrs, up_ptrs = gate_ptr + place, up_ptr + place
        x_ptrs = x_ptr + vector[:, None] * columns + lanes[None, :]
        if PDL:
            gdc_launch_dependents()
            ahead = start[:, None] + (tl.arange(0, AHEAD) * LINE)[None, :]
            prefetch_lines(gate_ptr + ahead)
            prefetch_lines(up_ptr + ahead)
            gdc_wait()
        gate = tl.zeros((16, ROWS), dtype=tl.float32)
        up = tl.zeros((16, ROWS), dtype=tl.float32)
        for _ in range(0, columns, COLUMNS):
            x = tl.load(x_ptrs, mask=vector[:, None] < count, other=0.0)
            gate = tl.dot(x, tl.trans(tl.load(gate_ptrs, eviction_policy="evict_first")), gate)
            up = tl.dot(x, tl.trans(tl.load(up_ptrs, eviction_policy="evict_first")), up)
            x_ptrs += COLUMNS
            gate_ptrs += COLUMNS
            up_ptrs += COLUMNS
        # Rounded where transformers' layers round.
        gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(y_ptr.dtype.element_ty).to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32) * up
        y_ptrs = y_ptr + vector[:, None].to(tl.int64) * rows + row + outputs[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=vector[:, None] < count)


def height_for(gate: torch.Tensor) -> int | None:
    """How many rows of each matrix a program takes, so that all programs run at once; None if no number fits."""
    rows, columns = gate.shape
    if gate.dtype not in (torch.bfloat16, torch.float16) or columns % gemv.SKINNY_COLUMNS:
        return None
    fitting = (height for height, programs in TILES if rows % height == 0 and rows // height in programs)
    return next(fitting, None)


@torch.library.custom_op("depthdecay::gated_product", mutates_args=())
def gated_product(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, overlap: bool) -> torch.Tensor:
    """SiLU of x times the transpose of `gate`, times x times the transpose of `up`, for up to 16 rows of x."""
    if x.is_cuda:
        return multiply_gated(x, gate, up, overlap)
    return functional.silu(x @ gate.t()) * (x @ up.t())


def multiply_gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, overlap: bool) -> torch.Tensor:
    """Launch the kernel of `gated_product`."""
    (count, columns), rows, height = x.shape, gate.shape[0], height_for(gate)
    assert height is not None
    y = x.new_empty((count, rows))
    _gated_kernel[(rows // height,)](
        x.contiguous(),
        gate,
        up,
        y,
        rows,
        count,
        columns,
        ROWS=height,
        COLUMNS=gemv.LOW.columns if columns % gemv.LOW.columns == 0 else gemv.SKINNY_COLUMNS,
        AHEAD=gemv.AHEAD,
        LINE=128 // x.element_size(),
        PDL=overlap,
        num_warps=height // 16,
        num_stages=STAGES,
        launch_pdl=overlap,
    )
    return y


@gated_product.register_fake
def _(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, overlap: bool) -> torch.Tensor:
    return x.new_empty((x.shape[0], gate.shape[0]))
