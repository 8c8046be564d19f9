"""Copies a few numbers to pinned host memory with a kernel, as the last node of a graph.

A graph starts a copy node some 5 microseconds after the kernel before it, and the next graph waits for it; a kernel
follows at once.
"""

from __future__ import annotations

import torch

from depthdecay.model.devices import overlaps_kernels

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait
except ImportError:  # no Triton: CPU-only builds never reach the kernel
    triton = None

MOST = 1024  # numbers; more are worth a copy node

if triton is not None:

    @triton.jit
    def _to_host_kernel(source_ptr, host_ptr, count, LANES: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
        lanes = tl.arange(0, LANES)
        if PDL:
            gdc_wait()
        tl.store(host_ptr + lanes, tl.load(source_ptr + lanes, mask=lanes < count), mask=lanes < count)


def copy_to_host(source: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a tensor to one like it in pinned memory, without waiting for it to arrive."""
    if source.is_cuda and triton is not None and source.numel() <= MOST:
        launched(source, host, overlaps_kernels())
    else:
        host.copy_(source, non_blocking=True)


def launched(source: torch.Tensor, host: torch.Tensor, overlap: bool) -> None:
    """Start the kernel of `copy_to_host`."""
    count = source.numel()
    lanes = triton.next_power_of_2(count)
    _to_host_kernel[(1,)](source, host, count, LANES=lanes, PDL=overlap, launch_pdl=overlap)
