"""Whose prompts a step reads on, and how much of each: the oldest never waits, and short ones do not wait for it.

A step reads a bounded number of prompt tokens, so that those who decode are not held up. A prompt that has less than
half as much to read as the oldest may overtake it: such prompts get up to half of the step together, shortest first.
At half the pace, one that is at most half as long still ends sooner by more than the oldest ends later. The oldest
gets the other half whatever comes, so every prompt is read to its end at a pace that newcomers cannot lower.
"""

from __future__ import annotations

from collections.abc import Sequence

from depthdecay.batching.row import BatchRow

PROMPT_ROWS = 64  # a step of graphs has room for so many tokens of prompts beside a full batch: weights take longer


def read_within_step(rows: Sequence[BatchRow], graph_rows: int) -> list[BatchRow]:
    """Rows whose prompts are read on within a step of graphs, where they are not much to read.

    `rows`: the whole batch. `graph_rows`: tokens that a step has room for.
    """
    reading = [row for row in rows if row.in_prompt]
    if sum(row.unread for row in reading) > 4 * PROMPT_ROWS:  # a pass of their own is faster then
        return []
    room = graph_rows - (len(rows) - len(reading))
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
