"""Feeds the same tokens through compiled passes of many widths, whose logits must have the same bits.

Lossless answers equal full depth bitwise because they do. `depthdecay check` runs this on the user's own model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.kernels.split_attention import MOST_TOKENS
from depthdecay.cuda.pass_graphs import PassGraphs
from depthdecay.model.kv_cache import bucket_for, room_for
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import Part

WIDTHS = (1, 2, 3, 4, 5, 8, 11, 15, 16)  # each is a graph of its own for every bucket
MIXED = 4  # random splits into these


class WidthTrial:
    """One text at full depth, in captured passes of chosen widths."""

    def __init__(self, stack: LayerStack, compiled: CompiledLayers | None, positions: int) -> None:
        """`positions`: of the longest prompt with its text."""
        layers = stack.num_layers
        self.plan = Plan.full(layers)
        rooms = [room_for(positions + MOST_TOKENS, 1)] * layers
        self.passes = PassGraphs(stack, self.plan, Repairs(), compiled, batch=1, rooms=rooms)
        device = self.passes.tokens.device
        self.ids = torch.zeros((1, MOST_TOKENS), dtype=torch.long, device=device)
        self.positions = torch.zeros(MOST_TOKENS, dtype=torch.long, device=device)
        vocabulary = stack.model.get_output_embeddings().weight.shape[0]
        self.said = torch.zeros((1, MOST_TOKENS, vocabulary), dtype=stack.model.dtype, device=device)

    def logits(self, prompt: Sequence[int], text: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
        """After each token of the text (tokens, vocabulary). `widths` add up to its length."""
        if sum(widths) != len(text):
            raise ValueError(f"widths add up to {sum(widths)}, but the text has {len(text)} tokens")
        self.passes.run([Part(0, 0, prompt, self.plan.num_layers, self.plan)])
        found, at = [], 0
        for width in widths:
            start = len(prompt) + at
            self.ids[0, :width] = torch.tensor(text[at : at + width])
            self.positions[:width] = torch.arange(start, start + width)
            found.append(self._pass(width, bucket_for(start + width)))
            at += width
        return torch.cat(found, dim=1)[0]

    @torch.no_grad()
    def _pass(self, width: int, bucket: int) -> torch.Tensor:
        def body() -> torch.Tensor:
            ids, positions = self.ids[:, :width].clone(), self.positions[:width].clone()
            logits = self.passes.several(ids, positions, bucket)
            self.said[:, :width] = logits
            return logits

        key, layers = ("trial", width, bucket), self.plan.num_layers
        self.passes.graph(key, layers, bucket, body, tokens=width).graph.replay()
        return self.said[:, :width].clone()

    def first_difference(self, prompt: Sequence[int], text: Sequence[int]) -> str | None:
        """Where logits first differ from those of single steps, in which split; None if all bits are the same."""
        expected = self.logits(prompt, text, [1] * len(text))
        for name, widths in splits(len(text)):
            differs = (self.logits(prompt, text, widths) != expected).any(-1).nonzero().flatten()
            if len(differs):
                return f"token {int(differs[0])} of passes over {name}"
        return None


def splits(tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Ways to divide so many tokens into passes, by name: every width throughout, then mixed ones."""
    for width in WIDTHS[1:]:
        rest = tokens % width
        yield f"{width} tokens", [width] * (tokens // width) + [rest] * (rest > 0)
    for seed in range(MIXED):
        chosen, widths = random.Random(seed), list[int]()
        while (left := tokens - sum(widths)) > 0:
            widths.append(chosen.choice([width for width in WIDTHS if width <= left]))
        yield f"mixed numbers of tokens ({seed})", widths
