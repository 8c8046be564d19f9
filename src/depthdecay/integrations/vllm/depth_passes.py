"""All rows of a batch run the layers of its deepest row: a pass that one CUDA graph can hold.

Where reading weights bounds a step, a layer costs the same for one row as for all. So rows that have dropped a layer
run it too, but keep the state they had and write no keys and values there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from depthdecay.integrations.vllm.layer_rows import least_depths
from depthdecay.integrations.vllm.layers import first_state, last_state
from depthdecay.integrations.vllm.row_masks import settle
from depthdecay.model.repairs import Repair, Repairs
from depthdecay.plan.ladder import Ladder

# vLLM's kernels skip this slot.
_NO_SLOT = -1

Kernels = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class PassKind:
    """What a graph is captured for: its depth, and whether some rows have dropped layers that it runs."""

    depth: int
    masked: bool


class DepthPass:
    """The model as one kind of pass. What it reads about a step is in persistent buffers."""

    def __init__(self, model: Any, kind: PassKind, row_depths: torch.Tensor, kernels: Kernels = nullcontext) -> None:
        self.model = model
        self.kernels = kernels
        self.kind = kind
        self.row_depths = row_depths
        ladder: Ladder = model.depth.plan.ladder
        self.least = least_depths(ladder)
        self.maps = _maps_by_layer(model.repairs, kind)
        # Copied to the device here: a capture cannot synchronise with the host.
        self.least_on_device = torch.tensor(self.least, dtype=torch.int32, device=row_depths.device)
        # Layers that every row runs need no mask.
        self.shallowest = model.depth.least_depth

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        assert positions is not None
        with self.kernels():
            return self._run(input_ids, positions, intermediate_tensors, inputs_embeds)

    def _run(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any,
        inputs_embeds: torch.Tensor | None,
    ) -> Any:
        inner = self.model.model
        hidden, residual = first_state(inner, input_ids, intermediate_tensors, inputs_embeds)
        if residual is None:
            residual = torch.zeros_like(hidden)
        depths = self.row_depths[: hidden.shape[0]]
        slots = _LayerSlots(depths, self.least_on_device) if self.kind.masked else None
        saved: tuple[torch.Tensor, torch.Tensor] | None = None  # a copy of the state, since vLLM's norms work in place
        for index in range(inner.start_layer, inner.end_layer):
            for at_depths, repair in self.maps.get(index, ()):
                rows = _rows_at(depths, at_depths) if self.kind.masked else None
                hidden, residual = _repaired(hidden, residual, rows, repair)
                saved = None
            if self.least[index] > self.kind.depth:
                continue
            layer = inner.layers[index]
            if slots is None or self.least[index] <= self.shallowest:
                hidden, residual = layer(positions, hidden, residual)
                saved = None
                continue
            slots.tell_attention(layer.self_attn.attn.layer_name, index)
            if saved is None:
                saved = hidden.clone(), residual.clone()
            hidden, residual = layer(positions, hidden, residual)
            settle(hidden, residual, saved, slots.keeps[index])
        return last_state(inner, hidden, residual)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the runner needs from its model."""
        return getattr(self.__dict__["model"], name)


class _LayerSlots:
    """For every layer, which rows run it, and the cache slots of their keys and values."""

    def __init__(self, depths: torch.Tensor, least: torch.Tensor) -> None:
        self.keeps = depths[None] >= least[:, None]
        self._slots: dict[int, torch.Tensor] = {}

    def tell_attention(self, layer_name: str, index: int) -> None:
        context = get_forward_context()
        if context.attn_metadata is None:
            return  # a dummy run without attention
        whole = context.slot_mapping[layer_name]
        # The layers of a group share one tensor.
        if id(whole) not in self._slots:
            self._slots[id(whole)] = torch.where(self.keeps[:, : whole.shape[0]], whole, _NO_SLOT)
        own = self._slots[id(whole)][index]
        context.slot_mapping[layer_name] = own
        # Some backends read slots from their metadata instead.
        context.attn_metadata[layer_name] = copy.copy(context.attn_metadata[layer_name])
        context.attn_metadata[layer_name].slot_mapping = own


def _maps_by_layer(repairs: Repairs, kind: PassKind) -> dict[int, list[tuple[tuple[int, ...], Repair]]]:
    """The repair maps before each layer, each with the depths whose rows it is applied to."""
    found: dict[int, dict[int, tuple[list[int], Repair]]] = {}
    for depth, maps in sorted(repairs.at_depth.items()):
        if depth > kind.depth or (depth < kind.depth and not kind.masked):
            continue
        for repair in maps:
            found.setdefault(repair.start, {}).setdefault(id(repair), ([], repair))[0].append(depth)
    return {layer: [(tuple(depths), repair) for depths, repair in of.values()] for layer, of in found.items()}


def _rows_at(depths: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    rows = depths == wanted[0]
    for depth in wanted[1:]:
        rows = rows | (depths == depth)
    return rows[:, None]


def _repaired(
    hidden: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor | None, repair: Repair
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the state of these rows by what the map computes; None means all rows."""
    guess = repair(hidden + residual)
    if rows is None:
        return torch.zeros_like(hidden), guess
    return torch.where(rows, 0, hidden), torch.where(rows, guess, residual)
