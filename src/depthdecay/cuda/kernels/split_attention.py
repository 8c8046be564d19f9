"""Attention of a few new tokens over a KV cache, split into chunks with a summation order fixed by position alone.

For one new token, torch's kernels leave most of a GPU idle, or combine partial results in completion order, so the same
request occasionally gives different bits. Here each program takes one chunk of a text for 16 rows of queries, and a
second kernel combines the chunks from first to last. Chunks are counted from the text's first token and grow along it:
short ones spread a short text over the GPU, long ones keep the number of partial results small. So a row's result does
not depend on timing, on the number of tokens or texts in the pass, on the cache's length, or on left padding.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton: CPU-only builds never reach the kernels
    triton = None

MOST_TOKENS = 16
ROWS = 16  # query rows per program: one tensor-core tile
SPLIT = 64  # positions in each of the first chunks
LEVEL = 32  # chunks of one length, before the length doubles
MOST_DOUBLINGS = 3
SUMMED = 32  # chunks that the sum kernel combines at once
TILE_BYTES = 2**14  # of keys that a program holds at once
WARPS, STAGES = 4, 3  # of a program in 16 bits
# Whether the kernel that sums chunks, and the product after it, may start before attention does: that product then
# prefetches its weights while attention leaves memory idle.
EARLY = True
HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2E = 1.4426950408889634

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def chunk_at(chunk, SPLIT: tl.constexpr, LEVEL: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
        """The start of a chunk within its text, and its length."""
        level = tl.minimum(chunk // LEVEL, MOST)
        length = tl.full((), SPLIT, tl.int32) << level
        return LEVEL * (length - SPLIT) + (chunk - level * LEVEL) * length, length

    @triton.jit  # type: ignore[untyped-decorator]
    def chunk_of(position, SPLIT: tl.constexpr, LEVEL: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
        """The chunk that holds a position of the text; -1 before the text."""
        level = tl.full((), 0, tl.int32)
        for doubled in tl.static_range(1, MOST + 1):
            level += (position >= LEVEL * SPLIT * (2**doubled - 1)).to(tl.int32)
        length = tl.full((), SPLIT, tl.int32) << level
        inside = level * LEVEL + (position - LEVEL * (length - SPLIT)) // length
        return tl.where(position < 0, -1, inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def look(q, k, v, seen, highest, total, found, scale, height, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Online softmax over one more tile: updated row maxima (base-2 scores), sums of weights, and weighted values.

        A tile in which a row sees nothing leaves that row unchanged. `scale` turns dot products into base-2 scores, or
        with a softcap into the argument of tanh; `height` is the cap in base 2.
        """
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = height * (2 * tl.sigmoid(2 * scores) - 1)  # tanh
        scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(scores - safe[:, None])
        before = tl.exp2(highest - safe)
        total = total * before + tl.sum(weights, 1)
        found = found * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        return above, total, found

    @triton.jit  # type: ignore[untyped-decorator]
    def store_chunk(part_ptr, stat_ptr, stored, inside, highest, total, found, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.store(stat_ptr + stored * 2, highest, mask=inside)
        tl.store(stat_ptr + stored * 2 + 1, total, mask=inside)
        lanes = tl.arange(0, DIM)
        tl.store(part_ptr + stored[:, None] * DIM + lanes[None, :], found, mask=inside[:, None])

    @triton.jit  # type: ignore[untyped-decorator]
    def add_up(part_ptr, stat_ptr, base, step, first, last, DIM: tl.constexpr, SUMMED: tl.constexpr):  # type: ignore[no-untyped-def]
        """A row's attention output, combined from chunks `first` to `last`, which are stored `step` apart.

        Blocks of chunks start at fixed multiples for every row, and masked chunks add zeros: the order never varies.
        """
        lanes = tl.arange(0, DIM)
        highest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        found = tl.zeros((DIM,), dtype=tl.float32)
        for block in range(first // SUMMED * SUMMED, last + 1, SUMMED):
            chunk = block + tl.arange(0, SUMMED)
            held = (chunk >= first) & (chunk <= last)
            stored = base + chunk.to(tl.int64) * step
            top = tl.load(stat_ptr + stored * 2, mask=held, other=float("-inf"))
            count = tl.load(stat_ptr + stored * 2 + 1, mask=held, other=0.0)
            part = tl.load(part_ptr + stored[:, None] * DIM + lanes[None, :], mask=held[:, None], other=0.0)
            above = tl.maximum(highest, tl.max(top, 0))
            safe = tl.where(above == float("-inf"), 0.0, above)
            before, now = tl.exp2(highest - safe), tl.exp2(top - safe)
            found = found * before + tl.sum(part * now[:, None], 0)
            total = total * before + tl.sum(count * now, 0)
            highest = above
        return found / tl.where(total == 0.0, 1.0, total)

    # One binary for every number of texts, tokens and positions: Triton would specialize on 1 and multiples of 16.
    _NUMBERS = ["seen_batch", "seen_token", "tokens", "rows", "positions", "chunks", "window"]

    @triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]
    def _part_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        seen_ptr,
        part_ptr,
        stat_ptr,
        q_batch,
        q_head,
        q_token,
        k_batch,
        k_group,
        k_position,
        v_batch,
        v_group,
        v_position,
        seen_batch,
        seen_token,
        groups,
        tokens,
        rows,
        positions,
        chunks,
        window,
        scale,
        height,
        DIM: tl.constexpr,
        ROWS: tl.constexpr,
        SPLIT: tl.constexpr,
        LEVEL: tl.constexpr,
        MOST: tl.constexpr,
        TILE: tl.constexpr,
        MASKED: tl.constexpr,
        CAPPED: tl.constexpr,
        EARLY: tl.constexpr,
        PDL: tl.constexpr,
    ):
        if PDL and EARLY:
            gdc_launch_dependents()
        # Programs that read the same keys are adjacent in the grid, so that later ones hit in L2.
        tiles = (rows + ROWS - 1) // ROWS
        text = tl.program_id(0) // tiles  # one KV head of one batch row
        batch = (text // groups).to(tl.int64)
        group = text % groups
        chunk = chunks - 1 - tl.program_id(1)  # longest first, so that no long one runs alone at the end
        row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)  # a group's query heads, each with all its tokens
        inside = row < rows
        head = group * (rows // tokens) + row // tokens
        token = row % tokens
        lanes = tl.arange(0, DIM)
        start, length = chunk_at(chunk, SPLIT, LEVEL, MOST)
        # Spans are written at the start of a pass, long before the kernel that runs just now and that we wait for: the
        # one that writes keys and values. So they are read while it still runs.
        if MASKED:
            origin = tl.full((), 0, tl.int32)
            last = tl.full((ROWS,), 0, tl.int32) + positions - 1
        else:
            spans = seen_ptr + batch * seen_batch
            origin = tl.load(spans).to(tl.int32)
            last = tl.load(spans + token * seen_token + 1, mask=inside, other=-1).to(tl.int32)
        if PDL:
            gdc_wait()
            if not EARLY:
                gdc_launch_dependents()
        first = tl.where(window > 0, tl.maximum(origin, last - window + 1), origin)
        begin = origin + start
        end = tl.minimum(begin + length, tl.max(last, 0) + 1)
        nearest = tl.min(tl.where(inside, first, positions), 0)
        begin += tl.maximum(nearest - begin, 0) // TILE * TILE
        if begin < end:
            q = tl.load(
                q_ptr + batch * q_batch + head[:, None] * q_head + token[:, None] * q_token + lanes[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            highest = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            found = tl.zeros((ROWS, DIM), dtype=tl.float32)
            for tile in range(begin, end, TILE):
                place = tile + tl.arange(0, TILE)
                held = place < positions
                seen = (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None]) & held[None, :]
                if MASKED:
                    bits = seen_ptr + batch * seen_batch + token[:, None] * seen_token + place[None, :]
                    seen = seen & (tl.load(bits, mask=seen & inside[:, None], other=0) != 0)
                offset = place[:, None].to(tl.int64)
                k = tl.load(
                    k_ptr + batch * k_batch + group * k_group + offset * k_position + lanes[None, :],
                    mask=held[:, None],
                    other=0.0,
                )
                v = tl.load(
                    v_ptr + batch * v_batch + group * v_group + offset * v_position + lanes[None, :],
                    mask=held[:, None],
                    other=0.0,
                )
                highest, total, found = look(q, k, v, seen, highest, total, found, scale, height, CAPPED)
            stored = (text * chunks + chunk).to(tl.int64) * rows + row
            store_chunk(part_ptr, stat_ptr, stored, inside, highest, total, found, DIM)

    @triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]
    def _sum_kernel(  # type: ignore[no-untyped-def]
        part_ptr,
        stat_ptr,
        seen_ptr,
        y_ptr,
        seen_batch,
        seen_token,
        groups,
        tokens,
        rows,
        chunks,
        window,
        DIM: tl.constexpr,
        SPLIT: tl.constexpr,
        LEVEL: tl.constexpr,
        MOST: tl.constexpr,
        SUMMED: tl.constexpr,
        MASKED: tl.constexpr,
        EARLY: tl.constexpr,
        PDL: tl.constexpr,
    ):
        if PDL and EARLY:
            gdc_launch_dependents()
        batch, group = tl.program_id(0) // groups, tl.program_id(0) % groups
        row = tl.program_id(1)
        heads = rows // tokens
        if MASKED:
            begin = tl.full((), 0, tl.int32)
            end = chunks - 1
        else:
            spans = seen_ptr + batch.to(tl.int64) * seen_batch
            last = (tl.load(spans + row % tokens * seen_token + 1) - tl.load(spans)).to(tl.int32)
            first = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
            begin, end = chunk_of(first, SPLIT, LEVEL, MOST), chunk_of(last, SPLIT, LEVEL, MOST)
        if PDL:
            gdc_wait()
            if not EARLY:
                gdc_launch_dependents()
        base = tl.program_id(0).to(tl.int64) * chunks * rows + row
        y = add_up(part_ptr, stat_ptr, base, rows, begin, end, DIM, SUMMED)
        place = (batch * tokens + row % tokens) * groups * heads + group * heads + row // tokens
        tl.store(y_ptr + place.to(tl.int64) * DIM + tl.arange(0, DIM), y.to(y_ptr.dtype.element_ty))


def chunks_for(positions: int) -> int:
    """How many chunks cover so many positions of a text."""
    level = 0
    while level < MOST_DOUBLINGS and positions > LEVEL * SPLIT * (2 ** (level + 1) - 1):
        level += 1
    length = SPLIT << level
    return level * LEVEL + -(-(positions - LEVEL * (length - SPLIT)) // length)


def tiling(dim: int, itemsize: int) -> dict[str, int]:
    """Positions that a program holds at once, and its warps. All kernels must share it to agree bitwise.

    float32 does not use tensor cores here, and four warps would run out of registers.
    """
    tile = min(SPLIT, max(16, TILE_BYTES // (dim * itemsize)))
    return {"TILE": tile, "num_warps": 2 * WARPS if itemsize == 4 else WARPS, "num_stages": STAGES}


def scores_by(scaling: float, softcap: float | None) -> tuple[float, float]:
    """`scale` and `height` of `look`: scores are in base 2, and a softcap applies before that conversion."""
    return (scaling * _LOG2E, 0.0) if softcap is None else (scaling / softcap, softcap * _LOG2E)


@torch.library.custom_op("depthdecay::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    overlap: bool,
) -> torch.Tensor:
    """Attention of queries (batch, heads, tokens, dim) over keys and values (batch, groups, positions, dim).

    `seen` is either spans (batch, 1, tokens, 2), the columns of the text's first token and of each query, from which a
    window counts back; or a boolean mask (batch, 1, tokens, positions or more) that already includes any window.
    Returns (batch, tokens, heads, dim), as transformers' attention functions do. `overlap` as for `gemv`.
    """
    if not query.is_cuda:
        return _reference(query, key, value, seen, scaling, window, softcap)
    return _launched(query, key, value, seen, scaling, window, softcap, overlap)


def _launched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    overlap: bool,
) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    groups, positions = key.shape[1:3]
    rows, chunks, masked = heads // groups * tokens, chunks_for(positions), seen.dtype == torch.bool
    parts = torch.empty((batch * groups * chunks * rows, dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((len(parts), 2), dtype=torch.float32, device=query.device)
    y = torch.empty((batch, tokens, heads, dim), dtype=query.dtype, device=query.device)
    back = 0 if masked else window or 0
    by_row = seen.stride(0) if seen.shape[0] > 1 else 0, seen.stride(2) if seen.shape[2] > 1 else 0
    _part_kernel[(batch * groups * -(-rows // ROWS), chunks)](
        query,
        key,
        value,
        seen,
        parts,
        stats,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *by_row,
        groups,
        tokens,
        rows,
        positions,
        chunks,
        back,
        *scores_by(scaling, softcap),
        DIM=dim,
        ROWS=ROWS,
        SPLIT=SPLIT,
        LEVEL=LEVEL,
        MOST=MOST_DOUBLINGS,
        MASKED=masked,
        CAPPED=softcap is not None,
        EARLY=EARLY,
        PDL=overlap,
        launch_pdl=overlap,
        **tiling(dim, query.element_size()),
    )
    _sum_kernel[(batch * groups, rows)](
        parts,
        stats,
        seen,
        y,
        *by_row,
        groups,
        tokens,
        rows,
        chunks,
        back,
        DIM=dim,
        SPLIT=SPLIT,
        LEVEL=LEVEL,
        MOST=MOST_DOUBLINGS,
        SUMMED=SUMMED,
        MASKED=masked,
        EARLY=EARLY,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return y


@attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    overlap: bool,
) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty((batch, tokens, heads, dim))


def mask_of(spans: torch.Tensor, positions: int, window: int | None) -> torch.Tensor:
    """The boolean mask (batch, 1, tokens, positions) that spans stand for."""
    first, last = spans.unsqueeze(-2).unbind(-1)
    places = torch.arange(positions, device=spans.device)
    seen = (places >= first) & (places <= last)
    return seen if window is None else seen & (places > last - window)


def _reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    positions = key.shape[2]
    mask = seen[..., :positions] if seen.dtype == torch.bool else mask_of(seen, positions, window)
    share = query.shape[1] // key.shape[1]
    keys, values = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in (key, value))
    keys, values = (states.repeat_interleave(share, dim=1) for states in (keys, values))
    scores = query.to(keys.dtype) @ keys.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2).to(query.dtype).contiguous()


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None) -> bool:
    """Whether the kernels support this: few tokens, contiguous rows, spans or a boolean mask shared by all heads."""
    dim = query.shape[-1]
    return (
        seen is not None
        and query.is_cuda
        and triton is not None
        and query.dtype in DTYPES
        and seen.dim() == 4
        and seen.shape[1] == 1
        and seen.stride(3) == 1
        and (seen.dtype == torch.int64 or (seen.dtype == torch.bool and seen.shape[3] >= key.shape[2]))
        and query.shape[2] <= MOST_TOKENS
        and dim in HEAD_SIZES
        and value.shape[-1] == dim
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )
