"""Attention of single tokens over keys and values in blocks, on CUDA without gathering these first.

A gathered copy is written and read once more: for 64 rows of 300 positions of Llama-2-7B, whose keys and values are
10 GB, that moves 30 GB, beside 13.5 GB of weights. Here each program walks along one row's blocks and reads every key
once. How far, it reads from the device, so one captured graph serves texts of every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from depthdecay.cuda.kernels.split_attention import ROWS, sum_parts, triton
from depthdecay.runners.kv_blocks import BLOCK

if triton is not None:
    import triton.language as tl

PROGRAMS = 528  # below which a row's positions are shared out among more: four to each of an H200's 132 processors
MOST_PARTS = 16
TILE_BYTES = 2**14  # of the keys that a program holds at once

if triton is not None:

    @triton.jit(do_not_specialize=["layer"])  # or layers 1 and 16 would be compiled anew, inside a capture
    def _paged_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        table_ptr,
        slot_ptr,
        position_ptr,
        count_ptr,
        part_ptr,
        stat_ptr,
        y_ptr,
        layer,
        layers,
        most,
        q_row,
        q_head,
        k_place,
        k_group,
        v_place,
        v_group,
        groups,
        share,
        window,
        scale,
        softcap,
        SIZE: tl.constexpr,
        LANES: tl.constexpr,
        VALUE_SIZE: tl.constexpr,
        VALUE_LANES: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
        PARTS: tl.constexpr,
        CAPPED: tl.constexpr,
    ):
        row = tl.program_id(0) // groups
        group = tl.program_id(0) % groups
        part = tl.program_id(1)
        own = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # of the heads that share these keys
        inside = own < share
        head = group * share + own
        lanes = tl.arange(0, LANES)
        value_lanes = tl.arange(0, VALUE_LANES)
        count = tl.load(count_ptr + layer)
        slot = tl.load(slot_ptr + row)
        # Rows beyond the layer's own are there to fill a graph up: they look at nothing.
        length = tl.where(row < count, tl.load(position_ptr + row) + 1, 0).to(tl.int32)
        first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        start = first // TILE * TILE
        tiles = (length - start + TILE - 1) // TILE
        each = (tiles + PARTS - 1) // PARTS * TILE
        begin = start + part * each
        end = tl.minimum(begin + each, length)
        q = tl.load(
            q_ptr + row.to(tl.int64) * q_row + head[:, None] * q_head + lanes[None, :],
            mask=inside[:, None] & (lanes < SIZE)[None, :],
            other=0.0,
        )
        blocks = table_ptr + (slot * layers + layer) * most
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        found = tl.zeros((ROWS, VALUE_LANES), dtype=tl.float32)
        for tile in range(begin, end, TILE):
            position = tile + tl.arange(0, TILE)
            seen = (position >= first) & (position < length)
            block = tl.load(blocks + position // BLOCK, mask=seen, other=0).to(tl.int64)
            place = block * BLOCK + position % BLOCK
            k = tl.load(
                k_ptr + place[:, None] * k_place + group * k_group + lanes[None, :],
                mask=seen[:, None] & (lanes < SIZE)[None, :],
                other=0.0,
            )
            v = tl.load(
                v_ptr + place[:, None] * v_place + group * v_group + value_lanes[None, :],
                mask=seen[:, None] & (value_lanes < VALUE_SIZE)[None, :],
                other=0.0,
            )
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # softcap times tanh
            scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
            above = tl.maximum(highest, tl.max(scores, 1))
            safe = tl.where(above == float("-inf"), 0.0, above)
            weights = tl.exp2(scores - safe[:, None])
            before = tl.exp2(highest - safe)
            total = total * before + tl.sum(weights, 1)
            found = found * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = above
        if PARTS == 1:
            found = found / tl.where(total == 0.0, 1.0, total)[:, None]
            heads = groups * share
            target = (row * heads + head).to(tl.int64)[:, None] * VALUE_LANES + value_lanes[None, :]
            tl.store(y_ptr + target, found.to(y_ptr.dtype.element_ty), mask=inside[:, None])
        else:  # laid out as `sum_parts` expects it
            stored = ((tl.program_id(0) * PARTS + part) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * ROWS
            stored = stored + tl.arange(0, ROWS)
            tl.store(stat_ptr + stored * 2, highest)
            tl.store(stat_ptr + stored * 2 + 1, total)
            tl.store(part_ptr + stored[:, None] * VALUE_LANES + value_lanes[None, :], found, mask=inside[:, None])


@dataclass(frozen=True)
class Paged:
    """Where single-token rows find their keys and values: all of it on the device and at fixed addresses."""

    table: torch.Tensor  # (slots, layers, blocks), 32 bits
    slots: torch.Tensor  # of each row
    positions: torch.Tensor  # of each row's token
    counts: torch.Tensor  # of each layer: so many of the first rows run it


def attend_paged(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paged: Paged,
    layer: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Queries (rows, heads, 1, dim) over a store's (place, group, dim); (rows, 1, heads, dim), as transformers' do.

    Of rows that do not run the layer the answer is zeros. With `exact` a row's bits depend on its own text alone.
    """
    if not query.is_cuda:
        return _reference(query, keys, values, paged, layer, scaling, window, softcap)
    assert query.stride(3) == keys.stride(2) == values.stride(2) == 1
    rows, heads, _, size = query.shape
    groups, value_size = values.shape[1:]
    share = heads // groups
    lanes, value_lanes = (max(16, triton.next_power_of_2(wide)) for wide in (size, value_size))
    wide = max(lanes, value_lanes) * query.element_size()
    tiles = -(-share // ROWS)
    parts = MOST_PARTS if exact else parts_for(rows * groups * tiles)
    stored = rows * groups * tiles * ROWS * parts if parts > 1 else 0
    partial = torch.empty((stored, value_lanes), dtype=torch.float32, device=query.device)
    stats = torch.empty((stored, 2), dtype=torch.float32, device=query.device)
    y = torch.empty((rows, 1, heads, value_lanes), dtype=query.dtype, device=query.device)
    _paged_kernel[(rows * groups, parts, tiles)](
        query,
        keys,
        values,
        paged.table,
        paged.slots,
        paged.positions,
        paged.counts,
        partial,
        stats,
        y,
        layer,
        *paged.table.shape[1:],
        *query.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        groups,
        share,
        window or 0,
        scaling,
        softcap or 0.0,
        SIZE=size,
        LANES=lanes,
        VALUE_SIZE=value_size,
        VALUE_LANES=value_lanes,
        BLOCK=BLOCK,
        ROWS=ROWS,
        TILE=min(64, max(16, TILE_BYTES // wide)),
        PARTS=parts,
        CAPPED=softcap is not None,
        num_warps=4,
    )
    if parts > 1:
        sum_parts(partial, stats, y, groups, 1, share, parts, overlap=False)
    return y[..., :value_size]


def parts_for(programs: int) -> int:
    """Among how many a row's positions are shared out, where so many programs run without that."""
    parts = 1
    while parts < MOST_PARTS and programs * parts < PROGRAMS:
        parts *= 2
    return parts


def _reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paged: Paged,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The same in plain operations, over all that a table can hold: like the kernel it asks the host for nothing."""
    rows, heads = query.shape[:2]
    last = paged.positions[:rows, None]
    position = torch.arange(paged.table.shape[2] * BLOCK, device=query.device)[None]
    seen = (position <= last) & (torch.arange(rows, device=query.device)[:, None] < paged.counts[layer])
    if window is not None:
        seen &= position > last - window
    block = paged.table[paged.slots[:rows], layer].long()[:, position[0] // BLOCK]
    place = torch.where(seen, block * BLOCK + position % BLOCK, 0)
    share = heads // keys.shape[1]
    found, held = (store[place].float().repeat_interleave(share, dim=2) for store in (keys, values))
    scores = torch.einsum("rhd,rphd->rhp", query[:, :, 0].float(), found) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("rhp,rphd->rhd", weights, held).unsqueeze(1).to(query.dtype)
