"""A shortened LM head for drafts: only the rows of tokens that this kind of text uses.

With a vocabulary of 150,000 tokens the LM head is a sixth of a small model; in a shallow pass it costs as much as
several layers. A draft can do without most of it: tokens that it lacks are merely rejected drafts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from depthdecay.cuda.likeliest import PIECES
from depthdecay.model.layers import LayerStack
from depthdecay.patches import patched

# Vocabularies are ordered by when the tokenizer's training added a token, so the first ones are the most frequent.
SHARE, LEAST = 5, 16384
SPARE = 2048  # extra rows for other tokens of the prompt and the answer
WORTH = 0.08  # the least share of a step's bytes that the LM head must have
MOST = 0.7  # the largest size of the shortened head, relative to the LM head


def product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(hidden, weight, bias)


class ShortHead:
    """The LM head's rows of some tokens, with room for a text's own. Graphs read these tensors, so they never move."""

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
        """For a model whose LM head is large enough to shorten; `vocabulary`: tokens seen in calibration."""
        head: Any = stack.model.get_output_embeddings()
        if type(head) is not nn.Linear or not head.weight.is_floating_point() or head.weight.device.type == "meta":
            return None
        size = head.weight.shape[0]
        first = max(LEAST, size // SHARE)
        head_bytes = stack.head_bytes()
        if head_bytes < WORTH * (head_bytes + sum(stack.layer_bytes())):
            return None
        # Rows are in the model's precision: they may be no smaller than the whole LM head when that is quantized.
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
        """Whether these are still rows of the model's LM head, on its device and in its precision."""
        head: Any = stack.model.get_output_embeddings()
        same = head is self.head and head.weight.device == self.weight.device
        return same and head.weight.dtype == self.weight.dtype

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def start(self, tokens: Iterable[int]) -> None:
        """Start a new text: replace the last one's tokens by this one's."""
        for token in self._own:
            self._known[token] = 0
        self._own = []
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Add rows for tokens of the text that are missing, as many as fit."""
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
        """While open, the model's logits cover these rows only; `ids` maps them to tokens."""
        with patched(self.head, "forward", lambda hidden: self.product(hidden, self.weight, self.bias)):
            yield
