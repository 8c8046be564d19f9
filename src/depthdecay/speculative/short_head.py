"""Fewer rows of the output matrix for drafts: those of tokens that this kind of text uses.

A vocabulary of 150 000 tokens makes the output matrix a sixth of a small model, in a shallow pass as much as several
layers. A draft may leave most of it out: what it cannot say, it gets wrong, and the verification says it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from depthdecay.model.layers import LayerStack
from depthdecay.patches import patched

# Vocabularies are sorted by how early a tokenizer met a token, so the first ones are the most frequent.
SHARE, LEAST = 5, 16384
SPARE = 2048  # rows for tokens of the prompt and of the answer that are not among them
PIECES = 64  # that rows come in: the likeliest token is sought in all of them at a time
WORTH = 0.08  # of a step's bytes, that the output matrix must be
MOST = 0.7  # of the output matrix, that the rows may weigh


def product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(hidden, weight, bias)


class ShortHead:
    """The rows of some tokens, with room for a text's own. Graphs read these tensors, so they stay where they are."""

    def __init__(self, head: nn.Linear, tokens: torch.Tensor) -> None:
        self.head = head
        self.fixed = len(tokens)
        spare = SPARE + -(self.fixed + SPARE) % PIECES
        self.ids = torch.cat([tokens, tokens[:1].expand(spare)]).to(head.weight.device)
        self.weight = head.weight.detach()[self.ids]
        self.bias = None if head.bias is None else head.bias.detach()[self.ids]
        self._known = bytearray(head.weight.shape[0])
        for token in tokens.tolist():
            self._known[token] = 1
        self._own: list[int] = []
        self.product = product

    @classmethod
    def of(cls, stack: LayerStack, vocabulary: torch.Tensor | None) -> ShortHead | None:
        """For a model whose output matrix weighs enough to be cut; `vocabulary` are tokens seen in calibration."""
        head: Any = stack.model.get_output_embeddings()
        if type(head) is not nn.Linear or not head.weight.is_floating_point() or head.weight.device.type == "meta":
            return None
        size = head.weight.shape[0]
        first = max(LEAST, size // SHARE)
        head_bytes = stack.head_bytes()
        if head_bytes < WORTH * (head_bytes + sum(stack.layer_bytes())):
            return None
        # Rows are in the model's own precision: beside a matrix in few bits they may be no shorter.
        if (first + SPARE) * head.weight.shape[1] * head.weight.element_size() > MOST * head_bytes:
            return None
        ends = stack.model.generation_config.eos_token_id
        chosen = torch.zeros(size, dtype=torch.bool)
        chosen[:first] = True
        for more in (vocabulary, None if ends is None else torch.tensor(ends).reshape(-1)):
            if more is not None:
                more = more.long().cpu()
                chosen[more[(more >= 0) & (more < size)]] = True
        return cls(head, chosen.nonzero().squeeze(1))

    def is_for(self, stack: LayerStack) -> bool:
        """Whether these are still rows of the model's matrix, in its place and precision."""
        head: Any = stack.model.get_output_embeddings()
        same = head is self.head and head.weight.device == self.weight.device
        return same and head.weight.dtype == self.weight.dtype

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def start(self, tokens: Iterable[int]) -> None:
        """A new text: forget the last one's tokens and take this one's."""
        for token in self._own:
            self._known[token] = 0
        self._own = []
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Take tokens of the text that are not among the rows yet, as long as there is room."""
        new = [token for token in dict.fromkeys(tokens) if not self._known[token]][: SPARE - len(self._own)]
        if not new:
            return
        rows = torch.tensor(new, device=self.ids.device)
        place = slice(self.fixed + len(self._own), self.fixed + len(self._own) + len(new))
        self.ids[place] = rows
        self.weight[place] = self.head.weight.detach()[rows]
        if self.bias is not None:
            self.bias[place] = self.head.bias.detach()[rows]
        for token in new:
            self._known[token] = 1
        self._own += new

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, the model's logits are these rows' only; `ids` tells which tokens they are."""
        with patched(self.head, "forward", lambda hidden: self.product(hidden, self.weight, self.bias)):
            yield
