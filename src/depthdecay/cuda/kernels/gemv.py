"""Matrix times one vector, or a few, at memory bandwidth: most of a layer's work when a single sequence decodes.

On these shapes cuBLAS reaches 63 to 94% of an H200's copy bandwidth, with one launch per matrix. The kernel here
reaches 80 to 100%, with one launch for all matrices that share an input (query, key and value; gate and up). A second
kernel does the same for the few tokens of a verification, and for batches that must be batch-invariant.
`cuda/gemv_pass` inserts them into compiled layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton: CPU-only builds never reach the kernel
    triton = None

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_MATRICES = 4  # per launch
BLOCK = 1024  # columns per load of a program; with 4 warps within 1% of the best of 40 configurations on every shape

MOST_ROWS = 16  # vectors in one tensor-core tile
MOST_TILES = 4  # of 16 vectors, per program
SKINNY_COLUMNS = 64  # a matrix needs a multiple of this many columns; a program loads twice as many where it can
# Grid sizes for an H200's 132 SMs: a tile of 128 or 64 rows is used where all its programs are resident at once, and
# with the low tile columns are split (split-K) up to this many programs. A partial second wave would leave SMs idle.
TALL_PROGRAMS, LOW_PROGRAMS = range(132, 265), 3 * 132
# The consumer of a split-K product sums its parts; with 7 parts that took longer than the split saved.
MOST_PARTS = 5
# Matrices that share a vector have consumers of their own, such as rotary embedding of queries and of keys. With more
# parts inductor sums them in a kernel before these (realize_reads_threshold), which takes 1.2 microseconds.
MOST_SHARED_PARTS = 2
AHEAD = 2  # 128-byte lines of each weight row that a program prefetches while the preceding kernel still runs
LEAST_BLOCKS = 3  # blocks of columns per part: with fewer, loads cannot be pipelined
# For float32: three TF32 products on tensor cores, about as accurate as one on CUDA cores (2**-22 per element). On CUDA
# cores, multiplying 16 vectors would take longer than reading the weights.
PRECISION = "tf32x3"

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
        # Weights do not depend on the preceding kernel, so their first block loads while that one still finishes.
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

    @triton.jit
    def prefetch_lines(lines):  # type: ignore[no-untyped-def]
        """Start moving these 128-byte lines into L2; waits for nothing."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [lines.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def _rows_times(x_ptrs, vector, columns, count, weights, total, TILE: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
        """Accumulate 16 vectors. Always a tile of 16: for a larger one Triton may pick a different MMA instruction."""
        vector += TILE * 16
        x = tl.load(x_ptrs + TILE * 16 * columns, mask=vector[:, None] < count, other=0.0)
        return tl.dot(x, weights, total, input_precision=PRECISION)

    @triton.jit
    def _store_rows(y_ptrs, vector, rows, count, total, inside, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        vector += TILE * 16
        tl.store(y_ptrs + TILE * 16 * rows, total, mask=(vector[:, None] < count) & inside[None, :])

    # `count` is not specialized: one binary for every number of rows, so a row's result does not depend on it. Beyond
    # 16 rows a program takes several tiles, each with its own accumulator, summed in the same order.
    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
    def _skinny_gemm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        w0_ptr,
        w1_ptr,
        w2_ptr,
        w3_ptr,
        y_ptr,
        end0,
        end1,
        end2,
        rows,
        count,
        columns,
        part,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        TILES: tl.constexpr,
        EVEN: tl.constexpr,
        AHEAD: tl.constexpr,
        LINE: tl.constexpr,
        PRECISION: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row = tl.program_id(1).to(tl.int64) * ROWS
        w_ptr = w0_ptr + row * columns
        if row >= end2:
            w_ptr = w3_ptr + (row - end2) * columns
        elif row >= end1:
            w_ptr = w2_ptr + (row - end1) * columns
        elif row >= end0:
            w_ptr = w1_ptr + (row - end0) * columns
        outputs = tl.arange(0, ROWS)
        lanes = tl.arange(0, COLUMNS)
        vector = tl.program_id(0) * (TILES * 16) + tl.arange(0, 16)  # fastest axis: neighbours share weights in L2
        start = tl.program_id(2) * part
        w_ptrs = w_ptr + outputs[:, None].to(tl.int64) * columns + start + lanes[None, :]
        x_ptrs = x_ptr + vector[:, None].to(tl.int64) * columns + start + lanes[None, :]
        inside = row + outputs < rows
        if PDL:
            gdc_launch_dependents()
            if AHEAD > 0:  # weights do not depend on the preceding kernel: prefetch their first 128-byte lines
                ahead = tl.minimum(tl.arange(0, AHEAD) * LINE, part - LINE)
                prefetch_lines(w_ptr + outputs[:, None].to(tl.int64) * columns + start + ahead[None, :])
            gdc_wait()
        total0 = tl.zeros((16, ROWS), dtype=tl.float32)
        total1 = tl.zeros((16, ROWS), dtype=tl.float32)
        total2 = tl.zeros((16, ROWS), dtype=tl.float32)
        total3 = tl.zeros((16, ROWS), dtype=tl.float32)
        for _ in range(0, part, COLUMNS):
            if EVEN:
                w = tl.load(w_ptrs, eviction_policy="evict_first")
            else:
                w = tl.load(w_ptrs, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            w = tl.trans(w)
            total0 = _rows_times(x_ptrs, vector, columns, count, w, total0, 0, PRECISION)
            if TILES > 1:
                total1 = _rows_times(x_ptrs, vector, columns, count, w, total1, 1, PRECISION)
            if TILES > 2:
                total2 = _rows_times(x_ptrs, vector, columns, count, w, total2, 2, PRECISION)
                total3 = _rows_times(x_ptrs, vector, columns, count, w, total3, 3, PRECISION)
            w_ptrs += COLUMNS
            x_ptrs += COLUMNS
        y_ptrs = y_ptr + (tl.program_id(2) * count + vector[:, None]).to(tl.int64) * rows + row + outputs[None, :]
        _store_rows(y_ptrs, vector, rows, count, total0, inside, 0)
        if TILES > 1:
            _store_rows(y_ptrs, vector, rows, count, total1, inside, 1)
        if TILES > 2:
            _store_rows(y_ptrs, vector, rows, count, total2, inside, 2)
            _store_rows(y_ptrs, vector, rows, count, total3, inside, 3)


def _side_by_side(weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Pads the matrices to `MOST_MATRICES` by repeating the first, and gives the output row where each one ends."""
    ends = list(accumulate(weight.shape[0] for weight in weights))
    missing = MOST_MATRICES - len(weights)
    return [*weights, *[weights[0]] * missing], [*ends, *[ends[-1]] * missing][: MOST_MATRICES - 1]


@torch.library.custom_op("depthdecay::gemv", mutates_args=())
def gemv(x: torch.Tensor, weights: Sequence[torch.Tensor], overlap: bool) -> torch.Tensor:
    """x (1, columns) times the transpose of each weight (rows, columns), with the results concatenated.

    `overlap` lets the kernel start before the preceding one has finished (programmatic dependent launch).
    """
    if x.is_cuda:
        return multiply_one(x, weights, overlap)
    return torch.cat([x @ weight.t() for weight in weights], dim=1)


def multiply_one(x: torch.Tensor, weights: Sequence[torch.Tensor], overlap: bool) -> torch.Tensor:
    """Start the kernel of `gemv`."""
    rows = sum(weight.shape[0] for weight in weights)
    columns = x.shape[1]
    y = x.new_empty((1, rows))
    padded, ends = _side_by_side(weights)
    block = min(BLOCK, triton.next_power_of_2(columns))
    _gemv_kernel[(rows,)](
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


class Tiling(NamedTuple):
    """How a product with a few rows is tiled: weight rows per program, its warps and pipeline stages, the number of
    parts that columns are split into (split-K), and the columns per load.

    It depends on the matrices alone. If it depended on the number of vectors, so would the summation order.
    """

    rows: int
    warps: int
    stages: int
    parts: int
    columns: int


TALL, MIDDLE, LOW = Tiling(128, 4, 3, 1, 128), Tiling(64, 4, 5, 1, 128), Tiling(32, 2, 5, 1, 128)
# Where one of these gives most SMs one program and none two, it is up to 9% faster than the low tile in as many parts.
ALONE, ALONE_PROGRAMS = (MIDDLE, Tiling(32, 4, 5, 1, 128)), range(88, 133)
SHARED_BYTES = 100_000  # of shared memory per program for its loads: two programs fit on an H200's SM


def tiling(weights: Sequence[torch.Tensor]) -> Tiling:
    """The tallest tile that fills the device in one wave, or else the low one with columns split among programs."""
    heights, columns = [weight.shape[0] for weight in weights], weights[0].shape[1]
    # With 4-byte elements, half as many per load.
    wide = columns % LOW.columns == 0 and weights[0].element_size() == 2
    at_once = LOW.columns if wide else SKINNY_COLUMNS
    if all(height % TALL.rows == 0 for height in heights) and sum(heights) // TALL.rows in TALL_PROGRAMS:
        return TALL._replace(columns=at_once)
    is_even = wide and all(height % MIDDLE.rows == 0 for height in heights)
    if is_even and sum(heights) > LOW_PROGRAMS * LOW.rows and sum(heights) // MIDDLE.rows in TALL_PROGRAMS:
        return MIDDLE
    blocks = columns // at_once
    most = MOST_PARTS if len(weights) == 1 else MOST_SHARED_PARTS
    most = min(most, LOW_PROGRAMS // -(-sum(heights) // LOW.rows), blocks // LEAST_BLOCKS)
    parts = max(parts for parts in range(1, max(most, 1) + 1) if blocks % parts == 0)
    fitting = [tile for tile in ALONE if wide and all(height % tile.rows == 0 for height in heights)]
    alone = (tile for tile in fitting if sum(heights) // tile.rows * parts in ALONE_PROGRAMS)
    tile = next(alone, LOW)
    return tile._replace(parts=parts, columns=at_once)


def for_tiles(tile: Tiling, weights: Sequence[torch.Tensor], tiles: int) -> Tiling:
    """The tiling for programs that take several tiles of 16 vectors.

    A part's columns are summed in sequence whatever the tile, so the result depends on `parts` alone.
    """
    if tiles == 1:
        return tile
    heights = [weight.shape[0] for weight in weights]
    # Taller tiles read the vectors less often. Use the tallest that still gives every SM a program.
    tall = [rows for rows in (128, 64) if all(height % rows == 0 for height in heights)]
    full = [rows for rows in tall if sum(heights) // rows * tile.parts >= TALL_PROGRAMS.start]
    rows = next(iter(full), LOW.rows)
    stage = (rows + MOST_ROWS * tiles) * tile.columns * weights[0].element_size()
    return tile._replace(rows=rows, warps=4, stages=max(2, min(tile.stages, SHARED_BYTES // stage)))


@torch.library.custom_op("depthdecay::skinny_gemm", mutates_args=())
def skinny_gemm(x: torch.Tensor, weights: Sequence[torch.Tensor], overlap: bool) -> torch.Tensor:
    """Rows of x (count, columns) times the transpose of each weight, with the results concatenated.

    Returns float32 split-K parts (parts, count, rows), which the consumer sums as part of its own kernel. Results are
    batch-invariant: a row depends neither on the other rows nor on their number. Any number works; made for up to 16.
    """
    if x.is_cuda:
        return multiply(x, weights, overlap)
    whole = torch.cat([x @ weight.t() for weight in weights], dim=1).float()
    return torch.cat([whole.unsqueeze(0), whole.new_zeros((tiling(weights).parts - 1, *whole.shape))])


def multiply(x: torch.Tensor, weights: Sequence[torch.Tensor], overlap: bool) -> torch.Tensor:
    """Launch the kernel of `skinny_gemm`."""
    tile = tiling(weights)
    parts = tile.parts
    rows = sum(weight.shape[0] for weight in weights)
    count, columns = x.shape
    x = x.contiguous()
    y = torch.empty((parts, count, rows), dtype=torch.float32, device=x.device)
    padded, ends = _side_by_side(weights)
    tiles = min(MOST_TILES, triton.next_power_of_2(-(-count // MOST_ROWS)))
    tile = for_tiles(tile, weights, tiles)
    even = rows % tile.rows == 0
    _skinny_gemm_kernel[(-(-count // (MOST_ROWS * tiles)), -(-rows // tile.rows), parts)](
        x,
        *padded,
        y,
        *ends,
        rows,
        count,
        columns,
        columns // parts,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TILES=tiles,
        EVEN=even,
        AHEAD=AHEAD if even else 0,
        LINE=128 // x.element_size(),
        PRECISION=PRECISION,
        PDL=overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=overlap,
    )
    return y


@skinny_gemm.register_fake
def _(x: torch.Tensor, weights: Sequence[torch.Tensor], overlap: bool) -> torch.Tensor:
    rows = sum(weight.shape[0] for weight in weights)
    return x.new_empty((tiling(weights).parts, x.shape[0], rows), dtype=torch.float32)


def is_even(weight: torch.Tensor) -> bool:
    """Whether a matrix divides into the column blocks of `skinny_gemm`."""
    return weight.shape[1] % SKINNY_COLUMNS == 0


def can_join(weight: torch.Tensor) -> bool:
    """Whether a matrix can share a launch with others: a program's rows must all belong to one matrix."""
    return weight.shape[0] % LOW.rows == 0
