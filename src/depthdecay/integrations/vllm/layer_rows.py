"""One step of a batch: which rows run which layer. Only numbers and index tensors, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from depthdecay.plan.ladder import Ladder
from depthdecay.plan.plan import Plan


@dataclass(frozen=True)
class Scheduled:
    """A request's part of a step: positions `computed` to `computed + tokens`, after a prompt of `prompt` tokens."""

    computed: int
    tokens: int
    prompt: int
    plan: Plan

    def depths(self) -> list[int]:
        """A depth for each position. The token at position p is the input of generated token p - prompt + 1."""
        first = self.computed - self.prompt + 1
        return [self.plan.depth(max(0, index)) for index in range(first, first + self.tokens)]


class Rows:
    """Some rows of a step: the first ones of each request, since ladders are nested and depth never rises."""

    def __init__(self, step: Step, mask: np.ndarray) -> None:
        self.index_np = np.flatnonzero(mask)
        self.index = torch.from_numpy(self.index_np).to(step.device, non_blocking=True)
        kept = np.add.reduceat(mask, step.starts, dtype=np.int32)
        self.requests_np = np.flatnonzero(kept)
        self.tokens = kept[self.requests_np]
        self.computed = step.computed[self.requests_np]
        self.prompts = step.prompts[self.requests_np]


class Step:
    """The depth of every row, and the rows of every layer.

    All requests share one ladder, so a layer runs on the rows at its least depth or deeper. Layers whose least depths
    lie between the same two depths of the batch have the same rows, so they share one object.
    """

    def __init__(self, scheduled: Sequence[Scheduled], ladder: Ladder, device: torch.device) -> None:
        self.scheduled = scheduled
        self.num_layers = ladder.num_layers
        self.least = least_depths(ladder)
        self.device = device
        self.depths = np.array([depth for part in scheduled for depth in part.depths()], dtype=np.int32)
        self.reached = sorted(set(self.depths.tolist()))
        self._rows: dict[int, Rows] = {}
        self._at: dict[int, torch.Tensor] = {}

    @property
    def is_full(self) -> bool:
        return self.reached[0] == self.num_layers

    @cached_property
    def computed(self) -> np.ndarray:
        return np.array([part.computed for part in self.scheduled], dtype=np.int32)

    @cached_property
    def prompts(self) -> np.ndarray:
        return np.array([part.prompt for part in self.scheduled], dtype=np.int32)

    @cached_property
    def starts(self) -> np.ndarray:
        """The first row of each request."""
        tokens = [part.tokens for part in self.scheduled]
        return np.concatenate(([0], np.cumsum(tokens[:-1]))).astype(np.int64)

    def runs(self, layer: int) -> Rows | bool:
        """The rows that run a layer: True for all, False for none."""
        least = self.least[layer]
        if least <= self.reached[0]:
            return True
        if least > self.reached[-1]:
            return False
        shallowest = next(depth for depth in self.reached if depth >= least)
        if shallowest not in self._rows:
            self._rows[shallowest] = Rows(self, self.depths >= shallowest)
        return self._rows[shallowest]

    def rows_at(self, depth: int) -> torch.Tensor:
        """The rows of exactly this depth, as an index."""
        if depth not in self._at:
            rows = torch.from_numpy(np.flatnonzero(self.depths == depth))
            self._at[depth] = rows.to(self.device, non_blocking=True)
        return self._at[depth]


@lru_cache(maxsize=8)
def least_depths(ladder: Ladder) -> tuple[int, ...]:
    return tuple(ladder.least_depth(layer) for layer in range(ladder.num_layers))
