"""Repair maps, which replace dropped layers: one low-rank linear map for each run of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.model.layers import LayerStack
from depthdecay.model.tensor_files import read_tensors, write_tensors
from depthdecay.plan.ladder import runs_of
from depthdecay.plan.plan import Plan

REPAIRS_FILE = "repairs.safetensors"
_KIND = ("depthdecay-repairs", "1")
_PARTS = ("down", "up", "bias", "gate", "lift", "out")
_LONGEST_TEXT = 2**24


def normalised(state: torch.Tensor) -> torch.Tensor:
    """The input of repair maps: the hidden state divided by its root mean square."""
    scale = state.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    return (state * scale).to(state.dtype)


def gated(normal: torch.Tensor, gate: torch.Tensor, lift: torch.Tensor) -> torch.Tensor:
    """The activations of gated MLP neurons for a normalised hidden state."""
    return functional.silu(functional.linear(normal, gate)) * functional.linear(normal, lift)


def repaired(
    hidden: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor,
    gate: torch.Tensor | None = None,
    lift: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The hidden state after a run of dropped layers, predicted from the state before it.

    A low-rank linear map of the normalised state, plus a few of the dropped layers' own neurons where kept.
    """
    normal = normalised(hidden).to(down.dtype)
    guess = functional.linear(functional.linear(normal, down), up) + bias
    if gate is not None and lift is not None and out is not None:
        guess = guess + functional.linear(gated(normal, gate, lift), out)
    return hidden + guess


def repaired_at_once(
    hidden: torch.Tensor,
    down: torch.Tensor,
    back: torch.Tensor,
    bias: torch.Tensor,
    gate: torch.Tensor | None = None,
    lift: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with `up` and `out` concatenated in `back`: one matmul fewer, and launches cost more than reads."""
    normal = normalised(hidden).to(down.dtype)
    inner = functional.linear(normal, down)
    if gate is not None and lift is not None:
        inner = torch.cat([inner, gated(normal, gate, lift)], dim=-1)
    return hidden + (functional.linear(inner, back) + bias)


@dataclass(frozen=True, eq=False)
class Repair:
    """The map that replaces layers `start` to `end` (exclusive)."""

    start: int
    end: int
    down: torch.Tensor  # (rank, hidden)
    up: torch.Tensor  # (hidden, rank)
    bias: torch.Tensor  # (hidden)
    gate: torch.Tensor | None = None  # (neurons, hidden)
    lift: torch.Tensor | None = None  # (neurons, hidden)
    out: torch.Tensor | None = None  # (hidden, neurons)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `repaired` after the state."""
        parts = (self.down, self.up, self.bias, self.gate, self.lift, self.out)
        return tuple(part for part in parts if part is not None)

    @functools.cached_property
    def parts_at_once(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `repaired_at_once` after the state; cached, since graphs read them."""
        if self.gate is None or self.lift is None or self.out is None:
            return self.down, self.up, self.bias
        return self.down, torch.cat([self.up, self.out], dim=1), self.bias, self.gate, self.lift

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return repaired(hidden, *self.parts)

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def neurons(self) -> int:
        return 0 if self.gate is None else self.gate.shape[0]

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    def to(self, device: torch.device, dtype: torch.dtype) -> Repair:
        if self.bias.device == device and self.bias.dtype == dtype:
            return self
        return Repair(self.start, self.end, *(part.to(device=device, dtype=dtype) for part in self.parts))


@dataclass(frozen=True, eq=False)
class Repairs:
    """The maps of every repaired depth. Depths may share a map if the preceding layers are the same."""

    at_depth: Mapping[int, tuple[Repair, ...]] = field(default_factory=dict)
    vocabulary: torch.Tensor | None = None  # tokens in the texts that the maps were fitted on

    def at(self, depth: int) -> dict[int, Repair]:
        """The maps of one depth, by the first layer that each replaces."""
        return {repair.start: repair for repair in self.at_depth.get(depth, ())}

    def parameters(self, depth: int) -> int:
        """Parameters that one token reads at this depth, besides the layers."""
        return sum(repair.numel for repair in self.at_depth.get(depth, ()))

    def only(self, depths: set[int]) -> Repairs:
        return Repairs({depth: maps for depth, maps in self.at_depth.items() if depth in depths}, self.vocabulary)

    def placed(self, examples: Sequence[torch.Tensor]) -> Repairs:
        """Every map on the device and in the dtype of its layer's example."""
        every = {id(repair): repair for maps in self.at_depth.values() for repair in maps}
        moved = {key: r.to(examples[r.start].device, examples[r.start].dtype) for key, r in every.items()}
        at_depth = {depth: tuple(moved[id(r)] for r in maps) for depth, maps in self.at_depth.items()}
        return Repairs(at_depth, self.vocabulary)

    def check(self, plan: Plan, hidden_size: int) -> None:
        """Reject maps that do not match the plan's ladder or the model's hidden size."""
        for depth, maps in self.at_depth.items():
            runs = runs_of(plan.dropped(depth)) if depth >= plan.ladder.min_layers else []
            found = [(repair.start, repair.end) for repair in maps]
            if found != runs:
                raise PlanMismatchError(f"the repairs of depth {depth} are for layers {found}, the plan drops {runs}")
            for repair in maps:
                if repair.up.shape[0] != hidden_size:
                    raise PlanMismatchError(
                        f"the plan's repairs are for a hidden size of {repair.up.shape[0]}, "
                        f"but the model's is {hidden_size}"
                    )
        missing = [depth for depth in reached_depths(plan) if depth not in self.at_depth]
        if missing:
            raise PlanMismatchError(f"the plan visits depth {missing[0]}, for which it has no repairs")

    def save(self, file: Path) -> Path:
        """One safetensors file: each map once, and which depth uses which."""
        numbers: dict[int, int] = {}
        tensors: dict[str, torch.Tensor] = {}
        table: dict[str, list[list[int]]] = {}
        for depth, maps in sorted(self.at_depth.items(), reverse=True):
            table[str(depth)] = []
            for repair in maps:
                if id(repair) not in numbers:
                    numbers[id(repair)] = len(numbers)
                    for name, part in zip(_PARTS, repair.parts, strict=False):
                        tensors[f"{numbers[id(repair)]}.{name}"] = _packed(part.detach().cpu().clone())
                table[str(depth)].append([repair.start, repair.end, numbers[id(repair)]])
        if self.vocabulary is not None:
            tensors["vocabulary"] = self.vocabulary.to(torch.int32).cpu()
        about = {"format": _KIND[0], "version": _KIND[1], "depths": json.dumps(table)}
        return write_tensors(file, tensors, about, "repairs")

    @classmethod
    def load(cls, file: Path) -> Repairs:
        return read_tensors(file, _KIND, "repairs", cls._of)

    @classmethod
    def _of(cls, tensors: dict[str, torch.Tensor], about: Mapping[str, Any]) -> Repairs:
        maps: dict[tuple[int, int, int], Repair] = {}
        at_depth: dict[int, tuple[Repair, ...]] = {}
        for depth, entries in json.loads(about["depths"]).items():
            for start, end, number in entries:
                parts = _parts_of(tensors, start, end, number)
                maps.setdefault((start, end, number), Repair(start, end, *parts))
            at_depth[int(depth)] = tuple(maps[tuple(entry)] for entry in entries)
        return cls(at_depth, tensors.get("vocabulary"))

    @classmethod
    def of_plan(cls, plan: Plan) -> Repairs | None:
        """The repairs stored next to a loaded plan; None if the plan has none."""
        if plan.repairs is None:
            return None
        if plan.folder is None:
            raise DepthDecayError("this plan's repairs are in a file, but the plan was not loaded from one")
        return cls.load(plan.folder / plan.repairs)


def _parts_of(tensors: Mapping[str, torch.Tensor], *entry: Any) -> list[torch.Tensor]:
    """One map's tensors, checked: the linear part is complete, neurons are complete or absent, and shapes fit."""
    if not all(type(value) is int for value in entry):
        raise ValueError(f"an entry of its table is {entry}")
    number = entry[2]
    names = _PARTS if f"{number}.gate" in tensors or f"{number}.out" in tensors else _PARTS[:3]
    parts = [tensors[f"{number}.{name}"] for name in names]
    down, up = parts[:2]
    shapes = [(down.shape[0], up.shape[0]), (up.shape[0], down.shape[0]), (up.shape[0],)]
    if len(parts) == 6:
        neurons = parts[3].shape[0]
        shapes += [(neurons, up.shape[0]), (neurons, up.shape[0]), (up.shape[0], neurons)]
    if [tuple(part.shape) for part in parts] != shapes:
        raise ValueError(f"the shapes of map {number} do not fit each other")
    return parts


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """In 16 bits where that is lossless: maps of float32 models are rounded when they are fitted."""
    if tensor.dtype != torch.float32:
        return tensor
    half = tensor.half()
    return half if torch.equal(half.float(), tensor) else tensor


def repairs_for(stack: LayerStack, plan: Plan | None, repairs: Repairs | None = None) -> Repairs:
    """The plan's maps, checked, each on the device and in the dtype of the layer that it replaces."""
    if plan is None:
        return Repairs()
    found = Repairs.of_plan(plan) if repairs is None else repairs
    if found is None:
        return Repairs()
    found.check(plan, stack.hidden_size)
    return found.placed(stack.examples())


def reached_depths(plan: Plan) -> tuple[int, ...]:
    """Every depth below full that the plan ever reaches."""
    return tuple(depth for depth in plan.visited_depths(_LONGEST_TEXT) if depth < plan.num_layers)
