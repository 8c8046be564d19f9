"""A learned head inside the windows that a device goes through by itself: its cache and its passes as parts of graphs.

A verification leaves the full model's states behind; its graph goes on to read the window's tokens beside them, so that
the head's keys are those of verified states. A draft's graph reads the last token, and feeds its own state to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from depthdecay.cuda.kernels.split_attention import attend, can_attend
from depthdecay.library_internals import vary_sizes
from depthdecay.model.devices import cuda_generation, overlaps_kernels
from depthdecay.speculative.draft_head import DraftHead
from depthdecay.speculative.head_text import LONGEST_READ, PlacedHead

Compiled = Callable[..., Callable[..., Any]]  # a function, and for how many rows, to the same function compiled

UNUSED = 32  # verifications without a draft of the head's, after which it no longer reads along


def head_pass(
    head: DraftHead,
    given: torch.Tensor,
    before: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    known: torch.Tensor,
    overlap: bool | None,
) -> torch.Tensor:
    """The head's states of tokens at these positions, whose keys and values it writes.

    `known`: at which positions something has been written; others are not looked at. `overlap`: as for `attend`, and
    None where our kernel cannot run.
    """
    angles = head.angles(positions.unsqueeze(0), given.dtype)
    query, key, value = head.project(given, before, angles)
    keys.index_copy_(2, positions, key)
    values.index_copy_(2, positions, value)
    known.index_fill_(0, positions, True)
    places = torch.arange(known.shape[0], device=known.device)
    mask = ((places <= positions.unsqueeze(1)) & known)[None, None]
    if overlap is not None and can_attend(query, keys, values, mask):  # two kernels, where torch has ten
        mixed = attend(query, keys, values, mask, head.shape.head_size**-0.5, None, None, overlap).transpose(1, 2)
    else:
        mixed = functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
    return head.finish(given, before, mixed)


def joined_states(head: DraftHead, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The full model's states of each position as one."""
    return head.joined(torch.cat(list(states), dim=-1))


def behind_window(
    head: DraftHead,
    states: Sequence[torch.Tensor],
    given: torch.Tensor,
    before: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    known: torch.Tensor,
    overlap: bool | None,
) -> torch.Tensor:
    """Read a verified window; the states that its tokens leave to those behind them."""
    joined = joined_states(head, states)
    head_pass(head, given, torch.cat([before, joined[:, :-1]], dim=1), positions, keys, values, known, overlap)
    return joined


def head_logits(head: DraftHead, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(head.norm(state[:, -1]), weight, bias)


class ChainHead:
    """What a chain of windows needs of a head. Tensors stay where they are, since graphs have captured them."""

    def __init__(self, placed: PlacedHead, room: int) -> None:
        self.placed, self.head = placed, placed.head
        shape, like = placed.head.shape, placed.weight
        # One position more than is ever used: a part of it always has the same strides, and is compiled for once.
        self.keys = like.new_zeros((1, shape.key_value_heads, room + 1, shape.head_size))
        self.values = torch.zeros_like(self.keys)
        self.known = torch.zeros(room + 1, dtype=torch.bool, device=like.device)
        # What the last certain token is read beside, and what the last one of all: behind a draft, the head's own.
        self.certain = like.new_zeros((1, 1, shape.hidden))
        self.before = torch.zeros_like(self.certain)
        self.unused = 0  # verifications since it last drafted
        self.overlap = overlaps_kernels() if like.is_cuda and cuda_generation() >= 8 else None

    @property
    def changing(self) -> list[torch.Tensor]:
        """What passes change besides keys and values, which are written again."""
        return [self.known, self.certain, self.before]

    @property
    def reads_along(self) -> bool:
        return self.unused < UNUSED

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def begin(self, text: Sequence[int], states: Mapping[int, torch.Tensor]) -> None:
        """A new text, behind its pass through all layers."""
        dtype = self.placed.weight.dtype
        joined = joined_states(self.head, self._states(states, dtype)).unsqueeze(0)
        given = self.given(torch.tensor([text], device=joined.device), states)
        self.known.zero_()
        self.unused = 0
        for start in range(1, len(text), LONGEST_READ):
            part = slice(start, min(start + LONGEST_READ, len(text)))
            positions = torch.arange(part.start, part.stop, device=joined.device)
            before = joined[:, part.start - 1 : part.stop - 1]
            head_pass(self.head, given[:, part], before, positions, *self._room(part.stop), self.overlap)
        self.go_on(joined[:, -1:])

    def go_on(self, state: torch.Tensor) -> None:
        """The next window begins beside this state of the full model."""
        self.certain.copy_(state)
        self.before.copy_(state)

    def given(self, ids: torch.Tensor, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What the head is told of tokens (1, tokens): embeddings, or what the first layers made of them."""
        first = self.head.shape.first_layers
        found: torch.Tensor = states[first - 1] if first else self.placed.embedding(ids)
        return found.reshape(1, -1, self.head.shape.hidden).to(self.placed.weight.dtype)

    def read_window(
        self,
        ids: torch.Tensor,
        states: Mapping[int, torch.Tensor],
        positions: torch.Tensor,
        bucket: int,
        compiled: Compiled,
    ) -> torch.Tensor:
        """Read the tokens of a verification; the states (1, tokens, hidden) that they leave to those behind them."""
        given = self.given(ids, states)
        parts = [state.reshape(1, -1, self.head.shape.hidden) for state in self._states(states, given.dtype)]
        several = given.shape[1] > 1
        if several:  # one compilation for every number of them
            for tensor in (given, *parts):
                vary_sizes(tensor, (1,))
            vary_sizes(positions, (0,))
        read = compiled(behind_window, "few" if several else "one")
        joined: torch.Tensor = read(self.head, parts, given, self.certain, positions, *self._room(bucket), self.overlap)
        return joined

    def leave_out(self, positions: torch.Tensor) -> None:
        """A verification that it does not read: what was drafted there is nobody's any more."""
        self.known.index_fill_(0, positions, False)

    def draft(
        self,
        given: torch.Tensor,
        position: torch.Tensor,
        bucket: int,
        compiled: Compiled,
    ) -> torch.Tensor:
        """Logits behind one token at a position, and the state that the next one is read beside."""
        state = compiled(head_pass)(self.head, given, self.before, position, *self._room(bucket), self.overlap)
        logits: torch.Tensor = compiled(head_logits)(self.head, state, self.placed.weight, self.placed.bias)
        self.before.copy_(state)
        return logits

    def _room(self, positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and what is known of the first positions: what is compiled for them serves any number."""
        keys, values, known = self.keys[:, :, :positions], self.values[:, :, :positions], self.known[:positions]
        for tensor, place in ((keys, 2), (values, 2), (known, 0)):
            vary_sizes(tensor, (place,))
        return keys, values, known

    def _states(self, states: Mapping[int, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        return [states[layer].to(dtype) for layer in self.head.shape.states]
