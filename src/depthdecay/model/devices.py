"""Devices and dtypes: validate what the user requested against what the machine has."""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from depthdecay.errors import ArgumentError

if TYPE_CHECKING:
    import torch

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def choose_device(device: str | None) -> torch.device:
    """The requested device, or the fastest kind available."""
    import torch

    mps = torch.backends.mps.is_available()
    if device is None or str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda", "mps"):
        raise ArgumentError(f"device is '{device}'; expected cpu, cuda, cuda:N or mps", "device")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= gpus:
        found = f"{gpus} CUDA GPU{'s are' if gpus != 1 else ' is'}" if gpus else "no CUDA GPU is"
        raise ArgumentError(f"device is '{device}', but {found} available here; use cpu, or leave it out", "device")
    if place.type == "mps" and not mps:
        raise ArgumentError(f"device is '{device}', but MPS is not available here; use cpu, or leave it out", "device")
    return place


def choose_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The requested dtype; None means the model's own."""
    import torch

    if dtype is None or dtype == "auto":
        return None
    number_type = dtype if isinstance(dtype, torch.dtype) else getattr(torch, _DTYPES.get(dtype, dtype), None)
    if number_type not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(f"dtype is '{dtype}'; expected auto, bf16, fp16 or fp32", "dtype")
    return number_type


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def free_bytes(device: torch.device) -> float:
    """Free memory on a device; infinite where the system does not report it."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return math.inf


def fast_precision(device: torch.device) -> torch.dtype:
    """The precision for training: bfloat16 where a device multiplies matrices much faster in it, else float32.

    CPUs are timed once, in a few milliseconds: their feature flags say little about the speed of a library's kernels.
    """
    import torch

    if device.type == "cuda" or (device.type == "cpu" and _is_faster_in_bfloat16()):
        return torch.bfloat16
    return torch.float32


def in_fast_precision(model: torch.nn.Module) -> torch.autocast:
    """Autocast a float32 model on a CPU to bfloat16 where that is much faster; a no-op elsewhere."""
    import torch

    device = next(model.parameters()).device
    wide = device.type == "cpu" and next(model.parameters()).dtype == torch.float32
    return torch.autocast("cpu", torch.bfloat16, enabled=wide and fast_precision(device) == torch.bfloat16)


@functools.cache
def _is_faster_in_bfloat16() -> bool:
    import torch

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones((512, 512), dtype=dtype), torch.ones((512, 512), dtype=dtype)
        found = []
        for _ in range(6):  # the minimum counts: other processes may share the machine
            started = time.perf_counter()
            left @ right
            found.append(time.perf_counter() - started)
        return min(found)

    return seconds(torch.float32) > 1.5 * seconds(torch.bfloat16)


def overlaps_kernels() -> bool:
    """Whether a kernel can start before the previous one has finished (programmatic dependent launch)."""
    return cuda_generation() >= 9


@functools.cache
def cuda_generation() -> int:
    """The major version of the GPU's compute capability; 0 without a GPU."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
