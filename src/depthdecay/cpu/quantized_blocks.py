"""Quantized weights: how they are rounded, packed for the compiled pass, and dequantized again.

A block is 32 adjacent weights of a row with a 16-bit scale (and for int4 a 16-bit offset). This matches GGUF's Q4_0,
Q4_1, Q5_0 and Q8_0, so blocks from such files are kept unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

BLOCK, LANES = 32, 16
FLOAT32, BFLOAT16, INT4, INT5, INT8 = range(5)  # enum Kind in kernels.cpp
NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16", INT4: "4 bits", INT5: "5 bits", INT8: "8 bits"}
GROUP_BYTES = {INT4: 320, INT5: 352, INT8: 544}  # per group of 16 rows by 32 columns
# Fractions of a block's range to try: clipping its ends costs a few outliers and gives all others finer steps.
_RANGES = (1.0, 0.95, 0.9, 0.85)


@dataclass(frozen=True)
class QuantizedBlocks:
    """A matrix as integers: weight = scale * number + offset, per block."""

    kind: int
    numbers: torch.Tensor  # (rows, columns) uint8 or int8
    scale: torch.Tensor  # (rows, columns / 32) float16
    offset: torch.Tensor | None = None  # int4 only

    @property
    def rows(self) -> int:
        return self.numbers.shape[0]

    @property
    def columns(self) -> int:
        return self.numbers.shape[1]

    def widened(self) -> torch.Tensor:
        """The dequantized weights, exact in float32."""
        numbers = self.numbers.reshape(self.rows, -1, BLOCK).float()
        if self.kind == INT5:
            numbers = numbers - 16
        weights = numbers * self.scale.float().unsqueeze(-1)
        if self.offset is not None:
            weights = weights + self.offset.float().unsqueeze(-1)
        return weights.reshape(self.rows, self.columns)

    def reordered(self, rows: torch.Tensor) -> QuantizedBlocks:
        offset = None if self.offset is None else self.offset[rows]
        return QuantizedBlocks(self.kind, self.numbers[rows], self.scale[rows], offset)


@dataclass(frozen=True)
class Packed:
    """Blocks in the layout of the compiled pass: 16 rows interleaved, so that a vector holds one column of them."""

    kind: int
    rows: int
    columns: int
    data: torch.Tensor  # uint8

    @property
    def nbytes(self) -> int:
        return self.data.numel()


def can_hold(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.shape[1] % BLOCK == 0


def rounded_to_8(weight: torch.Tensor) -> QuantizedBlocks:
    values = weight.float().reshape(weight.shape[0], -1, BLOCK)
    scale = (values.abs().amax(-1) / 127).half()
    numbers = (values / _divisor(scale)).round().clamp(-127, 127).to(torch.int8)
    return QuantizedBlocks(INT8, numbers.reshape(weight.shape), scale)


def rounded_to_4(weight: torch.Tensor) -> QuantizedBlocks:
    """Per block, the range with the smallest squared error."""
    values = weight.float().reshape(weight.shape[0], -1, BLOCK)
    errors = torch.stack([_square_error(values, *_in_16_steps(values, torch.tensor(share))) for share in _RANGES])
    numbers, scale, offset = _in_16_steps(values, torch.tensor(_RANGES)[errors.argmin(0)])
    return QuantizedBlocks(INT4, numbers.to(torch.uint8).reshape(weight.shape), scale, offset)


def _in_16_steps(values: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scale and offset when this share of each block's range is divided into 15 steps."""
    low, high = values.amin(-1), values.amax(-1)
    span = (high - low) * share
    scale, offset = (span / 15).half(), (low + (high - low - span) / 2).half()
    numbers = ((values - offset.float().unsqueeze(-1)) / _divisor(scale)).round().clamp(0, 15)
    return numbers, scale, offset


def _square_error(
    values: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    widened = numbers * scale.float().unsqueeze(-1) + offset.float().unsqueeze(-1)
    return (widened - values).pow(2).sum(-1)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    wide = scale.float().unsqueeze(-1)
    return torch.where(wide == 0, 1.0, wide)


def packed(blocks: QuantizedBlocks) -> Packed:
    missing = -blocks.rows % LANES
    numbers = _padded(blocks.numbers, missing).reshape(-1, LANES, blocks.columns // BLOCK, BLOCK)
    parts = [_side_by_side(blocks.scale, missing)]
    if blocks.kind == INT8:
        parts.append(_bytes(numbers))
    else:
        if blocks.kind == INT4:
            assert blocks.offset is not None
            parts.append(_side_by_side(blocks.offset, missing))
        parts.append(_nibbles(numbers & 15))
        if blocks.kind == INT5:
            parts.append(_fifth_bits(numbers >> 4))
    return Packed(blocks.kind, blocks.rows, blocks.columns, torch.cat(parts, dim=2).reshape(-1))


def _padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros((missing, tensor.shape[1]))]) if missing else tensor


def _side_by_side(scale: torch.Tensor, missing: int) -> torch.Tensor:
    """(groups, blocks, bytes of 16 half floats)"""
    groups = _padded(scale, missing).reshape(-1, LANES, scale.shape[1])
    return groups.permute(0, 2, 1).contiguous().view(torch.uint8)


def _nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Eight columns of a row in a 32-bit word, words of 16 rows adjacent."""
    pairs = numbers.reshape(*numbers.shape[:3], 4, 4, 2)
    joined = pairs[..., 0] | (pairs[..., 1] << 4)
    return joined.permute(0, 2, 3, 1, 4).reshape(numbers.shape[0], numbers.shape[2], -1)


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Four columns of a row in a 32-bit word, shifted to unsigned."""
    words = (numbers.to(torch.int16) + 128).to(torch.uint8).reshape(*numbers.shape[:3], 8, 4)
    return words.permute(0, 2, 3, 1, 4).reshape(numbers.shape[0], numbers.shape[2], -1)


def _fifth_bits(bits: torch.Tensor) -> torch.Tensor:
    powers = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8)
    joined = (bits.reshape(*bits.shape[:3], 4, 8) * powers).sum(-1, dtype=torch.uint8)
    return joined.permute(0, 2, 1, 3).reshape(bits.shape[0], bits.shape[2], -1)


# GGUF blocks, each as bytes (rows, blocks, bytes per block).


def _halves(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.float16).squeeze(-1)


def _low_then_high(raw: torch.Tensor) -> torch.Tensor:
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _q4_0(raw: torch.Tensor) -> QuantizedBlocks:
    scale = _halves(raw[..., :2])
    return QuantizedBlocks(INT4, _flat(_low_then_high(raw[..., 2:])), scale, (-8 * scale.float()).half())


def _q4_1(raw: torch.Tensor) -> QuantizedBlocks:
    return QuantizedBlocks(INT4, _flat(_low_then_high(raw[..., 4:])), _halves(raw[..., :2]), _halves(raw[..., 2:4]))


def _q5_0(raw: torch.Tensor) -> QuantizedBlocks:
    places = torch.arange(8, dtype=torch.uint8)
    fifth = ((raw[..., 2:6].unsqueeze(-1) >> places) & 1).reshape(*raw.shape[:2], BLOCK)
    return QuantizedBlocks(INT5, _flat(_low_then_high(raw[..., 6:]) | (fifth << 4)), _halves(raw[..., :2]))


def _q8_0(raw: torch.Tensor) -> QuantizedBlocks:
    return QuantizedBlocks(INT8, _flat(raw[..., 2:].contiguous().view(torch.int8)), _halves(raw[..., :2]))


def _flat(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.reshape(numbers.shape[0], -1).contiguous()


_READERS: dict[str, tuple[int, Callable[[torch.Tensor], QuantizedBlocks]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q8_0": (34, _q8_0),
}


def from_gguf(tensor: Any) -> QuantizedBlocks | None:
    """A GGUF tensor's own blocks; None for types without an exact counterpart here."""
    size, read = _READERS.get(tensor.tensor_type.name, (0, None))
    if read is None:
        return None
    columns, rows = (int(length) for length in tensor.shape)
    raw = np.frombuffer(tensor.data, dtype=np.uint8) if not isinstance(tensor.data, np.ndarray) else tensor.data
    return read(torch.from_numpy(raw.reshape(rows, columns // BLOCK, size).copy()))
