"""Chunked prefill: whose prompts a step prefills, and how much. The oldest never waits, and short ones overtake it.

A step prefills a bounded number of prompt tokens, so that decoding rows are not held up. A prompt with less than half
as much left as the oldest may overtake it: such prompts share up to half of the step, shortest first. At half the pace,
a prompt at most half as long gains more time than the oldest loses. The oldest always gets the other half, so new
requests cannot starve it.

For batch-invariant answers, a prompt's length alone decides how it is split: pieces of a fixed length in separate
passes. A short remainder is prefilled in the decode steps, whose rows are batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence

from depthdecay.batching.row import BatchRow
from depthdecay.runners.block_runner import MOST_IN_STEPS

EXACT_PIECE = 512  # tokens; not configurable, so that settings cannot change the bits
PROMPT_ROWS = 64  # prompt tokens that fit into a graph step next to a full batch; it stays bound by reading weights


def read_within_step(rows: Sequence[BatchRow], graph_rows: int) -> list[BatchRow]:
    """Rows whose prompts are prefilled within a graph step, if there is little to prefill.

    `rows`: the whole batch. `graph_rows`: the number of tokens that fit into a step.
    """
    reading = [row for row in rows if row.in_prompt]
    if sum(row.unread for row in reading) > 4 * PROMPT_ROWS:  # then a separate pass is faster
        return []
    return _shared_out(reading, graph_rows - (len(rows) - len(reading)))


def _shared_out(reading: Sequence[BatchRow], room: int) -> list[BatchRow]:
    """Rows that get prompt tokens in a step with room for `room` of them; sets each row's `share`."""
    for row in reading:
        row.share = 0
    _share_out(_overtaking(reading), room // 2)
    _share_out(reading, room - sum(row.share for row in reading))
    return [row for row in reading if row.share]


def read_in_own_passes(rows: Sequence[BatchRow], budget: int) -> list[list[BatchRow]]:
    """Rows whose prompts are prefilled now, grouped by pass: short prompts in the first, the oldest in the last.

    Prompts in a pass have similar lengths, since shorter ones are padded to the longest.
    """
    reading = [row for row in rows if row.in_prompt]
    if not reading:
        return []
    first = _filled([], _overtaking(reading), budget // 2)
    spent = len(first) * max((row.share for row in first), default=0)
    oldest, *others = (row for row in reading if row not in first)
    oldest.share = min(oldest.unread, budget - spent)
    near = sorted(others, key=lambda row: abs(min(row.unread, budget - spent) - oldest.share))
    last = _filled([oldest], near, budget - spent)
    return [first, last] if first else [last]


def read_exactly(rows: Sequence[BatchRow], graph_rows: int, budget: int) -> tuple[list[BatchRow], list[list[BatchRow]]]:
    """Rows whose prompts are prefilled within the step, and rows whose next piece gets a separate pass."""
    short = [row for row in rows if row.in_prompt and row.unread <= MOST_IN_STEPS]
    # All other rows may decode in this step, including those that finish a long prompt in it.
    within = _shared_out(short, graph_rows - (len(rows) - len(short)))
    long = [row for row in rows if row.unread > MOST_IN_STEPS]
    if not long:
        return within, []
    others = _overtaking(long) or long[1:]
    chosen = [*others[: max(budget // EXACT_PIECE, 1) - 1], long[0]]
    for row in chosen:
        row.share = min(EXACT_PIECE, row.unread)
    return within, [[row] for row in chosen]


def _overtaking(reading: Sequence[BatchRow]) -> list[BatchRow]:
    """Prompts with less than half as much left as the oldest, shortest first."""
    return sorted((row for row in reading if 2 * row.unread < reading[0].unread), key=lambda row: row.unread)


def _share_out(rows: Sequence[BatchRow], room: int) -> None:
    """Give each row in turn as many of its prompt tokens as fit."""
    for row in rows:
        more = min(row.unread - row.share, room)
        row.share += more
        room -= more


def _filled(chosen: list[BatchRow], others: Sequence[BatchRow], budget: int) -> list[BatchRow]:
    """`chosen` plus as many of the others as fit into a pass of `budget` tokens, padding included."""
    longest = max((row.share for row in chosen), default=0)
    for row in others:
        share = min(row.unread, budget)
        if not share or max(longest, share) * (len(chosen) + 1) > budget:
            break
        row.share, longest = share, max(longest, share)
        chosen.append(row)
    return chosen
