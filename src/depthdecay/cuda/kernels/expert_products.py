"""Products of tokens with the weights of their selected experts, in one launch and without synchronizing.

A program takes some rows of one expert's matrix and 16 tokens. Tokens that did not select the expert are masked to rows
of zeros, and experts that no token selected are not read. So a token's result depends neither on the other tokens nor
on what they selected, and each weight is read once per 16 tokens.
"""

from __future__ import annotations

import torch

from depthdecay.cuda.kernels.gemv import LOW, MOST_ROWS, PRECISION, Tiling, is_even, tiling

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton: CPU-only builds never reach the kernel
    triton = None

if triton is not None:
    # `count` is not specialized: one binary for every number of tokens, so results do not depend on it.
    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
    def _expert_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        chosen_ptr,
        w_ptr,
        y_ptr,
        count,
        rows,
        columns,
        part,
        parts,
        CHOICES: tl.constexpr,
        LANES: tl.constexpr,
        EACH: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        PRECISION: tl.constexpr,
        PDL: tl.constexpr,
    ):
        token = tl.program_id(0) * 16 + tl.arange(0, 16)
        row = tl.program_id(1).to(tl.int64) * ROWS
        expert = tl.program_id(2) // parts
        split = tl.program_id(2) % parts
        choice = tl.arange(0, LANES)
        outputs = tl.arange(0, ROWS)
        lanes = tl.arange(0, COLUMNS)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        chosen = tl.load(
            chosen_ptr + token[:, None] * CHOICES + choice[None, :],
            mask=(token[:, None] < count) & (choice[None, :] < CHOICES),
            other=-1,
        )
        is_this = (chosen == expert).to(tl.int32)
        inside = tl.max(is_this, 1) > 0
        if tl.max(tl.max(is_this, 1), 0) > 0:
            pair = token * CHOICES + tl.sum(is_this * choice[None, :], 1)  # a token selects an expert at most once
            source = (pair if EACH else token).to(tl.int64)
            start = split * part
            weight = (expert.to(tl.int64) * rows + row) * columns + start
            w_ptrs = w_ptr + weight + outputs[:, None].to(tl.int64) * columns + lanes[None, :]
            x_ptrs = x_ptr + source[:, None] * columns + start + lanes[None, :]
            total = tl.zeros((16, ROWS), dtype=tl.float32)
            for _ in range(0, part, COLUMNS):
                w = tl.load(w_ptrs, eviction_policy="evict_first")
                x = tl.load(x_ptrs, mask=inside[:, None], other=0.0)
                total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
                w_ptrs += COLUMNS
                x_ptrs += COLUMNS
            place = (split * count * CHOICES + pair).to(tl.int64) * rows + row
            tl.store(y_ptr + place[:, None] + outputs[None, :], total, mask=inside[:, None])


def expert_tiling(weights: torch.Tensor) -> Tiling:
    """The tiling for a single expert's matrix: which experts are selected must not change the summation order."""
    return tiling([weights[0]])


@torch.library.custom_op("depthdecay::expert_products", mutates_args=())
def expert_products(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, each: bool, overlap: bool
) -> torch.Tensor:
    """For each token and each of its selected experts (tokens, choices), a vector times that expert's matrix.

    weights (experts, rows, columns). x has one vector per token, or with `each` one per choice, the choices of a token
    adjacent. Returns split-K parts (parts, tokens * choices, rows) to be summed, as `skinny_gemm` does.
    """
    if x.is_cuda:
        return multiply_by_experts(x, chosen, weights, each, overlap)
    vectors = x if each else x.repeat_interleave(chosen.shape[1], dim=0)
    whole = torch.bmm(weights[chosen.flatten()], vectors.unsqueeze(-1)).squeeze(-1).float()
    return torch.cat([whole.unsqueeze(0), whole.new_zeros((expert_tiling(weights).parts - 1, *whole.shape))])


def multiply_by_experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, each: bool, overlap: bool
) -> torch.Tensor:
    """Launch the kernel of `expert_products`."""
    (count, choices), (experts, rows, columns) = chosen.shape, weights.shape
    tile = expert_tiling(weights)
    y = torch.empty((tile.parts, count * choices, rows), dtype=torch.float32, device=x.device)
    _expert_kernel[(-(-count // MOST_ROWS), rows // tile.rows, tile.parts * experts)](
        x.contiguous(),
        chosen.contiguous(),
        weights,
        y,
        count,
        rows,
        columns,
        columns // tile.parts,
        tile.parts,
        CHOICES=choices,
        LANES=triton.next_power_of_2(choices),
        EACH=each,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        PRECISION=PRECISION,
        PDL=overlap,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=overlap,
    )
    return y


@expert_products.register_fake
def _(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, each: bool, overlap: bool) -> torch.Tensor:
    shape = (expert_tiling(weights).parts, chosen.shape[0] * chosen.shape[1], weights.shape[1])
    return x.new_empty(shape, dtype=torch.float32)


def takes_experts(weights: torch.Tensor) -> bool:
    """Whether the kernel supports these matrices."""
    return weights.dim() == 3 and weights.shape[1] % LOW.rows == 0 and is_even(weights[0]) and weights.is_contiguous()
