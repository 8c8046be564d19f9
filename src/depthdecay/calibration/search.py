"""The ladder search: which layer to drop next, by the KL of dropping it after repair.

A beam search over ladders. At every rung (depth), each ladder of the beam tries dropping its most promising layers; the
shallower model is repaired, and its KL to the full model is measured on texts that the maps were not fitted on. A
layer's promise is the KL when it was last tried, at first a heuristic: the ranking changes little, so a few trials per
rung find what trying all would. A text passes through all rungs, so ladders are compared by their sum of KL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from depthdecay.calibration.fidelity import Tally
from depthdecay.calibration.fit import FitSettings, Trace
from depthdecay.calibration.recording import Recording


@dataclass(frozen=True)
class Found:
    """A partial ladder: the layers dropped so far, and the KL at each depth."""

    order: tuple[int, ...] = ()
    kls: tuple[float, ...] = ()
    promise: dict[int, float] = field(default_factory=dict, compare=False)

    @property
    def last(self) -> float:
        return self.kls[-1] if self.kls else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"order": self.order, "kls": self.kls, "promise": {str(k): v for k, v in self.promise.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Found:
        promise = {int(layer): float(kl) for layer, kl in values["promise"].items()}
        return cls(tuple(map(int, values["order"])), tuple(map(float, values["kls"])), promise)


@dataclass
class Search:
    """The texts to search on, and the effort."""

    recording: Recording
    fitted_on: int  # batches that maps are fitted on; KL is measured on the others
    candidates: Sequence[int]
    lowest_depth: int
    settings: FitSettings | None
    layer_costs: Sequence[float]
    beam: int = 2
    width: int = 5  # layers that each ladder tries per rung
    first_width: int | None = None  # the same at the first rung; None: all layers
    seconds: float | None = None  # after this, only one ladder continues, with the most promising layer of each rung
    latest: float | None = None  # after this, nothing more is measured: the rest is ordered by promise alone
    progress: Callable[[str, int, int], None] = lambda message, done, total: None
    save: Callable[[list[Found]], None] = lambda beam: None

    def kl(self, trace: Trace) -> float:
        tally = Tally(self.recording.columns)
        for batch, states in list(zip(self.recording.batches, trace.states, strict=True))[self.fitted_on :]:
            tally.add(self.recording, batch, states[-1])
        return tally.kl

    def run(self, guess: Sequence[float], beam: Sequence[Found] = ()) -> Found:
        """Search down to the lowest depth, from the start or from the beam of an interrupted search.

        `guess` orders the layers at first; its scale does not matter.
        """
        started = time.monotonic()
        ends = math.inf if self.latest is None else started + self.latest
        num_layers = self.recording.stack.num_layers
        beam = list(beam) or [Found(promise={layer: float(guess[layer]) for layer in self.candidates})]
        traces = {found.order: self._trace(found.order) for found in beam}
        total = num_layers - self.lowest_depth
        while len(beam[0].order) < total:
            if beam[0].order and time.monotonic() > ends:
                return self._by_promise(beam[0], total)
            late = self.seconds is not None and time.monotonic() - started > self.seconds
            beam, traces = self._next_rung(beam[:1] if late else beam, traces, hasten=late, ends=ends)
            self.save(beam)
            best = beam[0]
            message = f"depth {num_layers - len(best.order)}: without layer {best.order[-1]}, KL {best.last:.4f}"
            self.progress(message, len(best.order), total)
        return beam[0]

    def _by_promise(self, found: Found, total: int) -> Found:
        """The rest of a ladder, ordered by what its layers cost when last tried."""
        while len(found.order) < total:
            layer = self._by_cost(found)[0]
            kl = found.last + found.promise[layer]
            found = Found((*found.order, layer), (*found.kls, kl), found.promise)
        return found

    def _by_cost(self, found: Found) -> list[int]:
        """The remaining layers, the most promising first."""
        left = (layer for layer in self.candidates if layer not in found.order)
        return sorted(left, key=lambda layer: (found.promise[layer] / self.layer_costs[layer], layer))

    def _trace(self, order: Sequence[int]) -> Trace:
        trace = Trace(self.recording)
        for layer in order:
            trace = trace.without([layer], self.settings, self.fitted_on)
        return trace

    def _next_rung(
        self, beam: list[Found], traces: dict[tuple[int, ...], Trace], hasten: bool, ends: float
    ) -> tuple[list[Found], dict[tuple[int, ...], Trace]]:
        """Try layers on every ladder of the beam, and keep the best ladders among those that drop different layers.

        Once the time is up, only one layer is tried.
        """
        tried: dict[frozenset[int], tuple[float, Found, Trace]] = {}
        for found in beam:
            left = self._by_cost(found)
            promise = dict(found.promise)
            trials: list[int] = []
            for layer in left[: 1 if hasten else self._width(found)]:
                if tried and time.monotonic() > ends:
                    break
                trials.append(layer)
                dropped = frozenset((*found.order, layer))
                if dropped in tried:
                    kl = tried[dropped][1].last
                    trace = tried[dropped][2]
                else:
                    trace = traces[found.order].without([layer], self.settings, self.fitted_on)
                    kl = self.kl(trace)
                promise[layer] = max(kl - found.last, 0.0)
                longer = Found((*found.order, layer), (*found.kls, kl), promise)
                score = self._score(longer)
                if dropped not in tried or score < tried[dropped][0]:
                    tried[dropped] = score, longer, trace
                # Traces hold the hidden states of a whole model, so only candidates for the beam are kept.
                ranked = sorted(tried.items(), key=lambda item: (item[1][0], item[1][1].order))
                tried = dict(ranked[: self.beam])
            if not found.order:
                _rescale(promise, found.promise, trials)
        return [found for _, found, _ in tried.values()], {found.order: trace for _, found, trace in tried.values()}

    def _score(self, found: Found) -> float:
        """KL summed over the rungs, each relative to what its layers save."""
        saved = [sum(self.layer_costs[layer] for layer in found.order[: rung + 1]) for rung in range(len(found.order))]
        mean = sum(self.layer_costs) / len(self.layer_costs)
        return sum(kl * mean * (rung + 1) / cost for rung, (kl, cost) in enumerate(zip(found.kls, saved, strict=True)))

    def _width(self, found: Found) -> int:
        if found.order:
            return self.width
        return len(self.candidates) if self.first_width is None else self.first_width


def _rescale(promise: dict[int, float], guess: dict[int, float], tried: Sequence[int]) -> None:
    """Scale the guesses for untried layers to KL, using those that were tried."""
    ratios = sorted(promise[layer] / guess[layer] for layer in tried if guess[layer] > 0)
    ratio = ratios[len(ratios) // 2] if ratios else 1.0
    for layer in promise:
        if layer not in tried:
            promise[layer] = guess[layer] * ratio
