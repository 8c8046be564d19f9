"""Which drafter is next: the candidate depths, and the one with the highest expected gain."""

from __future__ import annotations

from depthdecay.model.costs import Costs
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.speculative.expected_gain import LEARNED, Pace, Share, StepCosts, TrackRecord
from depthdecay.speculative.head_text import PlacedHead
from depthdecay.speculative.short_head import ShortHead

MOST_DEPTH = 0.85  # of the layers: deeper drafts cost nearly as much as they save
# Judged drafts after which a depth counts as known, and windows after which another one is tried again.
ENOUGH, AGAIN = 24, 64
# How the share of rejected drafts grows with the number of dropped layers, for depths that have not been tried.
GROWTH = 1.5


class Drafting:
    """What an engine knows about drafting: a record for every candidate depth, and one for prompt lookup."""

    def __init__(
        self, num_layers: int, shares: dict[int, float], pace: Pace | None = None, head: PlacedHead | None = None
    ) -> None:
        """`shares`: the bytes that a draft step at each depth reads, relative to a full-depth step.

        `head`: the learned head; `shares` then has an entry for it.
        """
        self.num_layers = num_layers
        self.pace = Pace() if pace is None else pace
        self.shares = shares
        self.by_depth = {
            depth: TrackRecord(StepCosts(share), depth=depth, layers=depth) for depth, share in shares.items()
        }
        if head is not None:
            self.by_depth[LEARNED].layers = head.head.shape.first_layers
            self.by_depth[LEARNED].prior = head.head.right
        self.lookup = TrackRecord(StepCosts(0.0), prior=0.6)
        self.finds = Share.at_first(0.5)  # share of windows in which lookup found something
        self._windows = 0
        self._chosen: TrackRecord | None = None

    @property
    def pauses(self) -> bool:
        """Whether the window after the chosen one will draft nothing either."""
        return self._chosen is not None and self._chosen.is_pausing

    def found(self, position: int) -> TrackRecord:
        self.lookup.costs = self.pace.costs(0.0)
        self.lookup.position = position
        return self.lookup

    def choose(self, position: int) -> TrackRecord:
        """The drafter with the highest rate. Promising untried ones come first; now and then another is retried."""
        self._chosen = self._choose(position)
        return self._chosen

    def _choose(self, position: int) -> TrackRecord:
        for depth, drafter in self.by_depth.items():
            drafter.position = position
            drafter.costs = self.pace.costs(self.shares[depth], depth)
        known = [drafter for drafter in self.by_depth.values() if drafter.judged >= ENOUGH]
        if not known:  # the learned head first; else continue with a depth already begun, or start in the middle
            depths = sorted(self.by_depth)
            if LEARNED in self.by_depth:
                return self.by_depth[LEARNED]
            begun = [drafter for drafter in self.by_depth.values() if drafter.judged > 0]
            return begun[0] if begun else self.by_depth[depths[len(depths) // 2]]
        best = max(known, key=lambda drafter: (drafter.best_rate, drafter.depth))
        for drafter in self.by_depth.values():
            if drafter not in known and self._guess(drafter, best) > best.best_rate:
                return drafter
        self._windows += 1
        if self._windows % AGAIN == 0 and len(known) > 1 and best.best_rate > 1:
            return min((drafter for drafter in known if drafter is not best), key=lambda drafter: drafter.judged)
        return best

    def _guess(self, drafter: TrackRecord, known: TrackRecord) -> float:
        """The rate of an untried depth, extrapolated from a known one: more dropped layers, more rejected drafts."""
        if LEARNED in (drafter.depth, known.depth):
            return drafter.best_rate
        ratio = (self.num_layers - drafter.depth) / max(1, self.num_layers - known.depth)
        p = min(max(1 - (1 - known.acceptance) * ratio**GROWTH, 0.0), 0.998)
        return drafter.costs.rate(p, drafter.costs.best(p, drafter.longest))


def draft_depths(plan: Plan, repairs: Repairs) -> list[int]:
    """Depths worth drafting at: up to four of those with repair maps, else the plan's final depth."""
    layers = plan.num_layers
    mapped = sorted(depth for depth in repairs.at_depth if depth <= MOST_DEPTH * layers)
    if not mapped:
        return [plan.schedule.final_depth]
    return sorted({mapped[place * (len(mapped) - 1) // 3] for place in range(4)})


def drafting_for(
    stack: LayerStack, plan: Plan, repairs: Repairs, short_head: ShortHead | None, head: PlacedHead | None = None
) -> Drafting:
    """The initial state of an engine: candidate depths, and the share of a full pass's bytes that each reads."""
    costs = Costs(stack, plan, repairs)
    spared = 0 if short_head is None else costs.head - short_head.nbytes
    shares = {depth: (costs.at(depth) - spared) / costs.full() for depth in draft_depths(plan, repairs)}
    if head is not None:
        first = sum(stack.layer_bytes()[: head.head.shape.first_layers])
        shares[LEARNED] = (head.nbytes + first) / costs.full()
        if not repairs.at_depth:  # uncalibrated layers cannot compete with it
            shares = {LEARNED: shares[LEARNED]}
    return Drafting(stack.num_layers, shares, head=head)


def drafting_plan(num_layers: int) -> Plan:
    """The plan to draft with if nothing was calibrated: three quarters of the layers, dropped from the middle out."""
    core = min(2, (num_layers - 1) // 2)
    least = max(2 * core, 1)
    return Plan.constant(num_layers, max(least, -(-num_layers * 3 // 4)), core_head=core, core_tail=core)
