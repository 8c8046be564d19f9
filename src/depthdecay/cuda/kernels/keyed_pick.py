"""A seeded draw from a row's logits, in two launches: penalty, temperature, top-k, top-p, min-p, noise and argmax.

The first kernel scores the vocabulary in many programs, and keeps the highest score of every group of tokens. The
second has one program per row. The k-th highest of these bounds the k-th highest of all scores from below, so it reads
only the groups that reach it. Bounds are found bit by bit, which needs no sort. What is drawn depends on the row's
values alone, so results are batch-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from depthdecay.runners.keyed_noise import gumbel_noise

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton: CPU-only builds never reach the kernels
    triton = None

MOST_KEPT = 192  # the highest top-k
_GROUPS = 4096  # at most; of a power of two of tokens each
_LEAST_GROUP = 16
_TOKENS = 2048  # of a program that scores

if triton is not None:

    @triton.jit
    def _mixed(x):  # type: ignore[no-untyped-def]
        """Murmur3's finaliser, as in `runners/keyed_noise`."""
        x = (x ^ (x >> 16)) * 0x85EBCA6B
        x = (x ^ (x >> 13)) * 0xC2B2AE35
        return x ^ (x >> 16)

    @triton.jit
    def _noise(tokens, key):  # type: ignore[no-untyped-def]
        bits = _mixed(_mixed(tokens.to(tl.uint32) * 0x85EBCA77 + key) + key) >> 8
        uniform = (bits.to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 2**-24
        return -tl.log(-tl.log(tl.minimum(uniform, 0.999999940395355224609375)))

    @triton.jit
    def _ordered(values):  # type: ignore[no-untyped-def]
        """Unsigned integers in the order of the floats; that of -inf is above 0."""
        bits = values.to(tl.uint32, bitcast=True)
        return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)

    @triton.jit
    def _nth(ordered, count):  # type: ignore[no-untyped-def]
        """The count-th highest; 0 if there are fewer."""
        found = tl.min(ordered * 0, 0)
        for bit in tl.static_range(32):
            tried = found | (1 << (31 - bit))
            found = tl.where(tl.sum((ordered >= tried).to(tl.int32), 0) >= count, tried, found)
        return found

    @triton.jit
    def _score_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        logits_stride,
        tokens_ptr,
        keys_ptr,
        has_ptr,
        has_stride,
        window_ptr,
        upto_ptr,
        scores_ptr,
        highest_ptr,
        places_ptr,
        count,
        groups,
        penalty,
        temperature,
        NAMED: tl.constexpr,
        PENALISED: tl.constexpr,
        WINDOW: tl.constexpr,
        DRAWS: tl.constexpr,
        GROUP: tl.constexpr,
        TOGETHER: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        group = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
        places = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = places < count
        scores = tl.load(logits_ptr + row * logits_stride + places, mask=inside, other=float("-inf")).to(tl.float32)
        tokens = places
        if NAMED:
            tokens = tl.load(tokens_ptr + places, mask=inside, other=0).to(tl.int32)
        if PENALISED:
            seen = tl.load(has_ptr + row * has_stride + tokens, mask=inside, other=0) != 0
            if WINDOW > 0:
                upto = tl.load(upto_ptr + row)
                for place in tl.static_range(WINDOW):
                    seen = seen | ((tokens == tl.load(window_ptr + place)) & (upto >= place))
            scores = tl.where(seen, tl.where(scores < 0, scores * penalty, tl.div_rn(scores, penalty)), scores)
        scores = tl.div_rn(scores, temperature)
        if DRAWS:  # nothing is cut off: a group's best is all that is needed of it
            key = tl.load(keys_ptr + row).to(tl.uint32)
            scores = tl.where(inside, scores + _noise(tokens, key), float("-inf"))
        else:
            tl.store(scores_ptr + row * count + places, scores, mask=inside)
        highest = tl.max(scores, 1)
        tl.store(highest_ptr + row * groups + group, highest, mask=group < groups)
        if DRAWS:
            first = tl.min(tl.where(scores == highest[:, None], places, 0x7FFFFFFF), 1)
            tl.store(places_ptr + row * groups + group, first, mask=group < groups)

    @triton.jit
    def _best_kernel(highest_ptr, places_ptr, picked_ptr, groups, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        index = tl.arange(0, GROUPS)
        inside = index < groups
        highest = tl.load(highest_ptr + row * groups + index, mask=inside, other=float("-inf"))
        places = tl.load(places_ptr + row * groups + index, mask=inside, other=0x7FFFFFFF)
        best = tl.min(tl.where(highest == tl.max(highest, 0), places, 0x7FFFFFFF), 0)
        tl.store(picked_ptr + row, tl.where(best == 0x7FFFFFFF, 0, best).to(tl.int64))

    @triton.jit(do_not_specialize=["top_k"])
    def _cut_kernel(  # type: ignore[no-untyped-def]
        scores_ptr,
        highest_ptr,
        chosen_ptr,
        tokens_ptr,
        keys_ptr,
        picked_ptr,
        count,
        groups,
        top_k,
        top_p,
        min_p,
        NAMED: tl.constexpr,
        HAS_TOP_P: tl.constexpr,
        GROUP: tl.constexpr,
        GROUPS: tl.constexpr,
        ROOM: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        index = tl.arange(0, GROUPS)
        slots = tl.arange(0, ROOM)
        highest = tl.load(highest_ptr + row * groups + index, mask=index < groups, other=float("-inf"))
        ordered = tl.where(index < groups, _ordered(highest), 0)
        bound = _nth(ordered, top_k)  # 0, which bounds nothing, if there are fewer groups
        # If more groups tie than there is room for, the tie is left out; if nothing is above it, some of it is in.
        reach = tl.sum((ordered >= bound).to(tl.int32), 0)
        above = tl.sum((ordered > bound).to(tl.int32), 0)
        bound = tl.where((reach > ROOM) & (above > 0), bound + 1, bound)
        hits = (ordered >= bound) & (index < groups)
        rank = tl.cumsum(hits.to(tl.int32), 0) - 1
        tl.store(chosen_ptr + row * ROOM + rank, index, mask=hits & (rank < ROOM))
        tl.debug_barrier()  # what one thread has stored, another loads
        filled = tl.minimum(tl.sum(hits.to(tl.int32), 0), ROOM)
        chosen = tl.load(chosen_ptr + row * ROOM + slots, mask=slots < filled, other=0)
        places = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (slots < filled)[:, None] & (places < count)
        places = tl.reshape(places, (ROOM * GROUP,))
        inside = tl.reshape(inside.to(tl.int32), (ROOM * GROUP,)) != 0
        scores = tl.load(scores_ptr + row * count + places, mask=inside, other=float("-inf"))
        ordered = tl.where(inside, _ordered(scores), 0)
        kept = inside & (ordered >= tl.maximum(_nth(ordered, top_k), bound))
        first = tl.max(scores, 0)
        weights = tl.where(kept, tl.exp(scores - first), 0.0)
        if HAS_TOP_P:  # without those that have as much probability above them
            limit = top_p * tl.sum(weights, 0)
            last = tl.min(ordered * 0, 0)
            for bit in tl.static_range(32):
                tried = last | (1 << (31 - bit))
                higher = tl.sum(tl.where(ordered > tried, weights, 0.0), 0)
                last = tl.where(higher >= limit, tried, last)
            kept = kept & ((ordered > last) | (scores == first))
        kept = kept & (weights >= min_p)
        tokens = places
        if NAMED:
            tokens = tl.load(tokens_ptr + places, mask=kept, other=0).to(tl.int32)
        drawn = tl.where(kept, scores + _noise(tokens, tl.load(keys_ptr + row).to(tl.uint32)), float("-inf"))
        best = kept & (drawn == tl.max(drawn, 0))
        picked = tl.min(tl.where(best, places, 0x7FFFFFFF), 0)
        tl.store(picked_ptr + row, tl.where(picked == 0x7FFFFFFF, tl.min(places, 0), picked).to(tl.int64))


@dataclass(frozen=True)
class Rules:
    """How a row is drawn from: transformers' rules, but top-p keeps or drops equal scores together."""

    temperature: float = 1.0
    penalty: float = 1.0
    top_k: int = 0  # 0: no limit, and then there is no other one either
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Seen:
    """The tokens that the repetition penalty is for: of each row's text, and of a window behind it."""

    has: torch.Tensor  # (rows or 1, tokens): bool
    window: torch.Tensor | None = None  # (tokens)
    upto: torch.Tensor | None = None  # (rows): the last place in the window that counts


@torch.library.custom_op("depthdecay::keyed_pick", mutates_args=())
def keyed_pick(
    logits: torch.Tensor,
    keys: torch.Tensor,
    tokens: torch.Tensor | None,
    has: torch.Tensor | None,
    window: torch.Tensor | None,
    upto: torch.Tensor | None,
    temperature: float,
    penalty: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> torch.Tensor:
    """The place of each row's draw. `logits` (rows, count), `keys` (rows), `tokens` (count): what they are for.

    If nothing can be kept, since values are not finite, some place is picked.
    """
    seen = None if has is None else Seen(has, window, upto)
    rules = Rules(temperature, penalty, top_k, top_p, min_p)
    return (launched if logits.is_cuda else plainly)(logits, keys, tokens, seen, rules)


@keyed_pick.register_fake
def _(logits: torch.Tensor, *_: object) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.long)


def pick(
    logits: torch.Tensor, keys: torch.Tensor, rules: Rules, tokens: torch.Tensor | None = None, seen: Seen | None = None
) -> torch.Tensor:
    """The same with its settings together."""
    of_text = (None, None, None) if seen is None else (seen.has, seen.window, seen.upto)
    cut = rules.top_k, rules.top_p, rules.min_p
    picked: torch.Tensor = keyed_pick(logits, keys, tokens, *of_text, rules.temperature, rules.penalty, *cut)
    return picked


def plainly(
    logits: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None, seen: Seen | None, rules: Rules
) -> torch.Tensor:
    """What the kernels compute, but for the order of sums."""
    scores = logits.float()
    named = torch.arange(scores.shape[1]) if tokens is None else tokens
    if seen is not None:
        has = seen.has[:, named].expand(len(scores), -1)
        if seen.window is not None and seen.upto is not None:
            counts = torch.arange(len(seen.window)) <= seen.upto.unsqueeze(1)
            inside = (named == seen.window.unsqueeze(1)).to(torch.int32)
            has = has | (counts.to(torch.int32) @ inside > 0)
        scores = torch.where(has, torch.where(scores < 0, scores * rules.penalty, scores / rules.penalty), scores)
    scores = scores / rules.temperature
    kept = torch.ones_like(scores, dtype=torch.bool)
    if rules.top_k:
        kept = scores >= scores.topk(min(rules.top_k, scores.shape[1])).values[:, -1:]
        ordered = scores.sort(descending=True)
        first = ordered.values[:, :1]
        weights = torch.where(kept, (scores - first).exp(), 0.0)
        if rules.top_p < 1:
            running = weights.gather(1, ordered.indices).cumsum(1)
            places = torch.searchsorted(-ordered.values.contiguous(), -scores.contiguous())  # how many are higher
            higher = torch.where(places > 0, running.gather(1, (places - 1).clamp(min=0)), 0.0)
            kept &= (higher < rules.top_p * running[:, -1:]) | (scores == first)
        kept &= weights >= rules.min_p
    drawn = torch.where(kept, scores + gumbel_noise(keys, 0, named), float("-inf"))
    return drawn.argmax(1)


def launched(
    logits: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor | None, seen: Seen | None, rules: Rules
) -> torch.Tensor:
    """Start the kernels."""
    logits, keys = logits.contiguous(), keys.contiguous()
    rows, count = logits.shape
    draws = rules.top_k == 0
    group = _TOKENS if draws else max(_LEAST_GROUP, triton.next_power_of_2(-(-count // _GROUPS)))
    groups = -(-count // group)
    together = max(1, _TOKENS // group)
    place = logits.device
    highest = torch.empty((rows, groups), device=place)
    picked = torch.empty(rows, dtype=torch.long, device=place)
    scores = highest if draws else torch.empty((rows, count), device=place)
    places = torch.empty((rows, groups) if draws else (1,), dtype=torch.int32, device=place)
    has, window, upto = (None, None, None) if seen is None else (seen.has, seen.window, seen.upto)
    # What is not there is never read.
    names, text, behind, ends = (keys if part is None else part.contiguous() for part in (tokens, has, window, upto))
    _score_kernel[(rows, -(-groups // together))](
        *(logits, logits.stride(0), names, keys, text, 0 if has is None or len(has) == 1 else text.stride(0)),
        *(behind, ends, scores, highest, places, count, groups, rules.penalty, rules.temperature),
        NAMED=tokens is not None,
        PENALISED=has is not None,
        WINDOW=0 if window is None else len(window),
        DRAWS=draws,
        GROUP=group,
        TOGETHER=together,
        num_warps=4,
    )
    most = triton.next_power_of_2(groups)
    if draws:
        _best_kernel[(rows,)](highest, places, picked, groups, GROUPS=most, num_warps=1)
        return picked
    room = 128 if rules.top_k <= 64 else 256
    chosen = torch.empty((rows, room), dtype=torch.int32, device=place)
    _cut_kernel[(rows,)](
        *(scores, highest, chosen, names, keys, picked, count, groups, rules.top_k, rules.top_p, rules.min_p),
        NAMED=tokens is not None,
        HAS_TOP_P=rules.top_p < 1,
        GROUP=group,
        GROUPS=most,
        ROOM=room,
        num_warps=16 if room * group >= 8192 else 8,
    )
    return picked
