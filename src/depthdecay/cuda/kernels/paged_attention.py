"""Paged attention of single tokens over a KV cache in blocks, without gathering the blocks first.

A gathered copy is written and read once more: for 64 rows of 300 positions of Llama-2-7B, whose keys and values take
10 GB, that moves 30 GB, on top of 13.5 GB of weights. Here each program walks along one row's blocks and reads every
key once. It reads the row's length from device memory, so one captured graph serves texts of any length.

By default a row's positions are split by how many rows there are. That is fastest, but rounding depends on the batch.
Exact rows use the chunks of `split_attention` and combine them in the same order, so they are batch-invariant and
bitwise identical to the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from depthdecay.cuda.kernels.split_attention import (
    LEVEL,
    MOST_DOUBLINGS,
    ROWS,
    SPLIT,
    SUMMED,
    chunks_for,
    scores_by,
    tiling,
    triton,
)
from depthdecay.runners.kv_blocks import BLOCK

if triton is not None:
    import triton.language as tl

    from depthdecay.cuda.kernels.split_attention import add_up, chunk_at, chunk_of, look, store_chunk

PROGRAMS = 528  # below this, a row's positions are split further: four programs for each of an H200's 132 SMs
MOST_PARTS = 16

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _walk(  # type: ignore[no-untyped-def]
        q,
        k_ptr,
        v_ptr,
        blocks,
        k_place,
        v_place,
        begin,
        end,
        first,
        length,
        scale,
        height,
        SIZE: tl.constexpr,
        LANES: tl.constexpr,
        VALUE_SIZE: tl.constexpr,
        VALUE_LANES: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
        CAPPED: tl.constexpr,
    ):
        """The partial attention of queries over positions `begin` to `end`."""
        lanes = tl.arange(0, LANES)
        value_lanes = tl.arange(0, VALUE_LANES)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        found = tl.zeros((ROWS, VALUE_LANES), dtype=tl.float32)
        for tile in range(begin, end, TILE):
            position = tile + tl.arange(0, TILE)
            seen = (position >= first) & (position < length)
            block = tl.load(blocks + position // BLOCK, mask=seen, other=0).to(tl.int64)
            place = block * BLOCK + position % BLOCK
            k = tl.load(
                k_ptr + place[:, None] * k_place + lanes[None, :],
                mask=seen[:, None] & (lanes < SIZE)[None, :],
                other=0.0,
            )
            v = tl.load(
                v_ptr + place[:, None] * v_place + value_lanes[None, :],
                mask=seen[:, None] & (value_lanes < VALUE_SIZE)[None, :],
                other=0.0,
            )
            highest, total, found = look(q, k, v, seen[None, :], highest, total, found, scale, height, CAPPED)
        return highest, total, found

    # Triton specializes on 1 and multiples of 16: layers 1 and 16 would be recompiled, during a capture.
    @triton.jit(do_not_specialize=["layer", "chunks", "window"])  # type: ignore[untyped-decorator]
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
        chunks,
        window,
        scale,
        height,
        SIZE: tl.constexpr,
        LANES: tl.constexpr,
        VALUE_SIZE: tl.constexpr,
        VALUE_LANES: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
        PARTS: tl.constexpr,
        SPLIT: tl.constexpr,
        LEVEL: tl.constexpr,
        MOST: tl.constexpr,
        EXACT: tl.constexpr,
        CAPPED: tl.constexpr,
    ):
        row = tl.program_id(0) // groups
        group = tl.program_id(0) % groups
        part = tl.program_id(1)
        own = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # among the query heads that share these keys
        inside = own < share
        head = group * share + own
        lanes = tl.arange(0, LANES)
        count = tl.load(count_ptr + layer)
        slot = tl.load(slot_ptr + row)
        # Rows beyond the layer's count are padding: they attend to nothing.
        length = tl.where(row < count, tl.load(position_ptr + row) + 1, 0).to(tl.int32)
        first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        q = tl.load(
            q_ptr + row.to(tl.int64) * q_row + head[:, None] * q_head + lanes[None, :],
            mask=inside[:, None] & (lanes < SIZE)[None, :],
            other=0.0,
        )
        keys, values = k_ptr + group * k_group, v_ptr + group * v_group
        blocks = table_ptr + (slot * layers + layer) * most
        if EXACT:
            # The number of programs decides which one handles a chunk, never what the chunk contains.
            begun = chunk_of(first, SPLIT, LEVEL, MOST) + part
            for chunk in range(begun, chunk_of(length - 1, SPLIT, LEVEL, MOST) + 1, PARTS):
                start, reach = chunk_at(chunk, SPLIT, LEVEL, MOST)
                begin = start + tl.maximum(first - start, 0) // TILE * TILE
                end = tl.minimum(start + reach, length)
                highest, total, found = _walk(
                    q,
                    keys,
                    values,
                    blocks,
                    k_place,
                    v_place,
                    begin,
                    end,
                    first,
                    length,
                    scale,
                    height,
                    SIZE,
                    LANES,
                    VALUE_SIZE,
                    VALUE_LANES,
                    BLOCK,
                    ROWS,
                    TILE,
                    CAPPED,
                )
                stored = (tl.program_id(0) * chunks + chunk).to(tl.int64) * share + own
                store_chunk(part_ptr, stat_ptr, stored, inside, highest, total, found, VALUE_LANES)
        else:
            start = first // TILE * TILE
            tiles = (length - start + TILE - 1) // TILE
            each = (tiles + PARTS - 1) // PARTS * TILE
            begin = start + part * each
            end = tl.minimum(begin + each, length)
            highest, total, found = _walk(
                q,
                keys,
                values,
                blocks,
                k_place,
                v_place,
                begin,
                end,
                first,
                length,
                scale,
                height,
                SIZE,
                LANES,
                VALUE_SIZE,
                VALUE_LANES,
                BLOCK,
                ROWS,
                TILE,
                CAPPED,
            )
            if PARTS == 1:
                found = found / tl.where(total == 0.0, 1.0, total)[:, None]
                value_lanes = tl.arange(0, VALUE_LANES)
                target = (row * groups * share + head).to(tl.int64)[:, None] * VALUE_LANES + value_lanes[None, :]
                tl.store(y_ptr + target, found.to(y_ptr.dtype.element_ty), mask=inside[:, None])
            else:
                stored = (tl.program_id(0) * PARTS + part).to(tl.int64) * share + own
                store_chunk(part_ptr, stat_ptr, stored, inside, highest, total, found, VALUE_LANES)

    @triton.jit(do_not_specialize=["layer", "chunks", "window"])  # type: ignore[untyped-decorator]
    def _paged_sum_kernel(  # type: ignore[no-untyped-def]
        part_ptr,
        stat_ptr,
        y_ptr,
        position_ptr,
        count_ptr,
        layer,
        groups,
        share,
        chunks,
        window,
        DIM: tl.constexpr,
        SPLIT: tl.constexpr,
        LEVEL: tl.constexpr,
        MOST: tl.constexpr,
        SUMMED: tl.constexpr,
        EXACT: tl.constexpr,
    ):
        row = tl.program_id(0) // groups
        own = tl.program_id(1)
        if EXACT:
            length = tl.where(row < tl.load(count_ptr + layer), tl.load(position_ptr + row) + 1, 0).to(tl.int32)
            first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
            begin, end = chunk_of(first, SPLIT, LEVEL, MOST), chunk_of(length - 1, SPLIT, LEVEL, MOST)
        else:
            begin = tl.full((), 0, tl.int32)
            end = chunks - 1
        base = tl.program_id(0).to(tl.int64) * chunks * share + own
        y = add_up(part_ptr, stat_ptr, base, share, begin, end, DIM, SUMMED)
        place = tl.program_id(0).to(tl.int64) * share + own
        tl.store(y_ptr + place * DIM + tl.arange(0, DIM), y.to(y_ptr.dtype.element_ty))


@dataclass(frozen=True)
class Paged:
    """Where single-token rows find their keys and values. All of it is on the device, at fixed addresses."""

    table: torch.Tensor  # (slots, layers, blocks), int32
    slots: torch.Tensor  # of each row
    positions: torch.Tensor  # of each row's token
    counts: torch.Tensor  # per layer: how many of the first rows run it


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
    """Attention of queries (rows, heads, 1, dim) over a store's (place, group, dim). Returns (rows, 1, heads, dim).

    Rows that do not run the layer get zeros. With `exact`, a row is bitwise identical to `split_attention`, whatever
    the number of rows.
    """
    if not query.is_cuda:
        return _reference(query, keys, values, paged, layer, scaling, window, softcap)
    return _launched(query, keys, values, paged, layer, scaling, window, softcap, exact)


def _launched(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paged: Paged,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    exact: bool,
) -> torch.Tensor:
    assert query.stride(3) == keys.stride(2) == values.stride(2) == 1
    rows, heads, _, size = query.shape
    groups, value_size = values.shape[1:]
    share = heads // groups
    lanes, value_lanes = (max(16, triton.next_power_of_2(wide)) for wide in (size, value_size))
    tiles = -(-share // ROWS)
    most = chunks_for(paged.table.shape[2] * BLOCK)
    parts = parts_for(rows * groups * tiles, most if exact else MOST_PARTS)
    chunks = most if exact else parts
    kept = rows * heads * chunks if exact or parts > 1 else 0
    partial = torch.empty((kept, value_lanes), dtype=torch.float32, device=query.device)
    stats = torch.empty((kept, 2), dtype=torch.float32, device=query.device)
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
        chunks,
        window or 0,
        *scores_by(scaling, softcap),
        SIZE=size,
        LANES=lanes,
        VALUE_SIZE=value_size,
        VALUE_LANES=value_lanes,
        BLOCK=BLOCK,
        ROWS=ROWS,
        PARTS=parts,
        SPLIT=SPLIT,
        LEVEL=LEVEL,
        MOST=MOST_DOUBLINGS,
        EXACT=exact,
        CAPPED=softcap is not None,
        **tiling(max(lanes, value_lanes), query.element_size()),
    )
    if kept:
        _paged_sum_kernel[(rows * groups, share)](
            partial,
            stats,
            y,
            paged.positions,
            paged.counts,
            layer,
            groups,
            share,
            chunks,
            window or 0,
            DIM=value_lanes,
            SPLIT=SPLIT,
            LEVEL=LEVEL,
            MOST=MOST_DOUBLINGS,
            SUMMED=SUMMED,
            EXACT=exact,
            num_warps=4,
        )
    return y[..., :value_size]


def parts_for(programs: int, most: int = MOST_PARTS) -> int:
    """How many parts to split a row's positions into, if `programs` would run without a split."""
    parts = 1
    while parts < most and programs * parts < PROGRAMS:
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
    """The same in plain torch, over a table's full capacity: like the kernel, it never synchronizes."""
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
