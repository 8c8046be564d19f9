"""Whose prompts a step reads on, and how much of each: the oldest never waits, and short ones do not wait for it.

A step reads a bounded number of prompt tokens, so that those who decode are not held up. A prompt that has less than
half as much to read as the oldest may overtake it: such prompts get up to half of the step together, shortest first.
At half the pace, one that is at most half as long still ends sooner by more than the oldest ends later. The oldest
gets the other half whatever comes, so every prompt is read to its end at a pace that newcomers cannot lower.

Where answers must not depend on their neighbours, a prompt's length alone says how it is read: pieces of a fixed length
in passes of their own, and what is then left, if it is little, as rows of the steps, whose bits are their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from depthdecay.batching.row import BatchRow
from depthdecay.runners.block_runner import MOST_IN_STEPS

EXACT_PIECE = 512  # tokens; a server's settings do not change it, so that they change no bits
PROMPT_ROWS = 64  # a step of graphs has room for so many tokens of prompts beside a full batch: weights take longer


def read_within_step(rows: Sequence[BatchRow], graph_rows: int) -> list[BatchRow]:
    """Rows whose prompts are read on within a step of graphs, where they are not much to read.

    `rows`: the whole batch. `graph_rows`: tokens that a step has room for.
    """
    reading = [row for row in rows if row.in_prompt]
    if sum(row.unread for row in reading) > 4 * PROMPT_ROWS:  # a pass of their own is faster then
        return []
    return _shared_out(reading, graph_rows - (len(rows) - len(reading)))


def _shared_out(reading: Sequence[BatchRow], room: int) -> list[BatchRow]:
    """Rows whose prompts are read on within a step that has room for so many of their tokens."""
    for row in reading:
        row.share = 0
    _share_out(_overtaking(reading), room // 2)
    _share_out(reading, room - sum(row.share for row in reading))
    return [row for row in reading if row.share]


def read_in_own_passes(rows: Sequence[BatchRow], budget: int) -> list[list[BatchRow]]:
    """Rows whose prompts are read on now, by pass: short prompts in the first, the oldest in the last.

    Within a pass, prompts are of similar length, since short ones are filled up to the longest.
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
    """Rows whose prompts are read on within the step, and those of pieces that have a pass of their own."""
    short = [row for row in rows if row.in_prompt and row.unread <= MOST_IN_STEPS]
    # All others may decode in this step, also those that come to the end of a long prompt.
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
    """Those that are short beside the oldest, shortest first."""
    return sorted((row for row in reading if 2 * row.unread < reading[0].unread), key=lambda row: row.unread)


def _share_out(rows: Sequence[BatchRow], room: int) -> None:
    """Give each row what it has to read, until the room is spent."""
    for row in rows:
        more = min(row.unread - row.share, room)
        row.share += more
        room -= more


def _filled(chosen: list[BatchRow], others: Sequence[BatchRow], budget: int) -> list[BatchRow]:
    """`chosen`, and of the others as many as a pass of so many tokens holds, padding counted."""
    longest = max((row.share for row in chosen), default=0)
    for row in others:
        share = min(row.unread, budget)
        if not share or max(longest, share) * (len(chosen) + 1) > budget:
            break
        row.share, longest = share, max(longest, share)
        chosen.append(row)
    return chosen
