"""Whose prompts a step reads on, and how much of each."""

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
    chosen = []
    for row in reading:
        row.share = min(row.unread, room)
        room -= row.share
        if row.share:
            chosen.append(row)
    return chosen


def read_in_own_pass(rows: Sequence[BatchRow], budget: int) -> list[BatchRow]:
    """Rows whose prompts are read on now: of similar length, since short ones are filled up to the longest."""
    reading = [row for row in rows if row.in_prompt]
    if not reading:
        return []
    first = min(reading[0].unread, budget)  # the oldest is always among them
    chosen, longest = [reading[0]], first
    others = ((min(row.unread, budget), row) for row in reading[1:])
    for count, row in sorted(others, key=lambda pair: abs(pair[0] - first)):
        if max(longest, count) * (len(chosen) + 1) > budget:
            break
        chosen.append(row)
        longest = max(longest, count)
    for row in chosen:
        row.share = budget
    return chosen
