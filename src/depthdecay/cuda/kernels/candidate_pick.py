"""A seeded draw among a row's likeliest tokens, in one launch: top-k, top-p, min-p, noise and argmax.

With transformers' processors and keyed noise over a whole vocabulary this takes 40 kernels, a sort among them. A
program has one row, and what it does depends on the row's values alone, so results are batch-invariant.
"""

from __future__ import annotations

import torch

from depthdecay.runners.keyed_noise import gumbel_noise

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton: CPU-only builds never reach the kernel
    triton = None

MOST_CANDIDATES = 256  # per row: a program compares each with each

if triton is not None:

    @triton.jit
    def _mixed(x):  # type: ignore[no-untyped-def]
        """Murmur3's 32-bit finaliser in 64-bit integers, as in `runners/keyed_noise`."""
        x = x & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ (x >> 16)

    @triton.jit
    def _pick_kernel(  # type: ignore[no-untyped-def]
        values_ptr,
        places_ptr,
        tokens_ptr,
        keys_ptr,
        picked_ptr,
        count,
        top_k,
        top_p,
        min_p,
        IS_CUT: tl.constexpr,
        LANES: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.arange(0, LANES)
        inside = lanes < count
        values = tl.load(values_ptr + row * count + lanes, mask=inside, other=float("-inf"))
        places = tl.load(places_ptr + row * count + lanes, mask=inside, other=0)
        tokens = tl.load(tokens_ptr + row * count + lanes, mask=inside, other=0)
        first = tl.load(values_ptr + row * count)
        least = tl.load(values_ptr + row * count + tl.minimum(top_k, count) - 1)
        kept = inside & (values >= least)
        if IS_CUT:
            last = tl.load(values_ptr + row * count + count - 1)
            leaves_out = tl.where(last < least, 0, tl.where(first > least, 1, 0))
            kept = kept & ((values > least).to(tl.int32) >= leaves_out)
        weights = tl.where(kept, tl.exp(values - first), 0.0)
        total = tl.sum(weights, 0)
        above = tl.sum(tl.where(values[None, :] > values[:, None], weights[None, :], 0.0), 1)
        within = (above < top_p * total) | (values == first) | (top_p >= 1.0)
        kept = kept & within & (weights >= min_p)
        key = tl.load(keys_ptr + row)
        bits = _mixed(_mixed(tokens * 0x85EBCA77 + key) + key) >> 8
        uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 5.9604644775390625e-08, 0.999999940395355224609375)  # 2**-24
        noise = -tl.log(-tl.log(uniform))
        scores = tl.where(kept, values + noise, float("-inf"))
        best = kept & (scores == tl.max(scores, 0))
        picked = tl.min(tl.where(best, places, 0x7FFFFFFF), 0)
        likeliest = tl.load(places_ptr + row * count)
        tl.store(picked_ptr + row, tl.where(picked == 0x7FFFFFFF, likeliest, picked))


@torch.library.custom_op("depthdecay::pick_candidate", mutates_args=())
def pick_candidate(
    values: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    keys: torch.Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    is_cut: bool,
) -> torch.Tensor:
    """The place of each row's draw: of (rows, count) candidates, sorted by value, with their places and tokens.

    `keys` (rows) are the rows' noise keys. Tokens with equal values are kept together. `is_cut`: there were more tokens
    than candidates. If the last one ties with the k-th, which of those were collected is arbitrary, so none is kept. If
    nothing can be kept, since values are not finite, the first candidate is picked.
    """
    if values.is_cuda:
        return launched(values, places, tokens, keys, top_k, top_p, min_p, is_cut)
    first, least = values[:, :1], values[:, min(top_k, values.shape[1]) - 1].unsqueeze(1)
    kept = values >= least
    if is_cut:
        kept &= (values > least) | (values[:, -1:] < least) | (first == least)
    weights = torch.where(kept, (values - first).exp(), 0.0)
    higher = values.unsqueeze(1) > values.unsqueeze(2)
    above = torch.where(higher, weights.unsqueeze(1), 0.0).sum(2)
    within = (above < top_p * weights.sum(1, keepdim=True)) | (values == first)
    kept &= (within | (top_p >= 1)) & (weights >= min_p)
    scores = torch.where(kept, values + gumbel_noise(keys, 0, tokens), float("-inf"))
    best = kept & (scores == scores.amax(1, keepdim=True))
    picked = torch.where(best, places, 0x7FFFFFFF).amin(1)
    return torch.where(best.any(1), picked, places[:, 0])


def launched(
    values: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    keys: torch.Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    is_cut: bool,
) -> torch.Tensor:
    """Start the kernel of `pick_candidate`."""
    rows, count = values.shape
    picked = torch.empty(rows, dtype=torch.long, device=values.device)
    given = (tensor.contiguous() for tensor in (values, places, tokens, keys))
    _pick_kernel[(rows,)](
        *given,
        picked,
        count,
        top_k,
        top_p,
        min_p,
        IS_CUT=is_cut,
        LANES=triton.next_power_of_2(count),
        num_warps=8 if count > 128 else 4,
    )
    return picked


@pick_candidate.register_fake
def _(values: torch.Tensor, *_: object) -> torch.Tensor:
    return values.new_empty(values.shape[0], dtype=torch.long)
