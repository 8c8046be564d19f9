"""A plan to draft with in lossless mode, at the depth with the highest expected speed-up.

Drafts are verified, so they may be wrong now and then, and shallower depths pay off than for decay. For every depth of
the ladder, draft accuracy is measured and the bytes of a draft step are counted; the window formula then gives the
expected speed-up. Maps are fitted, and drafts measured, on top of the full model's KV cache, as for the first draft of
a window; later ones, which follow other drafts, do a little worse.
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
from depthdecay.speculative.expected_gain import LONGEST, MARGIN, Pace
from depthdecay.speculative.short_head import ShortHead

if TYPE_CHECKING:
    from depthdecay.calibration.run import Calibration

DEPTHS = 4  # depths that keep their maps; the engine finds out which is fastest on its machine
_LEAST_DEPTHS = 3  # fitted below the first at least: how shallow useful drafts can be depends on the model
LOWEST_SHARE = 0.18  # of the layers: how far down the ladder is searched


@dataclass(frozen=True)
class Gain:
    """The expected gain of drafting at one depth."""

    depth: int
    acceptance: float
    cost: float  # of a draft step, in full-depth steps
    window: int
    speedup: float

    @property
    def pays(self) -> bool:
        """Whether an engine would draft with it, rather than leave that to prompt lookup."""
        return self.speedup > MARGIN


def expected(depth: int, acceptance: float, cost: float) -> Gain:
    """The gain with the best window, of one draft at least; a speed-up below 1 means that drafting is slower."""
    costs = Pace().costs(cost)
    window = max(costs.best(acceptance, LONGEST), 1)
    return Gain(depth, acceptance, cost, window, costs.rate(acceptance, window))


def make_drafter(run: Calibration) -> Calibrated:
    """Keeps the depths with the highest expected speed-up; the plan itself uses the best one.

    Only the two smallest map sizes are tried: larger ones are too expensive for drafts.
    """
    tried: dict[FitSettings, list[Gain]] = {}
    maps: dict[FitSettings, Repairs] = {}
    for size in run.settings.maps[:2]:
        if tried and run.time.is_over(MAPS_SHARE):
            break
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
    run.say(f"drafts at {held_out.depth} layers: {held_out.acceptance:.1%} accepted on held-out text")
    made.figures["drafting"] = {**asdict(held_out), "pays": held_out.pays}
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
            f"  drafts at {depth} layers cost {found[-1].cost:.2f} of a step, {found[-1].acceptance:.1%} accepted: "
            f"{found[-1].speedup:.2f}x"
        )
    return maps, found


def _as_drafts(recording: Recording) -> Recording:
    return Drafts(recording) if can_simulate_drafts(recording.stack) else recording


def _maps(run: Calibration, fit: Recording, size: FitSettings) -> Repairs:
    """Maps for every depth of the ladder; if time is short, for as many as there is time for, but at least a few.

    The first depth, which is too deep for drafts, shows how long each takes; without any time left, it is skipped.
    """
    run.forget_traces()
    trace, at_depth = Trace(fit), {}
    left, order, layers = time_left(), run.found.order, run.stack.num_layers
    started, done = time.monotonic(), 0
    step = -(-len(order) // _LEAST_DEPTHS) if run.time.is_over(MAPS_SHARE) else 1
    while done < len(order):
        trace = trace.without(order[done : done + step], size)
        done = len(trace.dropped)
        depth = layers - done
        at_depth[depth] = trace.repairs
        run.say(f"fitting maps for drafts at {depth} layers{left(done, len(order))}")
        rest = len(order) - done
        each = (time.monotonic() - started) / len(at_depth)
        fewest = max(1, _LEAST_DEPTHS - sum(depth < layers - 1 for depth in at_depth))
        step = -(-rest // max(fewest, run.time.affordable(rest, each, by=MAPS_SHARE)))
    return Repairs(at_depth)


def _at(ladder_plan: Plan, depth: int, lowest: int) -> Plan:
    """A plan with the ladder down to `lowest`, and every token at one depth."""
    layers = ladder_plan.num_layers
    ladder = Ladder(layers, ladder_plan.ladder.drop_order[: layers - lowest])
    return replace(ladder_plan, ladder=ladder, schedule=ConstantSchedule(layers, depth), rule="constant")
