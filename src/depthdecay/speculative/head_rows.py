"""A draft head for the rows of a batch: all rows draft together, each at its own position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from depthdecay.engine.sampling import Sampler, pick_tokens
from depthdecay.speculative.head_text import LONGEST_READ, HeadText, PlacedHead

TOGETHER = 16  # verified tokens of a row that are run in one batch with other rows; longer backlogs run first
# Verified tokens of a row whose states may wait to be joined: where drafting pauses, a product at every step would be
# in vain, and states side by side take the memory of several.
UNJOINED = 64


@dataclass
class HeadRow:
    """One text: where its keys end, and the verified tokens still to be run, with the states before them."""

    length: int = 1  # position 0 has no preceding state
    tokens: list[int] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)  # of the first of them, joined: (tokens, hidden) each
    apart: list[torch.Tensor] = field(default_factory=list)  # of the others: (tokens, states · hidden) each
    unjoined: int = 0  # how many these are


class HeadRows:
    """Rows by slot. Positions after a row's last verified token are run again once they are verified."""

    def __init__(self, placed: PlacedHead, slots: int) -> None:
        self.placed, self.head, self.slots = placed, placed.head, slots
        self.rows: dict[int, HeadRow] = {}
        self.keys: torch.Tensor | None = None  # (slots, heads, positions, size)
        self.values: torch.Tensor | None = None

    def leave(self, slot: int) -> None:
        self.rows.pop(slot, None)

    @torch.no_grad()
    def verified(self, slot: int, tokens: Sequence[int], states: Mapping[int, torch.Tensor]) -> None:
        """Add verified tokens, each with the full model's states at the preceding position."""
        row = self.rows.setdefault(slot, HeadRow())
        row.apart.append(torch.cat([states[layer][: len(tokens)] for layer in self.head.shape.states], dim=-1))
        row.tokens += tokens
        row.unjoined += len(tokens)
        if row.unjoined >= UNJOINED:
            self._join([row])

    @torch.no_grad()
    def draft(
        self, slots: Sequence[int], count: int, samplers: Sequence[Sampler], first: Sequence[int]
    ) -> list[list[int]]:
        """Draft so many tokens for each row with its sampler; `first`: token index of each row's first draft."""
        for slot in slots:
            while len(self.rows[slot].tokens) > TOGETHER:
                self._read([slot], min(len(self.rows[slot].tokens) - 1, LONGEST_READ))
        state = self._read(slots, TOGETHER)
        drafts: list[list[int]] = [[] for _ in slots]
        for place in range(count):
            logits = self.placed.over_vocabulary(self.placed.logits(state[:, -1]))
            picked = pick_tokens(samplers, [index + place for index in first], logits, drafts)
            for row, token in zip(drafts, picked, strict=True):
                row.append(token)
            if place + 1 < count:
                positions = [self.rows[slot].length + place for slot in slots]
                state = self._run(slots, [[token] for token in picked], state, positions)
        return drafts

    def _join(self, rows: Sequence[HeadRow]) -> None:
        """Join the states of these rows that still are side by side, in one product."""
        rows = [row for row in rows if row.apart]
        if not rows:
            return
        apart = torch.cat([states for row in rows for states in row.apart])
        joined = self.head.joined(apart.to(self.placed.weight.dtype))
        for row, own in zip(rows, joined.split([row.unjoined for row in rows]), strict=True):
            row.before.append(own)
            row.apart, row.unjoined = [], 0

    def _read(self, slots: Sequence[int], most: int) -> torch.Tensor:
        """Run the first verified tokens of each row for good; returns each row's last state, (rows, 1, hidden)."""
        rows = [self.rows[slot] for slot in slots]
        self._join(rows)
        counts = [min(len(row.tokens), most) for row in rows]
        before = [torch.cat(row.before) for row in rows]
        width = max(counts)
        padded = [
            functional.pad(own[:count], (0, 0, 0, width - count)) for own, count in zip(before, counts, strict=True)
        ]
        tokens = [row.tokens[:count] + [0] * (width - count) for row, count in zip(rows, counts, strict=True)]
        state = self._run(slots, tokens, torch.stack(padded), [row.length for row in rows])
        for row, own, count in zip(rows, before, counts, strict=True):
            row.length += count
            row.tokens = row.tokens[count:]
            row.before = [own[count:]] if row.tokens else []
        last = torch.tensor([count - 1 for count in counts], device=state.device)
        return state[torch.arange(len(rows), device=state.device), last].unsqueeze(1)

    def _run(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], before: torch.Tensor, first: Sequence[int]
    ) -> torch.Tensor:
        """Run the head over the same number of tokens per row, starting at each row's position. Padding is at the end.

        No token attends to padding: attention is causal, and a later token at that position overwrites it first.
        """
        head, device, width = self.head, before.device, before.shape[1]
        end = max(first) + width
        self._make_room(end, before)
        assert self.keys is not None
        assert self.values is not None
        where = torch.tensor(slots, device=device)
        positions = torch.tensor(first, device=device).unsqueeze(1) + torch.arange(width, device=device)
        given = self.placed.embedding(torch.tensor(tokens, device=device)).to(before.dtype)
        query, key, value = head.project(given, before, head.angles(positions, before.dtype))
        self.keys[where.unsqueeze(1), :, positions] = key.transpose(1, 2)
        self.values[where.unsqueeze(1), :, positions] = value.transpose(1, 2)
        places = torch.arange(1, end, device=device)
        mask = places <= positions[:, None, :, None]
        mixed = functional.scaled_dot_product_attention(
            query, self.keys[where, :, 1:end], self.values[where, :, 1:end], mask, enable_gqa=True
        )
        return head.finish(given, before, mixed)

    def _make_room(self, positions: int, like: torch.Tensor) -> None:
        shape = self.head.shape
        held = 0 if self.keys is None else self.keys.shape[2]
        if positions <= held:
            return
        room = HeadText.grown(held, positions)
        for name in ("keys", "values"):
            new = like.new_zeros((self.slots, shape.key_value_heads, room, shape.head_size))
            old = getattr(self, name)
            if old is not None:
                new[:, :, :held] = old
            setattr(self, name, new)
