"""Runs the attention kernels without a GPU, in Triton's interpreter: `TRITON_INTERPRET=1 python` this file."""

from __future__ import annotations

import torch
import triton_interpreter  # noqa: F401

from depthdecay.cuda.decode_attention import spans_of
from depthdecay.cuda.kernels import paged_attention as over_blocks
from depthdecay.cuda.kernels import split_attention as attend
from depthdecay.cuda.kernels.paged_attention import Paged

TOLERANCE = {torch.float16: 2e-3, torch.float32: 3e-6}  # the interpreter does not support bfloat16


def require_close(got: torch.Tensor, exact: torch.Tensor) -> None:
    error = float((got.double() - exact).norm() / exact.norm())
    assert error < TOLERANCE[got.dtype], error


def check_texts(
    dtype: torch.dtype, size: int, tokens: int, last: int, padding: list[int], window: int | None, softcap: float | None
) -> None:
    """Texts in lock-step, compared with plain attention, with single tokens and texts, and with another bucket."""
    torch.manual_seed(0)
    ways, batch, positions = (0.2, window, softcap), len(padding), last + tokens + 100
    query = torch.randn((batch, 4, tokens, size)).to(dtype)
    key, value = (torch.randn((positions, batch, 2, size)).to(dtype).permute(1, 2, 0, 3) for _ in "kv")
    spans = spans_of(torch.tensor(padding), torch.arange(last, last + tokens))
    got = attend._launched(query, key, value, spans, *ways, False)
    exact = attend._reference(query.double(), key.double(), value.double(), spans, *ways)
    require_close(got, exact)
    mask = attend.mask_of(spans, positions + 8, window)
    require_close(attend._launched(query, key, value, mask, *ways, False), exact)
    for token in range(tokens):
        own = slice(token, token + 1)
        alone = attend._launched(query[:, :, own], key, value, spans[:, :, own], *ways, False)
        assert torch.equal(alone, got[:, own])
    nearer = slice(0, last + tokens)
    assert torch.equal(attend._launched(query, key[:, :, nearer], value[:, :, nearer], spans, *ways, False), got)
    for text, first in enumerate(padding):
        own = slice(text, text + 1)
        states = query[own], key[own, :, first:], value[own, :, first:], spans[own] - first
        assert torch.equal(attend._launched(*states, *ways, False), got[own])


def check_rows(
    dtype: torch.dtype, heads: int, size: int, positions: list[int], window: int | None, softcap: float | None
) -> None:
    """Rows over KV blocks, compared with plain attention; exact rows also alone and over a contiguous cache."""
    torch.manual_seed(0)
    rows, most = len(positions), -(-(max(positions) + 1) // 16)
    table = torch.randperm(rows * most).add(1).view(rows, 1, most).int()
    keys, values = (torch.randn((rows * most + 1) * 16, 2, size).to(dtype) for _ in "kv")
    query = torch.randn((rows, heads, 1, size)).to(dtype)

    def attended(chosen: list[int], exact: bool, counts: int) -> torch.Tensor:
        held = torch.tensor([positions[row] for row in chosen])
        paged = Paged(table, torch.tensor(chosen), held, torch.tensor([counts]))
        return over_blocks._launched(query[chosen], keys, values, paged, 0, 0.2, window, softcap, exact)

    every = list(range(rows))
    paged = Paged(table, torch.tensor(every), torch.tensor(positions), torch.tensor([rows - 1]))
    wide = [tensor.double() for tensor in (query, keys, values)]
    expected = over_blocks._reference(*wide, paged, 0, 0.2, window, softcap)
    for exact in (False, True):
        got = attended(every, exact, rows - 1)
        require_close(got, expected)
        assert not got[-1].any()  # the last row does not run the layer
    for row in range(rows - 1):
        assert torch.equal(attended([row], True, 1)[0], got[row])
        places = torch.arange(positions[row] + 1)
        places = table[row, 0, places // 16].long() * 16 + places % 16
        states = [store[places].transpose(0, 1).unsqueeze(0) for store in (keys, values)]
        spans = torch.tensor([[[[0, positions[row]]]]])
        if size in attend.HEAD_SIZES:
            alone = attend._launched(query[row : row + 1], *states, spans, 0.2, window, softcap, False)
            assert torch.equal(alone[0], got[row])


if __name__ == "__main__":
    for dtype in TOLERANCE:
        check_texts(dtype, 64, 3, 150, [0, 7], None, None)
        check_texts(dtype, 128, 9, 300, [0], 100, None)
        check_texts(dtype, 256, 1, 2150, [64], 2090, 5.0)  # chunks of two lengths
        check_rows(dtype, 4, 64, [300, 5, 64, 9], None, None)
        check_rows(dtype, 40, 64, [100, 63, 9], 90, 20.0)
        check_rows(dtype, 4, 8, [33, 2, 9], None, None)
    print("alike")
