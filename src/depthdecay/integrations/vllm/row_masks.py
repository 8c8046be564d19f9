"""Rows that have dropped a layer keep their state: after the layer, one kernel for all that this takes."""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds never reach the kernel
    triton = None

_BLOCK = 1024

if triton is not None:

    @triton.jit
    def _settle_kernel(  # type: ignore[no-untyped-def]
        hidden_ptr, residual_ptr, saved_hidden_ptr, saved_residual_ptr, runs_ptr, width, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = lanes < width
        place = row * width + lanes
        # Copied, never multiplied by 0: rows that read unwritten keys may hold NaN.
        if tl.load(runs_ptr + row) != 0:
            tl.store(saved_hidden_ptr + place, tl.load(hidden_ptr + place, mask=inside), mask=inside)
            tl.store(saved_residual_ptr + place, tl.load(residual_ptr + place, mask=inside), mask=inside)
        else:
            tl.store(hidden_ptr + place, tl.load(saved_hidden_ptr + place, mask=inside), mask=inside)
            tl.store(residual_ptr + place, tl.load(saved_residual_ptr + place, mask=inside), mask=inside)


def settle(
    hidden: torch.Tensor, residual: torch.Tensor, saved: tuple[torch.Tensor, torch.Tensor], runs: torch.Tensor
) -> None:
    """Make a layer's output (rows, width) and the state saved before it the same, in place, row by row.

    Where `runs` (rows) is set, both become the output, else both become what was saved.
    """
    rows, width = hidden.shape
    if hidden.is_cuda and hidden.is_contiguous() and residual.is_contiguous():
        grid = (rows, triton.cdiv(width, _BLOCK))
        _settle_kernel[grid](hidden, residual, *saved, runs, width, BLOCK=_BLOCK)
        return
    for new, old in zip((hidden, residual), saved, strict=True):
        chosen = torch.where(runs[:, None], new, old)
        new.copy_(chosen)
        old.copy_(chosen)
