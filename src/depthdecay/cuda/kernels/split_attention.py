"""Attention of a few new tokens over a cache on CUDA, in parts that are added up in a fixed order.

torch's kernels leave most of a GPU idle for one new token, or add parts in the order in which they happen to end, so
that the same request gives other bits now and then. Here each program looks at 64 positions for 16 rows of queries, and
a second kernel adds what they found, from the first position to the last. So an answer's bits depend neither on timing,
nor on how many tokens are asked about at once, nor on how far the cache reaches beyond the text.
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
ROWS = 16  # of queries in one program: what one tensor-core tile holds
SPLIT = 64  # positions in one program
HEAD_SIZES = (64, 128, 256)
_LOG2E = 1.4426950408889634

if triton is not None:
    # One binary for every number of tokens: those of 1 and 16 would be specialised.
    @triton.jit(do_not_specialize=["tokens", "rows", "splits"])  # type: ignore[untyped-decorator]
    def _part_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        mask_ptr,
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
        mask_batch,
        mask_token,
        groups,
        tokens,
        rows,
        positions,
        splits,
        scale,
        DIM: tl.constexpr,
        ROWS: tl.constexpr,
        SPLIT: tl.constexpr,
        PDL: tl.constexpr,
    ):
        batch = (tl.program_id(0) // groups).to(tl.int64)
        group = tl.program_id(0) % groups
        split = tl.program_id(1)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # a group's heads one after the other, each with its tokens
        inside = row < rows
        head = group * (rows // tokens) + row // tokens
        token = row % tokens
        place = split * SPLIT + tl.arange(0, SPLIT)
        lanes = tl.arange(0, DIM)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        seen = tl.load(
            mask_ptr + batch * mask_batch + token[:, None] * mask_token + place[None, :],
            mask=inside[:, None] & (place[None, :] < positions),
            other=0,
        )
        seen = seen != 0
        # Behind the rows that count come none of the next group's: what is stored lies by program.
        stored = ((tl.program_id(0) * splits + split) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * ROWS
        stored = stored + tl.arange(0, ROWS)
        if tl.max(seen.to(tl.int32)) == 0:
            tl.store(stat_ptr + stored * 2, tl.full((ROWS,), float("-inf"), tl.float32))
        else:
            q = tl.load(
                q_ptr + batch * q_batch + head[:, None] * q_head + token[:, None] * q_token + lanes[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            k = tl.load(
                k_ptr + batch * k_batch + group * k_group + place[:, None].to(tl.int64) * k_position + lanes[None, :],
                mask=place[:, None] < positions,
                other=0.0,
            )
            v = tl.load(
                v_ptr + batch * v_batch + group * v_group + place[:, None].to(tl.int64) * v_position + lanes[None, :],
                mask=place[:, None] < positions,
                other=0.0,
            )
            scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
            highest = tl.max(scores, 1)
            weights = tl.exp2(scores - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
            tl.store(stat_ptr + stored * 2, highest)
            tl.store(stat_ptr + stored * 2 + 1, tl.sum(weights, 1))
            part = tl.dot(weights.to(v.dtype), v)
            tl.store(part_ptr + stored[:, None] * DIM + lanes[None, :], part, mask=inside[:, None])

    @triton.jit(do_not_specialize=["tokens", "rows", "tiles", "splits"])  # type: ignore[untyped-decorator]
    def _sum_kernel(  # type: ignore[no-untyped-def]
        part_ptr, stat_ptr, y_ptr, groups, tokens, rows, tiles, splits, DIM: tl.constexpr, PDL: tl.constexpr
    ):
        row = tl.program_id(1)
        lanes = tl.arange(0, DIM)
        highest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        found = tl.zeros((DIM,), dtype=tl.float32)
        ROWS: tl.constexpr = 16
        stored = (tl.program_id(0).to(tl.int64) * splits * tiles + row // ROWS) * ROWS + row % ROWS
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        for _ in range(0, splits):
            top = tl.load(stat_ptr + stored * 2)
            filled = tl.where(top > float("-inf"), DIM, 0)  # of a part that saw nothing, nothing was stored
            count = tl.load(stat_ptr + stored * 2 + 1, mask=filled > 0, other=0.0)
            part = tl.load(part_ptr + stored * DIM + lanes, mask=lanes < filled, other=0.0)
            above = tl.maximum(highest, top)
            safe = tl.where(above == float("-inf"), 0.0, above)
            before, now = tl.exp2(highest - safe), tl.exp2(top - safe)
            found = found * before + part * now
            total = total * before + count * now
            highest = above
            stored += tiles * ROWS
        batch, group = tl.program_id(0) // groups, tl.program_id(0) % groups
        heads = rows // tokens
        place = (batch * tokens + row % tokens) * groups * heads + group * heads + row // tokens
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(y_ptr + place.to(tl.int64) * DIM + lanes, (found / total).to(y_ptr.dtype.element_ty))


def sum_parts(
    parts: torch.Tensor,
    stats: torch.Tensor,
    y: torch.Tensor,
    groups: int,
    tokens: int,
    rows: int,
    splits: int,
    overlap: bool,
) -> None:
    """Add up, from the first part to the last, what programs found for `rows` queries of each group."""
    _sum_kernel[(y.shape[0] * groups, rows)](
        parts,
        stats,
        y,
        groups,
        tokens,
        rows,
        -(-rows // ROWS),
        splits,
        DIM=y.shape[-1],
        PDL=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )


@torch.library.custom_op("depthdecay::attend", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float, overlap: bool
) -> torch.Tensor:
    """Queries (batch, heads, tokens, dim) over (batch, groups, positions, dim), where the mask is True.

    The answer is (batch, tokens, heads, dim), as transformers' functions return it. `overlap` as for `gemv`.
    """
    batch, heads, tokens, dim = query.shape
    groups, positions = key.shape[1:3]
    if not query.is_cuda:
        return _reference(query, key, value, mask, scaling)
    rows = heads // groups * tokens
    splits, tiles = -(-positions // SPLIT), -(-rows // ROWS)
    stored = batch * groups * splits * tiles * ROWS
    parts = torch.empty((stored, dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((stored, 2), dtype=torch.float32, device=query.device)
    y = torch.empty((batch, tokens, heads, dim), dtype=query.dtype, device=query.device)
    _part_kernel[(batch * groups, splits, tiles)](
        query,
        key,
        value,
        mask,
        parts,
        stats,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        mask.stride(0) if mask.shape[0] > 1 else 0,
        mask.stride(2) if mask.shape[2] > 1 else 0,
        groups,
        tokens,
        rows,
        positions,
        splits,
        scaling * _LOG2E,
        DIM=dim,
        ROWS=ROWS,
        SPLIT=SPLIT,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    sum_parts(parts, stats, y, groups, tokens, rows, splits, overlap)
    return y


@attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float, overlap: bool
) -> torch.Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty((batch, tokens, heads, dim))


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    share = query.shape[1] // key.shape[1]
    keys, values = (states.float().repeat_interleave(share, dim=1) for states in (key, value))
    scores = query.float() @ keys.transpose(2, 3) * scaling
    scores = scores.masked_fill(~mask[..., : key.shape[2]], float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2).to(query.dtype).contiguous()


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether these go through the kernels: few tokens, 16 bits, whole rows, and a mask of bits for all heads alike."""
    dim = query.shape[-1]
    return (
        mask is not None
        and query.is_cuda
        and triton is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and mask.dtype == torch.bool
        and mask.dim() == 4
        and mask.shape[1] == 1
        and mask.stride(3) == 1
        and mask.shape[3] >= key.shape[2]
        and query.shape[2] <= MOST_TOKENS
        and dim in HEAD_SIZES
        and value.shape[-1] == dim
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )
