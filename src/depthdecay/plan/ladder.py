"""Ladders: which layers run at each depth, given as one drop order, so that the sets are nested by construction."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthdecay.argument_checks import whole_number
from depthdecay.errors import DepthDecayError
from depthdecay.plan.schedule import MAX_LAYERS


@dataclass(frozen=True)
class Ladder:
    """A drop order over the flex layers, first dropped first; all other layers are core and always run."""

    num_layers: int
    drop_order: tuple[int, ...]

    def __post_init__(self) -> None:
        num_layers = whole_number("num_layers", self.num_layers, 1, MAX_LAYERS)
        if isinstance(self.drop_order, str) or not isinstance(self.drop_order, Iterable):
            raise DepthDecayError(f"the drop order is {self.drop_order!r}; expected a list of layer numbers")
        order = tuple(whole_number("a layer in the drop order", layer, 0, num_layers - 1) for layer in self.drop_order)
        if len(set(order)) != len(order):
            twice = sorted({layer for layer in order if order.count(layer) > 1})
            raise DepthDecayError(f"the drop order contains layers twice: {', '.join(map(str, twice))}")
        object.__setattr__(self, "num_layers", num_layers)
        object.__setattr__(self, "drop_order", order)

    @property
    def flex(self) -> tuple[int, ...]:
        """The layers that may be dropped, in the model's order."""
        return tuple(sorted(self.drop_order))

    @property
    def core(self) -> tuple[int, ...]:
        """The layers that always run, in the model's order."""
        return self.layers(self.min_layers)

    @property
    def min_layers(self) -> int:
        return self.num_layers - len(self.drop_order)

    @property
    def is_guess(self) -> bool:
        """Whether layers are dropped from the middle outwards, the default without calibration."""
        neighbours = len(runs_of(self.drop_order)) == 1
        return neighbours and self.drop_order == _middle_first(self.flex)

    def dropped(self, depth: int) -> tuple[int, ...]:
        """The layers that do not run at this depth, first dropped first."""
        depth = whole_number("depth", depth, self.min_layers, self.num_layers)
        return self.drop_order[: self.num_layers - depth]

    def layers(self, depth: int) -> tuple[int, ...]:
        """The layers that run at this depth, in the model's order."""
        depth = whole_number("depth", depth, self.min_layers, self.num_layers)
        if depth not in self._layers:
            dropped = set(self.dropped(depth))
            self._layers[depth] = tuple(layer for layer in range(self.num_layers) if layer not in dropped)
        return self._layers[depth]

    @functools.cached_property
    def _layers(self) -> dict[int, tuple[int, ...]]:
        """Cached per depth, since a batch looks up every row at every step."""
        return {}

    def least_depth(self, layer: int) -> int:
        """The smallest depth at which this layer still runs."""
        layer = whole_number("layer", layer, 0, self.num_layers - 1)
        if layer in self.drop_order:
            return self.num_layers - self.drop_order.index(layer)
        return self.min_layers

    def to_dict(self) -> dict[str, Any]:
        return {"num_layers": self.num_layers, "drop_order": list(self.drop_order)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ladder:
        if not isinstance(values, Mapping) or values.keys() != {"num_layers", "drop_order"}:
            raise DepthDecayError("a ladder is a mapping with the fields num_layers and drop_order")
        return cls(values["num_layers"], values["drop_order"])

    @classmethod
    def middle_out(cls, num_layers: int, core_head: int = 2, core_tail: int = 2) -> Ladder:
        """Drop from the middle outwards: the initial guess without calibration."""
        flex = _flex_range(num_layers, core_head, core_tail)
        return cls(num_layers, _middle_first(flex))

    @classmethod
    def from_top(cls, num_layers: int, core_head: int = 1) -> Ladder:
        """Drop the last layer first, as early exit does; no layer near the output is protected."""
        return cls(num_layers, tuple(reversed(_flex_range(num_layers, core_head, 0))))

    @classmethod
    def from_bottom(cls, num_layers: int, core_head: int = 1, core_tail: int = 1) -> Ladder:
        """Drop upwards, starting after the first `core_head` layers, as SkipDecode does after its warm-up layers."""
        return cls(num_layers, tuple(_flex_range(num_layers, core_head, core_tail)))

    @classmethod
    def evenly(cls, num_layers: int, depth: int) -> Ladder:
        """At `depth`, keep evenly spaced layers including the first and the last, as unified skipping does."""
        num_layers = whole_number("num_layers", num_layers, 2, MAX_LAYERS)
        gaps = whole_number("depth", depth, 2, num_layers) - 1
        # Rounded to the nearest layer in integer arithmetic: floats could map two layers to one index.
        kept = {(2 * step * (num_layers - 1) + gaps) // (2 * gaps) for step in range(gaps + 1)}
        return cls(num_layers, _middle_first([layer for layer in range(num_layers) if layer not in kept]))

    @classmethod
    def from_scores(cls, scores: Sequence[float], core_head: int = 0, core_tail: int = 0) -> Ladder:
        """Drop the lowest score first, as ShortGPT does with block influence; on a tie, the lower layer first."""
        values = list(scores)
        for layer, score in enumerate(values):
            if isinstance(score, (bool, str)) or not _is_finite(score):
                raise DepthDecayError(f"the score of layer {layer} is {score!r}; expected a finite number")
        flex = _flex_range(len(values), core_head, core_tail)
        return cls(len(values), tuple(sorted(flex, key=lambda layer: (values[layer], layer))))


def runs_of(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring layers as (first, last + 1), in the model's order."""
    runs: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer:
            runs[-1] = runs[-1][0], layer + 1
        else:
            runs.append((layer, layer + 1))
    return runs


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _middle_first(layers: Sequence[int]) -> tuple[int, ...]:
    """Closest to the middle first; on a tie the lower layer, since lower layers proved cheaper to drop."""
    return tuple(sorted(layers, key=lambda layer: (abs(2 * layer - layers[0] - layers[-1]), layer)))


def _flex_range(num_layers: int, core_head: int, core_tail: int) -> range:
    num_layers = whole_number("num_layers", num_layers, 1, MAX_LAYERS)
    core_head = whole_number("core_head", core_head, 0)
    core_tail = whole_number("core_tail", core_tail, 0)
    if core_head + core_tail >= num_layers:
        raise DepthDecayError(
            f"core_head {core_head} and core_tail {core_tail} leave no flex layer of {num_layers} layers; "
            f"their sum must be below {num_layers}"
        )
    return range(core_head, num_layers - core_tail)
