"""A model's matrices as the compiled pass reads them: quantized and cached on disk, or in the model's precision."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthdecay.cpu.quantized_blocks import (
    GROUP_BYTES,
    INT8,
    LANES,
    NAMES,
    Packed,
    QuantizedBlocks,
    can_hold,
    from_gguf,
    packed,
    rounded_to_4,
    rounded_to_8,
)
from depthdecay.cpu.supported_models import Form
from depthdecay.errors import DepthDecayError
from depthdecay.files import cache_folder, made_aside
from depthdecay.model.weights_origin import WeightsOrigin

QUANTIZED = ("int8", "int4")
SETTINGS = ("none", *QUANTIZED)
ROUNDING = 2  # cache version: raise it when quantization or packing of the same weights changes
_FORMAT = "depthdecay-cpu"
_SAMPLES = 32
_GGUF_NAMES = {
    **{"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"},
    **{"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"},
}


@dataclass(frozen=True)
class Rounded:
    """Quantized matrices by name; all others stay in the model's precision."""

    setting: str
    matrices: Mapping[str, Packed] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()  # unchanged blocks of a GGUF file
    left: tuple[str, ...] = ()  # not quantized

    @property
    def is_exact(self) -> bool:
        """Whether quantization changed nothing: all blocks come from the model's own file."""
        return self.kept == self.matrices.keys()

    def describe(self) -> dict[str, Any]:
        kinds = Counter(NAMES[matrix.kind] for matrix in self.matrices.values())
        return {
            "setting": self.setting,
            "matrices": dict(kinds),
            "blocks_of_the_file": len(self.kept),
            "own_precision": list(self.left),
            "bytes": sum(matrix.nbytes for matrix in self.matrices.values()),
        }


def check_setting(setting: str | None) -> None:
    if setting is not None and setting not in SETTINGS:
        raise DepthDecayError(f"quantize is {setting!r}; expected one of {', '.join(SETTINGS)}")


def rounded(
    form: Form, setting: str, origin: WeightsOrigin | None = None, say: Callable[[str], None] = lambda message: None
) -> Rounded:
    """The model's matrices at a setting: from the disk cache, else quantized now and cached."""
    file = None if origin is None else cache_folder() / "cpu" / f"{origin.key}-{setting}-{ROUNDING}.safetensors"
    if file is not None:
        found = _read(file, form, setting)
        if found is not None:
            return found
    say(f"quantizing weights to {setting} (once) …")
    made = _make(form, setting, _own_blocks(form, origin))
    if file is not None:
        _write(file, form, made)
    return made


def widened_weights(form: Form, setting: str, origin: WeightsOrigin | None = None) -> dict[str, torch.Tensor]:
    """The dequantized matrices at a setting, by name and in the model's dtype, for code that computes in floats."""
    own = _own_blocks(form, origin)
    found = ((name, linear, _blocks(name, linear.weight.detach(), setting, own)) for name, linear in form.matrices())
    return {name: blocks.widened().to(linear.weight.dtype) for name, linear, blocks in found if blocks is not None}


def _make(form: Form, setting: str, own: Mapping[str, QuantizedBlocks]) -> Rounded:
    matrices: dict[str, Packed] = {}
    kept, left = set(), []
    for name, linear in form.matrices():
        blocks = _blocks(name, linear.weight.detach(), setting, own)
        if blocks is None:
            left.append(name)
            continue
        matrices[name] = packed(blocks)
        if blocks is own.get(name):
            kept.add(name)
    return Rounded(setting, matrices, frozenset(kept), tuple(left))


def _blocks(
    name: str, weight: torch.Tensor, setting: str, own: Mapping[str, QuantizedBlocks]
) -> QuantizedBlocks | None:
    """A GGUF file's own blocks if it has them (lossless). Otherwise the LM head is always int8: it picks tokens."""
    if not can_hold(weight):
        return None
    blocks = own.get(name)
    if blocks is not None and (setting == "int4" or blocks.kind == INT8):
        return blocks
    return rounded_to_8(weight) if setting == "int8" or name == "head" else rounded_to_4(weight)


def _own_blocks(form: Form, origin: WeightsOrigin | None) -> dict[str, QuantizedBlocks]:
    """Blocks of the GGUF file that the model came from, each checked against the model's weights."""
    if origin is None or origin.gguf is None:
        return {}
    from depthdecay.model.gguf_convert import read_checked

    tensors = {tensor.name: tensor for tensor in read_checked(origin.gguf).tensors}
    found = {}
    for name, linear in form.matrices():
        tensor = tensors.get(_gguf_name(name)) or (tensors.get("token_embd.weight") if name == "head" else None)
        blocks = None if tensor is None else _matching(from_gguf(tensor), linear.weight.detach(), form.head_size)
        if blocks is not None:
            found[name] = blocks
    return found


def _gguf_name(name: str) -> str:
    if name == "head":
        return "output.weight"
    layer, projection = name.split(".")
    return f"blk.{layer}.{_GGUF_NAMES[projection]}.weight"


def _matching(blocks: QuantizedBlocks | None, weight: torch.Tensor, head_size: int) -> QuantizedBlocks | None:
    """The blocks in the model's row order: llama.cpp interleaves the two halves of each head."""
    if blocks is None or (blocks.rows, blocks.columns) != tuple(weight.shape):
        return None
    orders: list[torch.Tensor | None] = [None]
    if blocks.rows % head_size == 0:
        orders.append(_within_heads(blocks.rows, head_size))
    for order in orders:
        candidate = blocks if order is None else blocks.reordered(order)
        if torch.equal(candidate.widened().to(weight.dtype), weight):
            return candidate
    return None


def _within_heads(rows: int, head_size: int) -> torch.Tensor:
    """For every head, first the even rows, then the odd ones."""
    return torch.arange(rows).reshape(-1, head_size // 2, 2).transpose(1, 2).reshape(-1)


def _samples(form: Form) -> dict[str, list[float]]:
    """A few values of every matrix, to detect weights that were changed after loading."""
    found = {}
    for name, linear in form.matrices():
        flat = linear.weight.detach().reshape(-1)
        found[name] = flat[:: max(1, flat.numel() // _SAMPLES)].float().tolist()
    return found


def _read(file: Path, form: Form, setting: str) -> Rounded | None:
    """None if the file is missing, damaged or of another shape; it is then created again."""
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as content:
            about = json.loads((content.metadata() or {})["about"])
            if about["format"] != _FORMAT or about["setting"] != setting:
                return None
            matrices = {}
            for name, (kind, rows, columns) in about["matrices"].items():
                data = content.get_tensor(name)
                if _checksum(data) != about["checksums"][name]:
                    return None
                matrices[name] = Packed(kind, rows, columns, data)
        left = tuple(about["left"])
        same = about["samples"] == _samples(form)
    except Exception:  # anything from a missing file to the library's own errors
        return None
    shapes = {name: tuple(linear.weight.shape) for name, linear in form.matrices()}
    whole = (
        same
        and matrices.keys() | set(left) == shapes.keys()
        and all(
            (matrix.rows, matrix.columns) == shapes[name] and matrix.nbytes == _size(matrix)
            for name, matrix in matrices.items()
        )
    )
    return Rounded(setting, matrices, frozenset(about["kept"]), left) if whole else None


def _checksum(data: torch.Tensor) -> int:
    """Over every byte: corrupted weights would silently give wrong text."""
    return zlib.crc32(data.numpy().data)


def _size(matrix: Packed) -> int:
    return -(-matrix.rows // LANES) * (matrix.columns // 32) * GROUP_BYTES.get(matrix.kind, 0)


def _write(file: Path, form: Form, made: Rounded) -> None:
    """Best effort: if the file cannot be written, the next start quantizes again, which is only slower."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    about = {
        "format": _FORMAT,
        "setting": made.setting,
        "matrices": {name: (m.kind, m.rows, m.columns) for name, m in made.matrices.items()},
        "kept": sorted(made.kept),
        "left": list(made.left),
        "samples": _samples(form),
        "checksums": {name: _checksum(m.data) for name, m in made.matrices.items()},
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with made_aside(file) as draft:
            save_file({name: m.data for name, m in made.matrices.items()}, draft, {"about": json.dumps(about)})
    except (OSError, SafetensorError):  # such as a full disk
        return
