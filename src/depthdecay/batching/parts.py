"""What rows bring to a pass, and what follows from it for every kind of pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Plan


@dataclass(frozen=True)
class Part:
    """What one row brings to a pass: tokens that follow `length` positions, to run at a depth of its plan."""

    slot: int
    length: int
    tokens: Sequence[int]
    depth: int
    plan: Plan


@dataclass(frozen=True)
class Profile:
    """How many of the first tokens run each layer, and the segments of tokens that share a depth."""

    counts: list[int]
    segments: dict[int, tuple[int, int]]  # depth: first token, number of tokens

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Profile:
        segments: dict[int, tuple[int, int]] = {}
        counts = [0] * parts[0].plan.num_layers
        plans = {}
        row = 0
        for part in parts:
            first, held = segments.get(part.depth, (row, 0))
            segments[part.depth] = first, held + len(part.tokens)
            plans[part.depth] = part.plan  # ladders are nested, so any plan names the same layers
            row += len(part.tokens)
        assert list(segments) == sorted(segments, reverse=True)
        for depth, (_, held) in segments.items():
            for layer in plans[depth].layers(depth):
                counts[layer] += held
        return cls(counts, segments)


@dataclass(frozen=True)
class Tokens:
    """The tokens of all parts one behind the other, and where each stands; `last` is the place of each part's last."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
    last: list[int]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Tokens:
        found = cls([], [], [], [])
        for part in parts:
            found.ids.extend(part.tokens)
            found.positions.extend(range(part.length, part.length + len(part.tokens)))
            found.slots.extend([part.slot] * len(part.tokens))
            found.last.append(len(found.ids) - 1)
        return found
