"""Products of a few rows together with what stands around them in a layer: a norm before, a gate or a sum behind.

A small kernel takes two microseconds, whatever it does, and in them memory idles: of a layer of a 1.5B model that is
half the time. Here every program makes the norm of its vectors on its way through them, which are few, and a gate or a
residual is applied before anything is stored. As in `gemv`, the order of sums does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from depthdecay.cuda.kernels import gemv

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton: CPU-only builds never reach the kernel
    triton = None

MOST_LATER = 3
LATER_BYTES = 8 << 20  # of a matrix that is fetched whole: two of them leave most of an H200's 50 MB of L2 to others
LATER_COLUMNS = 256

if triton is not None:

    @triton.jit
    def _fetch(lines, size):  # type: ignore[no-untyped-def]
        """Bring memory into L2, `size` bytes from each of these addresses, unless it is 0."""
        tl.inline_asm_elementwise(
            "{ .reg .pred some; setp.ne.s32 some, $2, 0;"
            " @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r",
            [lines.to(tl.int64), size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    # One binary for every number of rows, so that bits do not depend on it.
    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
    def _fused_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        w0_ptr,
        w1_ptr,
        w2_ptr,
        w3_ptr,
        residual_ptr,
        y_ptr,
        later0_ptr,
        later1_ptr,
        later2_ptr,
        pieces0,
        pieces1,
        pieces2,
        stride0,
        stride1,
        stride2,
        size0,
        size1,
        size2,
        end0,
        end1,
        end2,
        rows,
        count,
        columns,
        epsilon,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        NORM: tl.constexpr,
        GATED: tl.constexpr,
        RESIDUAL: tl.constexpr,
        FETCHED: tl.constexpr,
        SHARE: tl.constexpr,
        LANES: tl.constexpr,
        PDL: tl.constexpr,
    ):
        vector = tl.program_id(0) * 16 + tl.arange(0, 16)
        row = tl.program_id(1).to(tl.int64) * ROWS
        w_ptr = w0_ptr + row * columns
        up_ptr = w1_ptr + row * columns
        if not GATED:
            if row >= end2:
                w_ptr = w3_ptr + (row - end2) * columns
            elif row >= end1:
                w_ptr = w2_ptr + (row - end1) * columns
            elif row >= end0:
                w_ptr = w1_ptr + (row - end0) * columns
        outputs = tl.arange(0, ROWS)
        lanes = tl.arange(0, COLUMNS)
        inside = vector[:, None] < count
        place = outputs[:, None].to(tl.int64) * columns + lanes[None, :]
        w_ptrs = w_ptr + place
        up_ptrs = up_ptr + place
        x_ptrs = x_ptr + vector[:, None].to(tl.int64) * columns + lanes[None, :]
        norm_ptrs = norm_ptr + lanes
        if PDL:
            gdc_launch_dependents()
            if FETCHED > 0:  # weights do not depend on the kernel before: the first of them are fetched meanwhile
                index = tl.arange(0, ROWS * SHARE)
                ahead = (index // SHARE).to(tl.int64) * columns + (index % SHARE) * (FETCHED // SHARE)
                size = tl.full((ROWS * SHARE,), FETCHED // SHARE * 2, tl.int32)
                _fetch(w_ptr + ahead, size)
                if GATED:
                    _fetch(up_ptr + ahead, size)
            gdc_wait()
        total = tl.zeros((16, ROWS), dtype=tl.float32)
        total_up = tl.zeros((16, ROWS), dtype=tl.float32)
        squares = tl.zeros((16, COLUMNS), dtype=tl.float32)
        for _ in range(0, columns, COLUMNS):
            w = tl.load(w_ptrs, eviction_policy="evict_first")
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            if NORM:  # the mean of squares is known at the end, where it scales the sums
                value = x.to(tl.float32)
                squares += value * value
                x = (value * tl.load(norm_ptrs).to(tl.float32)[None, :]).to(w.dtype)
                norm_ptrs += COLUMNS
            total = tl.dot(x, tl.trans(w), total)
            if GATED:
                up = tl.load(up_ptrs, eviction_policy="evict_first")
                total_up = tl.dot(x, tl.trans(up), total_up)
                up_ptrs += COLUMNS
            w_ptrs += COLUMNS
            x_ptrs += COLUMNS
        if PDL and LANES > 0:  # what later kernels read is fetched while the ones between leave memory idle
            lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
            _fetch(later0_ptr + lane.to(tl.int64) * stride0, tl.where(lane < pieces0, size0, 0))
            _fetch(later1_ptr + lane.to(tl.int64) * stride1, tl.where(lane < pieces1, size1, 0))
            _fetch(later2_ptr + lane.to(tl.int64) * stride2, tl.where(lane < pieces2, size2, 0))
        if NORM:
            scale = tl.rsqrt(tl.sum(squares, 1) / columns + epsilon)
            total = total * scale[:, None]
            total_up = total_up * scale[:, None]
        # Rounded where a layer of torch rounds.
        total = total.to(y_ptr.dtype.element_ty).to(tl.float32)
        if GATED:
            gate = (total / (1.0 + tl.exp(-total))).to(y_ptr.dtype.element_ty).to(tl.float32)
            total = gate * total_up.to(y_ptr.dtype.element_ty).to(tl.float32)
        at = vector[:, None].to(tl.int64) * rows + row + outputs[None, :]
        if RESIDUAL:
            total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """Weight rows that a program takes, its warps, loads under way, columns that it reads at once and fetches ahead."""

    rows: int
    warps: int
    stages: int
    columns: int
    fetched: int


# Each with about 4 MB under way in all programs together: what memory gives in the time that it takes to answer.
PLAIN = (Tile(64, 4, 4, 128, 512), Tile(32, 4, 5, 128, 1024), Tile(16, 4, 6, 256, 4096))
GATED = (Tile(64, 4, 3, 128, 512), Tile(32, 4, 5, 128, 512), Tile(16, 4, 5, 256, 1024))
LEAST_PROGRAMS = 128  # an H200 has 132 processors
LONG_ROW = 4096  # columns


def tile_of(weights: Sequence[torch.Tensor], gated: bool) -> Tile | None:
    """By the matrices alone; None where they do not fit.

    The tallest tile that gives every processor a program: the taller, the less often vectors are read.
    """
    heights, columns = [weight.shape[0] for weight in weights], weights[0].shape[1]
    fitting = [tile for tile in (GATED if gated else PLAIN) if all(height % tile.rows == 0 for height in heights)]
    if not fitting or columns % gemv.SKINNY_COLUMNS:
        return None
    full = [tile for tile in fitting if rows_of(weights, gated) // tile.rows >= LEAST_PROGRAMS]
    tile = (full or fitting[-1:])[0]
    at_once = next(some for some in (tile.columns, 128, gemv.SKINNY_COLUMNS) if columns % some == 0)
    return tile._replace(columns=at_once)


@torch.library.custom_op("depthdecay::fused_product", mutates_args=())
def fused_product(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norm: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None,
    gated: bool,
    later: Sequence[torch.Tensor],
    overlap: bool,
) -> torch.Tensor:
    """Rows of x (count, columns), normed if `norm` is given, times the transpose of each weight, side by side.

    With `gated` there are two weights, and the answer is the SiLU of the first product times the second. `residual`
    (count, rows) is added. `later`: up to three matrices of later products, to be fetched into L2 meanwhile.
    """
    if x.is_cuda:
        return multiply_fused(x, weights, norm, epsilon, residual, gated, later, overlap)
    if norm is not None:
        x = functional.rms_norm(x.float(), x.shape[1:], eps=epsilon).to(x.dtype) * norm
    products = [x @ weight.t() for weight in weights]
    y = functional.silu(products[0]) * products[1] if gated else torch.cat(products, dim=1)
    return y if residual is None else y + residual


def multiply_fused(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norm: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None,
    gated: bool,
    later: Sequence[torch.Tensor],
    overlap: bool,
) -> torch.Tensor:
    """Start the kernel of `fused_product`."""
    tile = tile_of(weights, gated)
    assert tile is not None
    (count, columns), rows = x.shape, rows_of(weights, gated)
    x = x.contiguous()
    y = torch.empty((count, rows), dtype=x.dtype, device=x.device)
    padded, ends = gemv.side_by_side(weights)
    lanes = tile.warps * 32
    pieces = [*(_fetched(matrix, rows // tile.rows * lanes) for matrix in later), *[(x, 0, 0, 0)] * MOST_LATER]
    fetched, counts, strides, sizes = zip(*pieces[:MOST_LATER], strict=True)
    _fused_kernel[(-(-count // gemv.MOST_ROWS), rows // tile.rows)](
        x,
        x if norm is None else norm,
        *padded,
        x if residual is None else residual.contiguous(),
        y,
        *fetched,
        *counts,
        *strides,
        *sizes,
        *ends,
        rows,
        count,
        columns,
        epsilon,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        NORM=norm is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        FETCHED=min(tile.fetched, columns),
        SHARE=max(1, lanes // tile.rows),
        LANES=lanes if later else 0,
        PDL=overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=overlap,
    )
    return y


def _fetched(matrix: torch.Tensor, lanes: int) -> tuple[torch.Tensor, int, int, int]:
    """What so many threads fetch of a matrix: it, how many pieces, numbers from piece to piece, and bytes of a piece.

    A small matrix whole, of others the first columns of every row, where the programs of its product begin.
    """
    rows, columns = matrix.shape
    if matrix.numel() * matrix.element_size() > LATER_BYTES:
        return matrix, rows, columns, min(columns, LATER_COLUMNS) * matrix.element_size()
    piece = -(-matrix.numel() // (lanes * 8)) * 8  # in steps of 16 bytes
    return matrix, matrix.numel() // piece, piece, piece * matrix.element_size()


@fused_product.register_fake
def _(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norm: torch.Tensor | None,
    epsilon: float,
    residual: torch.Tensor | None,
    gated: bool,
    later: Sequence[torch.Tensor],
    overlap: bool,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], rows_of(weights, gated)))


def rows_of(weights: Sequence[torch.Tensor], gated: bool) -> int:
    return weights[0].shape[0] if gated else sum(weight.shape[0] for weight in weights)


def can_fuse(weights: Sequence[torch.Tensor], gated: bool) -> bool:
    """Whether the kernel takes these matrices."""
    return weights[0].dtype in (torch.bfloat16, torch.float16) and tile_of(weights, gated) is not None


def can_add(weights: Sequence[torch.Tensor]) -> bool:
    """Whether a residual can be taken along: that needs sums in one part, where long rows leave processors idle."""
    tile = tile_of(weights, gated=False)
    return tile is not None and (
        rows_of(weights, False) // tile.rows >= LEAST_PROGRAMS or weights[0].shape[1] <= LONG_ROW
    )


def can_norm(weights: Sequence[torch.Tensor]) -> bool:
    """Whether a norm can be taken along: before it is scaled down, its vector might leave float16's range."""
    return weights[0].dtype == torch.bfloat16
