"""Tensor files next to a plan: written atomically, validated when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from depthdecay.errors import DepthDecayError, one_line
from depthdecay.files import write_whole

Made = TypeVar("Made")


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str], what: str) -> Path:
    """Write one safetensors file. `what`: the plan's name for it, for error messages."""
    from safetensors.torch import save

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(file, save(dict(tensors), dict(about)))
    except OSError as error:
        raise DepthDecayError(f"the {what} cannot be written to {file}: {error.strerror or error}") from None


def read_tensors(
    file: Path,
    kind: tuple[str, str],
    what: str,
    make: Callable[[dict[str, torch.Tensor], dict[str, Any]], Made],
) -> Made:
    """`make` applied to a file's tensors and metadata; `kind`: the expected format and version."""
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as content:
            about: dict[str, Any] = content.metadata() or {}
            if (about.get("format"), about.get("version")) != kind:
                raise DepthDecayError(f"{file} holds no {what} that this release can read")
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            raise DepthDecayError(f"{file} contains values that are not finite")
        return make(tensors, about)
    except DepthDecayError:
        raise
    except FileNotFoundError:
        raise DepthDecayError(f"there is no {file}, where the plan's {what} should be") from None
    except Exception as error:
        raise DepthDecayError(f"{file} cannot be read as {what}: {one_line(error)}") from None
