"""The input and output of a pass: the contract that every runner implements.

A prompt, a decode step, a draft and the verification of drafts are all parts: tokens of a text that follow `length`
positions, to run at a depth. `Runner.run` takes the parts of a pass and returns the model's output for them.
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

FED = (0,)  # placeholder for a part's one token if it is only on the device
# How many steps the host may start before it has seen a token. Each step past the end of a text is wasted work;
# with too few, the device may run idle while the host detokenizes.
LAG_STEPS = 4
# Room for tokens on their way to the host: those of LAG_STEPS steps, of the next one, which starts before the host
# collects the first, and one to spare. So a slot is collected before it is overwritten.
SLOTS = LAG_STEPS + 2


@dataclass(frozen=True)
class Part:
    """One text's share of a pass: tokens that follow `length` positions, to run at a depth of its plan."""

    slot: int
    length: int
    tokens: Sequence[int]
    depth: int
    plan: Plan
    wanted: int = 1  # return logits for this many of its last tokens

    @property
    def end(self) -> int:
        return self.length + len(self.tokens)

    def singly(self) -> list[Part]:
        """A part for each token. All keys are written before any token attends; each sees only its own positions."""
        first = len(self.tokens) - self.wanted
        return [
            Part(self.slot, self.length + place, [token], self.depth, self.plan, int(place >= first))
            for place, token in enumerate(self.tokens)
        ]


@dataclass(frozen=True)
class Ask:
    """A pass's other inputs and requested outputs, besides its parts."""

    fed: torch.Tensor | None = None  # on the device, the one token of each part, if the parts only have `FED`
    # Rows of the LM head that are enough. A runner that cannot skip the others returns no `ids`.
    short: ShortHead | None = None
    states: tuple[int, ...] = ()  # layers whose output hidden states are requested for every token
    logits: bool = True  # False: only states are needed, and the model's own forward skips the LM head

    @property
    def kind(self) -> tuple[Any, ...]:
        """The part of a captured pass's key that depends on what is requested."""
        return (*self.states, self.logits)


PLAIN = Ask()


@dataclass(frozen=True)
class Said:
    """The output of a pass."""

    logits: torch.Tensor  # (wanted tokens of all parts in order, vocabulary)
    tokens_run: Sequence[int]  # per layer, how many tokens ran it: counted where they run, never estimated
    ids: torch.Tensor | None = None  # the tokens that the logits cover, if not the whole vocabulary
    likeliest: torch.Tensor | None = None  # the greedy choices, if the pass itself made and fed them
    # Host memory that has them once the pass has ended, until `SLOTS` more have started; None if nothing copies them.
    arriving: torch.Tensor | None = None
    # Per requested layer, its output: (tokens of all parts in order, hidden). For a dropped layer, the state that
    # replaces its output. The next pass may overwrite them.
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
        arriving: torch.Tensor | None = None,
    ) -> Said:
        """The output of the model's own forward, in which each part's tokens are the last ones of a row."""
        states = {}
        for layer in ask.states:
            rows = layer_pass.states[layer]
            states[layer] = torch.cat([rows[row, -len(part.tokens) :] for row, part in enumerate(parts)])
        return cls(logits, tokens_run, None if ask.short is None else ask.short.ids, likeliest, arriving, states)

    @property
    def layers_executed(self) -> int:
        return sum(count > 0 for count in self.tokens_run)


class Runner(Protocol):
    """Runs passes over the KV cache of some texts."""

    def run(self, parts: Sequence[Part], ask: Ask = PLAIN) -> Said:
        """One pass over parts sorted by depth, deepest first."""

    @property
    def cache_bytes(self) -> int:
        """Size of the KV cache of all texts."""

    @property
    def cache_bytes_uniform(self) -> int:
        """The same if every layer were as large as the largest."""

    @property
    def inexact(self) -> str | None:
        """Why results may depend on what else is in the pass; None if they are batch-invariant."""


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
            plans[part.depth] = part.plan  # one ladder, so any plan has the same layers at this depth
            row += len(part.tokens)
        assert list(segments) == sorted(segments, reverse=True)
        for depth, (_, held) in segments.items():
            for layer in plans[depth].layers(depth):
                counts[layer] += held
        return cls(counts, segments)


@dataclass(frozen=True)
class Tokens:
    """The tokens of all parts, concatenated, with their positions; `wanted` are the indices of those with logits."""

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
