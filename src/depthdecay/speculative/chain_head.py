"""A learned head inside windows that run as CUDA graphs: its KV cache and its passes are part of the graphs.

A verification produces the full model's states. Its graph then runs the head over the window's tokens with these
states, so that the head's keys come from verified states. A draft's graph runs the head on the last token, and feeds
the head's own state to the next draft.
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

Compiled = Callable[..., Callable[..., Any]]  # takes a function and how many rows it gets; returns it compiled

UNUSED = 32  # verifications without a draft by the head, after which it stops following the text


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
    """The head's states for tokens at these positions; writes their keys and values.

    `known`: positions that have been written; others are masked out. `overlap`: as for `attend`; None if our kernel
    cannot run.
    """
    angles = head.angles(positions.unsqueeze(0), given.dtype)
    query, key, value = head.project(given, before, angles)
    keys.index_copy_(2, positions, key)
    values.index_copy_(2, positions, value)
    known.index_fill_(0, positions, True)
    places = torch.arange(known.shape[0], device=known.device)
    mask = ((places <= positions.unsqueeze(1)) & known)[None, None]
    if overlap is not None and can_attend(query, keys, values, mask):  # two kernels instead of torch's ten
        mixed = attend(query, keys, values, mask, head.shape.head_size**-0.5, None, None, overlap).transpose(1, 2)
    else:
        mixed = functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
    return head.finish(given, before, mixed)


def joined_states(head: DraftHead, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The full model's states of each position, projected to one."""
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
    """Run the head over a verified window; returns the joined states, which the next tokens are run with."""
    joined = joined_states(head, states)
    head_pass(head, given, torch.cat([before, joined[:, :-1]], dim=1), positions, keys, values, known, overlap)
    return joined


def head_logits(head: DraftHead, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(head.norm(state[:, -1]), weight, bias)


class ChainHead:
    """A head's state in a chain of windows. Tensors keep their addresses, since graphs have captured them."""

    def __init__(self, placed: PlacedHead, room: int) -> None:
        self.placed, self.head = placed, placed.head
        shape, like = placed.head.shape, placed.weight
        # One position more than is ever used, so slices always have the same strides and need one compilation.
        self.keys = like.new_zeros((1, shape.key_value_heads, room + 1, shape.head_size))
        self.values = torch.zeros_like(self.keys)
        self.known = torch.zeros(room + 1, dtype=torch.bool, device=like.device)
        # The state before the last verified token, and before the last token of all: after a draft, the head's own.
        self.certain = like.new_zeros((1, 1, shape.hidden))
        self.before = torch.zeros_like(self.certain)
        self.unused = 0  # verifications since it last drafted
        self.overlap = overlaps_kernels() if like.is_cuda and cuda_generation() >= 8 else None

    @property
    def changing(self) -> list[torch.Tensor]:
        """State that passes change, besides keys and values, which are overwritten anyway."""
        return [self.known, self.certain, self.before]

    @property
    def reads_along(self) -> bool:
        return self.unused < UNUSED

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def begin(self, text: Sequence[int], states: Mapping[int, torch.Tensor]) -> None:
        """Start a new text, after its full-depth prefill."""
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
        """Start the next window from this state of the full model."""
        self.certain.copy_(state)
        self.before.copy_(state)

    def given(self, ids: torch.Tensor, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The head's input for tokens (1, tokens): embeddings, or the output of the model's first layers."""
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
        """Run the head over the tokens of a verification; returns their joined states (1, tokens, hidden)."""
        given = self.given(ids, states)
        parts = [state.reshape(1, -1, self.head.shape.hidden) for state in self._states(states, given.dtype)]
        several = given.shape[1] > 1
        if several:  # one compilation for any number of tokens
            for tensor in (given, *parts):
                vary_sizes(tensor, (1,))
            vary_sizes(positions, (0,))
        read = compiled(behind_window, "few" if several else "one")
        joined: torch.Tensor = read(self.head, parts, given, self.certain, positions, *self._room(bucket), self.overlap)
        return joined

    def leave_out(self, positions: torch.Tensor) -> None:
        """Skip a verification: mask out what was drafted at these positions."""
        self.known.index_fill_(0, positions, False)

    def draft(
        self,
        given: torch.Tensor,
        position: torch.Tensor,
        bucket: int,
        compiled: Compiled,
    ) -> torch.Tensor:
        """Logits after one token at a position; keeps the state that the next token is run with."""
        state = compiled(head_pass)(self.head, given, self.before, position, *self._room(bucket), self.overlap)
        logits: torch.Tensor = compiled(head_logits)(self.head, state, self.placed.weight, self.placed.bias)
        self.before.copy_(state)
        return logits

    def _room(self, positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and mask of the first positions, with that dimension marked dynamic: one compilation for all."""
        keys, values, known = self.keys[:, :, :positions], self.values[:, :, :positions], self.known[:positions]
        for tensor, place in ((keys, 2), (values, 2), (known, 0)):
            vary_sizes(tensor, (place,))
        return keys, values, known

    def _states(self, states: Mapping[int, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        return [states[layer].to(dtype) for layer in self.head.shape.states]
