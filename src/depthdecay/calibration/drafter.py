"""A plan to draft with in lossless mode: the depth at which that should be fastest, from what is measured here.

A draft may be wrong now and then, so other depths pay than for text that nobody checks: cheap ones. For every depth of
the ladder the share of right drafts is measured and the bytes of a draft step are counted; the window's formula then
says what lossless mode would gain. Maps are fitted, and drafts measured, behind the full model's keys and values, as
the first draft of a window is made; the later ones, behind other drafts, do a little worse.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from depthdecay.calibration.drafted_texts import Drafts, can_simulate_drafts
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings, Trace
from depthdecay.calibration.goal import Goal
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.result import Calibrated, with_figures
from depthdecay.calibration.size_and_shape import Shape
from depthdecay.calibration.time_budget import MAPS_SHARE, time_left
from depthdecay.model.costs import Costs
from depthdecay.model.repairs import Repairs
from depthdecay.plan.ladder import Ladder
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import ConstantSchedule
from depthdecay.speculative.drafter_choice import MOST_DEPTH
from depthdecay.speculative.expected_gain import LONGEST, Pace
from depthdecay.speculative.short_head import ShortHead

if TYPE_CHECKING:
    from depthdecay.calibration.run import Calibration

DEPTHS = 4  # that keep their maps: which one is fastest on a machine, the engine finds out
_LEAST_DEPTHS = 3  # that are fitted, below the first: how far down drafts are any good differs from model to model
LOWEST_SHARE = 0.18  # of the layers: how far down the ladder is searched


@dataclass(frozen=True)
class Gain:
    """What drafts at one depth should bring."""

    depth: int
    acceptance: float
    cost: float  # of a draft step, in full-depth steps
    window: int
    speedup: float


def expected(depth: int, acceptance: float, cost: float) -> Gain:
    """By the window with the highest rate; below 1 where drafting would not pay."""
    costs = Pace().costs(cost)
    window = max(costs.best(acceptance, LONGEST), 1)
    return Gain(depth, acceptance, cost, window, costs.rate(acceptance, window))


def make_drafter(run: Calibration) -> Calibrated:
    """The depths with the highest expected speed are kept, the plan stays at the best.

    Of the sizes of maps the two smallest are tried: larger ones are for drafts too dear.
    """
    tried: dict[FitSettings, list[Gain]] = {}
    maps: dict[FitSettings, Repairs] = {}
    for size in run.settings.maps[:2]:
        maps[size], tried[size] = _by_depth(run, size)
    size = max(tried, key=lambda size: max(found.speedup for found in tried[size]))
    kept = sorted(tried[size], key=lambda found: found.speedup, reverse=True)[:DEPTHS]
    repairs = Repairs({found.depth: maps[size].at_depth[found.depth] for found in kept}, run.vocabulary)
    lowest = min(found.depth for found in kept)
    plan = _at(run.ladder_plan, kept[0].depth, lowest)
    listed = [{**asdict(of), **asdict(found)} for of, all_found in tried.items() for found in all_found]
    made = with_figures(
        run, Goal(lossless=True), plan.num_layers / kept[0].depth, plan, repairs, size, Shape(kept[0].depth), listed
    )
    simulator = Simulator(_as_drafts(run.held_out))
    right = simulator.measure(_at(plan, kept[0].depth, kept[0].depth), repairs).agreement
    held_out = expected(kept[0].depth, right, kept[0].cost)
    run.say(f"drafts at {held_out.depth} layers: {held_out.acceptance:.1%} right on held-out text")
    made.figures["drafting"] = asdict(held_out)
    return made


def _by_depth(run: Calibration, size: FitSettings) -> tuple[Repairs, list[Gain]]:
    layers = run.stack.num_layers
    least = run.least_layers
    fit, select = _as_drafts(run.fit), _as_drafts(run.select)
    maps = _maps(run, fit, size)
    costs = Costs(run.stack, run.ladder_plan, maps)
    short = ShortHead.of(run.stack, run.vocabulary)
    spared = 0 if short is None else costs.head - short.nbytes
    simulator = Simulator(select)
    found = []
    for depth in range(max(least, 1), max(int(MOST_DEPTH * layers), least) + 1):
        if depth not in maps.at_depth:
            continue
        measured = simulator.measure(_at(run.ladder_plan, depth, depth), maps.only({depth}))
        found.append(expected(depth, measured.agreement, (costs.at(depth) - spared) / costs.full()))
        run.say(
            f"  drafts at {depth} layers cost {found[-1].cost:.2f} of a step, {found[-1].acceptance:.1%} right: "
            f"{found[-1].speedup:.2f}x"
        )
    return maps, found


def _as_drafts(recording: Recording) -> Recording:
    return Drafts(recording) if can_simulate_drafts(recording.stack) else recording


def _maps(run: Calibration, fit: Recording, size: FitSettings) -> Repairs:
    """Maps of every depth of the ladder; where time is short, of as many as the rest is enough for, some at least."""
    run.forget_traces()
    trace, at_depth = Trace(fit), {}
    left, order = time_left(), run.found.order
    started, done, step = time.monotonic(), 0, 1
    while done < len(order):
        trace = trace.without(order[done : done + step], size)
        done = len(trace.dropped)
        depth = run.stack.num_layers - done
        at_depth[depth] = trace.repairs
        run.say(f"fitting maps for drafts at {depth} layers{left(done, len(order))}")
        rest = len(order) - done
        each = (time.monotonic() - started) / len(at_depth)
        fewest = max(1, 1 + _LEAST_DEPTHS - len(at_depth))
        step = -(-rest // max(fewest, run.time.affordable(rest, each, by=MAPS_SHARE)))
    return Repairs(at_depth)


def _at(ladder_plan: Plan, depth: int, lowest: int) -> Plan:
    """The ladder down to the lowest depth, with every token at one depth."""
    layers = ladder_plan.num_layers
    ladder = Ladder(layers, ladder_plan.ladder.drop_order[: layers - lowest])
    return replace(ladder_plan, ladder=ladder, schedule=ConstantSchedule(layers, depth), rule="constant")
