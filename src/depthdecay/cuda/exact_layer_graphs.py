"""Graphs of single layers in which a row's bits are its own: neither its neighbours nor their number change them.

Every product runs by kernels whose order of sums does not know how many rows there are, every reduction by one binary
for all numbers of rows, and attention in parts that are counted from the row's own first position. So a token has the
same bits alone, in company, in a verification, and within a prompt that is read in pieces of any size.
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

# Numbers of rows that no graph has. Dynamo compiles the first number for itself, and with the second for any number:
# so each piece of a layer has met two before its graphs are captured, and all of these run the same binary.
_LEARNT_FROM = (3, 5)
_COLUMNS = 128  # that maps are filled up to, as the product kernel reads them


class ExactLayerGraphs(LayerGraphs):
    """Never of plain layers: where compiled ones fail, a pass raises `NotCapturable`."""

    exact = True
    rows_kind = "any"

    def __init__(self, *args: Any) -> None:
        self.said: dict[int, torch.Tensor] = {}  # by number of rows, where their logits are written
        self._learnt: set[tuple[Any, ...]] = set()
        super().__init__(*args)

    def bucket(self, rows: int) -> int:
        """Never one row: torch compiles a size of one for itself."""
        return max(2, bucket_of(rows))

    def capture_layers(self) -> None:
        super().capture_layers()
        with torch.no_grad(), self._on_device(), self.stack.exclusive():
            for rows in self.buckets:
                self._tail_graph(rows)
            for maps in self.maps.values():
                for repaired in maps.values():
                    repaired(self.states[:2])  # compiled now, and captured when a step first needs it

    def _behind_layers(self, wanted: int) -> torch.Tensor:
        """Only the rows wanted meet the output matrix: these kernels take longer by every 16 rows."""
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
        """The last norm and the output matrix for the first so many rows of those wanted."""
        states = self.states.index_select(0, self.last[:rows])
        compiled = self.graphs.compiled
        assert compiled is not None
        with one_index(self.stack), compiled.beside(self.stack, self.rows_kind):  # for its bound on compilations
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
            with one_index(self.stack):  # as above: there is a compilation for each shape of maps
                for other in self._learnt_from("map", *(part.shape for part in parts)):
                    run(self.states[:other], *parts)
                found: torch.Tensor = run(hidden, *parts)
            return found

        return repaired

    def _learnt_from(self, *kind: Any) -> tuple[int, ...]:
        """Numbers of rows that this kind of pass has to run with before any other; nothing once it was asked."""
        if kind in self._learnt:
            return ()
        self._learnt.add(kind)
        return _LEARNT_FROM


def parts_in_blocks(repair: Repair) -> tuple[torch.Tensor, ...]:
    """What `repaired_at_once` takes behind the state, ranks and neurons filled up with zeros to whole blocks.

    As parameters: dynamo would take the sizes of other tensors for free once two maps differ in them.
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
