"""Chooses the shape of a decay and the size of its maps with the lowest measured KL at a speed-up."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from depthdecay.calibration.fit import FitSettings
from depthdecay.errors import DepthDecayError

if TYPE_CHECKING:
    from depthdecay.calibration.run import Calibration

_AS_GOOD = 1.05  # times the best KL: a difference that validation texts cannot resolve


@dataclass(frozen=True)
class Shape:
    """A decay apart from its speed: the depth where it ends, and the share of the horizon before it begins."""

    floor: int
    warmup: float = 0.0


def choose_shape(run: Calibration, speedup: float, settings: FitSettings) -> tuple[Shape, list[dict[str, Any]]]:
    """The depth that the decay ends at, and how long it waits before it begins.

    KL grows faster than the number of dropped layers, so a decay that stops at a greater depth costs less than one that
    drops many layers late; but later tokens are easier. Which of the two matters more is measured.
    """
    tried: list[dict[str, Any]] = []

    def attempt(shape: Shape) -> float:
        try:
            kl = run.loss_at(speedup, settings, shape)
        except DepthDecayError:  # not reachable: the floor is too high, or the ladder too short
            return math.inf
        tried.append({"min_layers": shape.floor, "warmup": shape.warmup, "kl": kl})
        run.say(f"  KL {kl:.5f} at {speedup:g}x down to {shape.floor} layers, warm-up {shape.warmup:g}")
        return kl

    losses: dict[int, float] = {}
    worse = 0
    for floor in range(int(run.stack.num_layers / speedup), run.least_layers - 1, -1):
        best = min(losses.values(), default=math.inf)
        losses[floor] = attempt(Shape(floor))
        worse = worse + 1 if losses[floor] >= best and math.isfinite(best) else 0
        if worse == 2:  # from here on, only more layers are dropped
            break
        if run.time.is_over() and math.isfinite(losses[floor]):
            break
    best = min(losses.values(), default=math.inf)
    if not math.isfinite(best):
        run.plan_at(speedup, settings, Shape(run.least_layers))  # raises the reason
    # Longer answers continue at the floor, where nothing was measured: among equals, take the highest.
    floor = max(floor for floor, kl in losses.items() if kl <= _AS_GOOD * best)
    best, shape = losses[floor], Shape(floor)
    for warmup in () if run.time.is_over() else run.settings.warmups:
        kl = attempt(replace(shape, warmup=warmup))
        if kl < best:
            best, shape = kl, replace(shape, warmup=warmup)
    return shape, tried


def choose(run: Calibration, speedup: float) -> tuple[FitSettings, Shape, list[dict[str, Any]]]:
    """The shape of the decay, the map size and the ridge with the lowest KL at this speed-up, on validation texts.

    The best map size hardly depends on the speed-up, so it is chosen once for all plans of a run.
    """
    if run.size is not None:
        shape, tried = choose_shape(run, speedup, run.size)
        return run.size, shape, tried
    first = run.settings.maps[0]
    shape, tried = choose_shape(run, speedup, first)
    if run.time.is_over():
        run.size = first
        return first, shape, tried
    best: dict[FitSettings, float] = {}

    def attempt(settings: FitSettings) -> None:
        if settings in best:
            return
        try:
            kl = run.loss_at(speedup, settings, shape)
        except DepthDecayError:
            # Larger maps cost more, so one more layer may have to be dropped than this floor allows.
            deeper = replace(shape, floor=max(shape.floor - 1, run.least_layers))
            try:
                kl = run.loss_at(speedup, settings, deeper)
            except DepthDecayError:
                return
        best[settings] = kl
        tried.append({**asdict(settings), "kl": kl})
        run.say(f"  KL {kl:.5f} with rank {settings.rank}, {settings.neurons} neurons, ridge {settings.ridge:g}")

    for settings in run.settings.maps:
        if best and run.time.is_over():
            break
        attempt(settings)
    for ridge in () if run.time.is_over() else run.settings.ridges:
        attempt(replace(min(best, key=lambda size: best[size]), ridge=ridge))
    run.size = min(best, key=lambda size: best[size])
    if run.size != first:
        shape, more = choose_shape(run, speedup, run.size)
        tried += more
    return run.size, shape, tried
