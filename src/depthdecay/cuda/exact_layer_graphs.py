"""Batch-invariant CUDA graphs of single layers: a row's result depends neither on its neighbours nor on their number.

Matrix products use kernels whose summation order is independent of the number of rows. Reductions use one binary for
all row counts. Attention is split into chunks counted from the row's own first position. So a token is bitwise
identical alone, in a batch, in a verification, and within a prompt that is prefilled in chunks of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from depthdecay.cuda.compiled_layers import one_index
from depthdecay.cuda.experts import experts_apart
from depthdecay.cuda.layer_graphs import LayerGraphs, bucket_of
from depthdecay.model.repairs import Repair, repaired_at_once

# Row counts that no graph uses. Dynamo specializes on the first size it sees and switches to a dynamic size at the
# second. So every piece of a layer runs with both before its graphs are captured, and all graphs share one binary.
_LEARNT_FROM = (3, 5)
_COLUMNS = 128  # repair maps are zero-padded to multiples of this: the product kernel's block of columns


class ExactLayerGraphs(LayerGraphs):
    """Compiled layers only: there is no fallback to plain ones, a failure raises `NotCapturable`."""

    exact = True
    rows_kind = "any"

    def __init__(self, *args: Any) -> None:
        self.said: dict[int, torch.Tensor] = {}  # by number of rows: the graph's output logits
        self._learnt: set[tuple[Any, ...]] = set()
        super().__init__(*args)

    def bucket(self, rows: int) -> int:
        """Never one row: torch would specialize on a size of 1."""
        return max(2, bucket_of(rows))

    def capture_layers(self) -> None:
        super().capture_layers()
        with torch.no_grad(), self._on_device(), self.stack.exclusive():
            for rows in self.buckets:
                self._tail_graph(rows)
            for maps in self.maps.values():
                for repaired in maps.values():
                    repaired(self.states[:2])  # compiles now; captured when a step first needs it

    def _behind_layers(self, wanted: int) -> torch.Tensor:
        """Runs the LM head on the requested rows only: the cost of these kernels grows with every 16 rows."""
        rows = self.bucket(wanted)
        self._tail_graph(rows).replay()
        return self.said[rows][:wanted].clone()

    def _tail_graph(self, rows: int) -> torch.cuda.CUDAGraph:
        def learn() -> None:
            for other in self._learnt_from("tail"):
                self._last(other)
            self._last(rows)

        def run() -> None:
            self.said[rows] = self._last(rows)

        return self._graph(("tail", rows), learn, run)

    def _last(self, rows: int) -> torch.Tensor:
        """The final norm and the LM head, for the first `rows` of the rows whose logits are requested."""
        states = self.states.index_select(0, self.last[:rows])
        compiled = self.graphs.compiled
        assert compiled is not None
        with one_index(self.stack), compiled.beside(self.stack, self.rows_kind):  # one_index raises the recompile limit
            return self._forward(lambda index, *_: self.stack.answer(index, states), rows)

    def _layer(self, index: int, rows: int) -> torch.Tensor:
        with experts_apart(self.stack):
            return super()._layer(index, rows)

    def _warm_layer(self, layer: int, rows: int) -> None:
        for other in self._learnt_from(type(self.stack.layers[layer]), self.stack.windows[layer]):
            self._layer(layer, other)
        self._layer(layer, rows)

    def _map_of(self, repair: Repair) -> Callable[[torch.Tensor], torch.Tensor]:
        compiled = self.graphs.compiled
        assert compiled is not None
        run, parts = compiled.function(repaired_at_once, rows=self.rows_kind), parts_in_blocks(repair)

        def repaired(hidden: torch.Tensor) -> torch.Tensor:
            with one_index(self.stack):  # for its recompile limit: each map shape is compiled separately
                for other in self._learnt_from("map", *(part.shape for part in parts)):
                    run(self.states[:other], *parts)
                found: torch.Tensor = run(hidden, *parts)
            return found

        return repaired

    def _learnt_from(self, *kind: Any) -> tuple[int, ...]:
        """The row counts that this kind of pass must run with first; empty from the second call on."""
        if kind in self._learnt:
            return ()
        self._learnt.add(kind)
        return _LEARNT_FROM


def parts_in_blocks(repair: Repair) -> tuple[torch.Tensor, ...]:
    """The arguments of `repaired_at_once` after the state, with ranks and neurons zero-padded to whole blocks.

    As parameters: dynamo would make the sizes of other tensors dynamic once two maps differ in them.
    """
    down, up = _filled(repair.down, 0), _filled(repair.up, 1)
    parts: list[torch.Tensor] = [down, up, repair.bias]
    if repair.gate is not None and repair.lift is not None and repair.out is not None:
        back = torch.cat([up, _filled(repair.out, 1)], dim=1)
        parts = [down, back, repair.bias, _filled(repair.gate, 0), _filled(repair.lift, 0)]
    return tuple(nn.Parameter(part.contiguous(), requires_grad=False) for part in parts)


def _filled(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    missing = -matrix.shape[dim] % _COLUMNS
    return functional.pad(matrix, (0, missing) if dim == 1 else (0, 0, 0, missing))
