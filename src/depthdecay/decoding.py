"""Prefill at full depth, then one step at a depth: the contract, and the eager way that works everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .cache import PlannedCache, bucket_for
from .plan import Plan
from .repairs import Repairs
from .stack import LayerPass, Stack


class Decoder(Protocol):
    """One batch in decoding. Tokens and logits stay on the device; the host only says which step is next."""

    tokens: torch.Tensor  # (batch, 1): what the next step reads
    logits: torch.Tensor  # (batch, vocabulary): what the last pass said
    cache: PlannedCache
    feeds_itself: bool  # after a step, `tokens` holds its greedy choice already

    def prefill(self, prompt: Prompt) -> int:
        """Read the prompts through all layers; return the number of layers executed."""

    def step(self, index: int) -> int:
        """Run the pass that produces T_index; return the number of layers executed."""


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts, padded on the left."""

    ids: torch.Tensor  # (batch, length)
    mask: torch.Tensor | None  # (batch, length) of 0 and 1, None where nothing is padded
    position_ids: torch.Tensor

    @classmethod
    def pad(cls, prompts: list[list[int]], pad_token_id: int, device: torch.device) -> Prompt:
        length = max(map(len, prompts))
        ids = torch.tensor([[pad_token_id] * (length - len(p)) + p for p in prompts])
        lengths = torch.tensor([[len(p)] for p in prompts])
        positions = torch.arange(length).unsqueeze(0) - (length - lengths)
        padded = bool((lengths != length).any())
        mask = (positions >= 0).long().to(device) if padded else None
        return cls(ids.to(device), mask, positions.clamp(min=0).to(device))

    @property
    def length(self) -> int:
        return self.ids.shape[1]


def rooms(plan: Plan, prompt_length: int, new_tokens: int, *, in_buckets: bool) -> list[int]:
    """Positions each layer needs: the prompt, and one for every later pass that still runs the layer."""
    needs = (prompt_length + plan.last_token_of_layer(layer, new_tokens) - 1 for layer in range(plan.num_layers))
    return [bucket_for(need) if in_buckets else need for need in needs]


class EagerDecoder:
    """Calls the model's own forward at every step: the path of CPUs, of models on several GPUs, of every fallback."""

    feeds_itself = False

    def __init__(
        self, stack: Stack, plan: Plan, cache: PlannedCache, new_tokens: int, repairs: Repairs | None = None
    ) -> None:
        self.stack = stack
        self.plan = plan
        self.repairs = Repairs() if repairs is None else repairs
        self.cache = cache
        self.new_tokens = new_tokens
        self.layer_pass = LayerPass()
        self.padding: torch.Tensor | None = None

    def prefill(self, prompt: Prompt) -> int:
        self.cache.clock.filled = 0
        self.cache.on_device(None)
        self.padding = None
        if prompt.mask is not None:
            later = prompt.mask.new_ones((prompt.mask.shape[0], self.new_tokens))
            self.padding = torch.cat([prompt.mask, later], dim=1)
        self.position_ids = prompt.position_ids[:, -1:].clone()
        self.tokens = prompt.ids[:, -1:].clone()
        return self._run(prompt.ids, prompt.position_ids, self.plan.num_layers)

    def step(self, index: int) -> int:
        self.position_ids += 1
        return self._run(self.tokens, self.position_ids, self.plan.depth(index))

    def go_to(self, depth: int) -> None:
        """The next pass runs at this depth."""
        self.layer_pass.dropped = frozenset(self.plan.dropped(depth))
        self.layer_pass.repairs = self.repairs.at(depth)
        self.layer_pass.layers_executed = 0

    def _run(self, ids: torch.Tensor, position_ids: torch.Tensor, depth: int) -> int:
        filled = self.cache.clock.filled + ids.shape[1]
        padding = None if self.padding is None else self.padding[:, :filled]
        self.go_to(depth)
        self.logits = self.stack.run(self.layer_pass, ids, padding, self.cache, position_ids)[:, -1]
        self.cache.clock.filled = filled
        return self.layer_pass.layers_executed
