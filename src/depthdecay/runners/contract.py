"""What a pass is given and what it says: the one contract behind every way to run one.

A prompt, a decoding step, a draft and the verification of drafts are all parts: tokens of a text that follow so many
positions, to run at a depth. `Runner.run` takes the parts of a pass and gives what the model says behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.model.layers import LayerPass
    from depthdecay.speculative.short_head import ShortHead

FED = (0,)  # a part's one token where only the device knows it yet


@dataclass(frozen=True)
class Part:
    """What one text brings to a pass: tokens that follow `length` positions, to run at a depth of its plan."""

    slot: int
    length: int
    tokens: Sequence[int]
    depth: int
    plan: Plan
    wanted: int = 1  # logits behind so many of its last tokens

    @property
    def end(self) -> int:
        return self.length + len(self.tokens)

    def singly(self) -> list[Part]:
        """A part for each token; keys are written before any of them looks, and each sees its own positions only."""
        first = len(self.tokens) - self.wanted
        return [
            Part(self.slot, self.length + place, [token], self.depth, self.plan, int(place >= first))
            for place, token in enumerate(self.tokens)
        ]


@dataclass(frozen=True)
class Ask:
    """What a pass is given and asked for besides its parts."""

    fed: torch.Tensor | None = None  # on the device, the one token of each part, where the parts only have `FED`
    # Rows of the output matrix that are enough. A way to run passes that cannot leave the others out says so by `ids`.
    short: ShortHead | None = None
    states: tuple[int, ...] = ()  # layers behind which the state of every token is wanted
    logits: bool = True  # False: only states are wanted, and the model's own forward leaves its output matrix out

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells captured passes apart that do the same but for this."""
        return (*self.states, self.logits)


PLAIN = Ask()


@dataclass(frozen=True)
class Said:
    """What a pass brought."""

    logits: torch.Tensor  # (tokens wanted of all parts in order, vocabulary)
    tokens_run: Sequence[int]  # by layer, how many tokens ran it: counted where they run, never estimated
    ids: torch.Tensor | None = None  # which tokens the logits are of, where these are not the whole vocabulary
    likeliest: torch.Tensor | None = None  # the greedy choices, where the pass itself has made and fed them
    # By layer that was asked for, what it handed on: (tokens of all parts in order, hidden). Behind a dropped layer it
    # is the state that goes on in its place. The next pass may write over them.
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_forward(
        cls,
        parts: Sequence[Part],
        ask: Ask,
        logits: torch.Tensor,
        layer_pass: LayerPass,
        tokens_run: Sequence[int],
        likeliest: torch.Tensor | None = None,
    ) -> Said:
        """What the model's own forward brought, in which the tokens of each part are the last ones of a row."""
        states = {}
        for layer in ask.states:
            rows = layer_pass.states[layer]
            states[layer] = torch.cat([rows[row, -len(part.tokens) :] for row, part in enumerate(parts)])
        return cls(logits, tokens_run, None if ask.short is None else ask.short.ids, likeliest, states)

    @property
    def layers_executed(self) -> int:
        return sum(count > 0 for count in self.tokens_run)


class Runner(Protocol):
    """Runs passes over the keys and values of some texts."""

    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        """One pass over parts in the order of their depths, deepest first."""

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all texts."""

    @property
    def cache_bytes_uniform(self) -> int:
        """The same, had every layer as much room as the one that has most."""

    @property
    def inexact(self) -> str | None:
        """Why a token's bits may depend on how many run with it; None where they do not."""


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
    """The tokens of all parts one behind the other, and where each stands; `wanted` are the places of those wanted."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
    wanted: list[int]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Tokens:
        found = cls([], [], [], [])
        for part in parts:
            found.ids.extend(part.tokens)
            found.positions.extend(range(part.length, part.end))
            found.slots.extend([part.slot] * len(part.tokens))
            found.wanted.extend(range(len(found.ids) - part.wanted, len(found.ids)))
        return found
