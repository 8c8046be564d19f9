"""Calibration from prompts to a plan: record, search the ladder, fit repairs, choose the fastest plan within budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from depthdecay.calibration.continuations import Continuation
from depthdecay.calibration.drafter import make_drafter
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings, Trace, fit_plan
from depthdecay.calibration.goal import Goal
from depthdecay.calibration.influence import block_influence, unrepaired_share
from depthdecay.calibration.kept_answers import OpensEngine, RecordedTexts
from depthdecay.calibration.learned_repairs import learn_repairs
from depthdecay.calibration.own_questions import Say
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.result import Calibrated, with_figures
from depthdecay.calibration.search import Found, Search
from depthdecay.calibration.settings import CalibrationSettings
from depthdecay.calibration.size_and_shape import Shape, choose, choose_shape
from depthdecay.calibration.time_budget import MAPS_SHARE, SEARCH_SHARE, TimeBudget, time_left
from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs, reached_depths
from depthdecay.model.speedup import plan_at_speedup
from depthdecay.plan.identity import identity
from depthdecay.plan.ladder import Ladder, runs_of
from depthdecay.plan.plan import Plan


class Calibration:
    """One model on one set of prompts. Each stage is kept, so that an interrupted run can resume."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Any] | None,
        folder: Path,
        settings: CalibrationSettings | None = None,
        *,
        name: str = "the model",
        time_budget: TimeBudget | None = None,
        opens: OpensEngine = Engine,
        say: Say = lambda message: None,
    ) -> None:
        """`time_budget`: for everything; by default the settings' minutes, starting now.

        `opens`: makes the engines that write text, such as quantized ones where those are faster and write the same.
        """
        self.started = time.monotonic()
        self.stack = LayerStack.of(model)
        self.name = name
        self.identity = identity(self.stack.model)
        self.say = say
        settings = settings or CalibrationSettings.for_device(self.stack.model.device)
        texts = RecordedTexts(model, tokenizer, prompts, folder, settings, say, time_budget, opens)
        self.opens = opens
        self.settings, self.work, self.vocabulary = texts.settings, texts.work, texts.vocabulary
        self.fit, self.select = texts.fit, texts.select
        self.held_out, self.elsewhere = texts.held_out, texts.elsewhere
        self.fit_texts, self.held_out_texts = texts.fit_texts, texts.held_out_texts
        self.spare_prompts = texts.spare_prompts
        self.influence = block_influence(self.select)
        self.time = texts.time
        self.found = self._search(texts.fit_seconds)
        self.fit = self._fit_in_time(texts.fit_seconds)
        self.ladder_plan = self._ladder_plan()
        self._traces: dict[FitSettings, tuple[Trace, dict[int, tuple[Repair, ...]]]] = {}
        self.size: FitSettings | None = None  # once chosen
        self.tokenizer = tokenizer
        self.plans_left = 1  # still to be made, including the next one: they share the time
        self.own_texts: list[Continuation] | None = None  # further texts to train maps on, once written

    def _search(self, fit_seconds: float) -> Found:
        settings, layers = self.settings, self.stack.num_layers
        guess = self._first_guess()
        few = max(1, -(-settings.search_prompts // settings.rows))
        # At least one layer is tried, which is a pass over all of them.
        few = self.time.affordable(few, fit_seconds / len(self.fit.batches), by=SEARCH_SHARE)
        batches = self.fit.batches[:: max(1, len(self.fit.batches) // few)][:few]
        recording = Recording(self.stack, batches + self.select.batches, max(self.fit.columns, self.select.columns))
        left = time_left(lambda: self.time.left_of(SEARCH_SHARE))

        def told(message: str, done: int, total: int) -> None:
            self.say(f"searching the ladder, {message}{left(done, total)}")

        # Cut short half-way: from then on, one trial per step.
        seconds = self.time.left_of(SEARCH_SHARE) / 2 if self.time.is_bounded else 60 * settings.minutes
        kept = self.work.read("search")
        search = Search(
            recording,
            fitted_on=len(batches),
            candidates=range(1, layers - 1),
            lowest_depth=max(2, int(layers * settings.lowest_share)),
            settings=settings.maps[0],
            layer_costs=[float(size) for size in self.stack.layer_bytes()],
            beam=settings.beam,
            width=settings.width,
            first_width=settings.first_width,
            seconds=seconds,
            latest=self.time.left_of(SEARCH_SHARE) if self.time.is_bounded else None,
            progress=told,
            save=lambda beam: self.work.write("search", [found.to_dict() for found in beam]),
        )
        return search.run(guess, [Found.from_dict(values) for values in kept or ()])

    def _first_guess(self) -> list[float]:
        """How cheap each layer looks: by what a map would not recover or, if that takes too long, by its influence."""
        self.say("looking for layers to drop …")
        layers, size = self.stack.num_layers, self.settings.maps[0]
        started = time.monotonic()
        shares = [unrepaired_share(self.select, 0, size)]
        if self.time.affordable(layers, time.monotonic() - started, by=SEARCH_SHARE) < layers:
            return self.influence
        return shares + [unrepaired_share(self.select, layer, size) for layer in range(1, layers)]

    def _fit_in_time(self, seconds: float) -> Recording:
        """The texts to fit on; fewer, of all lengths, if fitting maps for every depth would take too long."""
        batches, columns = self.fit.batches, self.fit.columns
        each = len(self.found.order) * _PASSES_A_RUNG * seconds / len(batches)
        count = self.time.affordable(len(batches), each)
        if count == len(batches):
            return self.fit
        self.say(f"there is time to fit maps on {count} of {len(batches)} batches of texts")
        return Recording(self.stack, batches[:: len(batches) // count][:count], columns)

    @property
    def least_layers(self) -> int:
        """Where the ladder ends."""
        return self.stack.num_layers - len(self.found.order)

    def _ladder_plan(self) -> Plan:
        plan = Plan.for_speedup(
            self.stack.num_layers, 1, over_tokens=self.settings.new_tokens, drop_order=self.found.order
        )
        return plan.with_model(self.identity)

    def constant_maps(self, settings: FitSettings, lowest: int) -> Repairs:
        """Maps for every depth down to the lowest, each fitted as if all positions ran at that depth."""
        layers = self.stack.num_layers
        if settings not in self._traces:
            self.forget_traces()
        trace, maps = self._traces.get(settings, (Trace(self.fit), {}))
        left, wanted = time_left(), self.found.order[len(maps) : layers - lowest]
        for done, layer in enumerate(wanted, start=1):
            trace = trace.without([layer], settings)
            depth = layers - len(trace.dropped)
            maps[depth] = trace.repairs
            self.say(f"fitting maps at constant depth {depth}{left(done, len(wanted))}")
        self._traces[settings] = trace, maps
        return Repairs(maps)

    def forget_traces(self) -> None:
        """Free the traces, which hold the hidden states of all texts at all layers."""
        self._traces.clear()

    def plan_at(self, speedup: float, settings: FitSettings, shape: Shape) -> Plan:
        """The ladder with the decay that reaches a speed-up, including maps of this size."""
        sizes = _sizes_of_maps(self.ladder_plan, self.stack, settings)
        tokens = self.settings.new_tokens
        return plan_at_speedup(
            self.ladder_plan,
            self.stack,
            round(speedup, 4),
            tokens,
            sizes,
            warmup_tokens=int(shape.warmup * tokens),
            min_layers=shape.floor,
        )

    def loss_at(self, speedup: float, settings: FitSettings, shape: Shape) -> float:
        """KL on the validation texts, with maps fitted at constant depth."""
        plan = self.plan_at(speedup, settings, shape)
        visited = reached_depths(plan)
        maps = self.constant_maps(settings, min(visited, default=plan.num_layers))
        return Simulator(self.select).measure(plan, maps.only(set(visited))).kl

    def repaired(self, speedup: float, settings: FitSettings, shape: Shape) -> tuple[Plan, Repairs]:
        """A plan for a speed-up with its maps: fitted at constant depth, then again on the positions at each depth.

        Two depths below the plan's lowest have maps too, if there is time, so that it can be re-scheduled; there its
        ladder ends.
        """
        plan = self.plan_at(speedup, settings, shape)
        visited = reached_depths(plan)
        spare = 0 if self.time.is_over() else 2
        lowest = max(plan.ladder.min_layers, min(visited, default=plan.num_layers) - spare)
        constant = self.constant_maps(settings, lowest)
        self.say(f"fitting maps for {speedup:g}x, rank {settings.rank} and {settings.neurons} neurons per layer")
        fitted = fit_plan(self.fit, plan, replace(settings, ridge=10 * settings.ridge), constant)
        maps = {depth: maps for depth, maps in constant.at_depth.items() if depth >= lowest} | dict(fitted.at_depth)
        ladder = Ladder(plan.num_layers, plan.ladder.drop_order[: plan.num_layers - lowest])
        return replace(plan, ladder=ladder), Repairs(maps, self.vocabulary)

    def make(self, goal: Goal) -> Calibrated:
        """The fastest plan whose held-out loss, with its confidence bound, is inside the budget."""
        if goal.lossless:
            return make_drafter(self)
        if goal.speedup is not None:
            return self._finish(goal, goal.speedup, *choose(self, goal.speedup))
        assert goal.budget is not None
        speedup = self._fastest_guess(goal)
        settings, shape, tried = choose(self, speedup)
        nearest: Calibrated | None = None
        while speedup >= _LEAST_SPEEDUP:
            made = self._finish(goal, speedup, settings, shape, tried)
            if made.figures["promise"]["bound"] <= goal.budget:
                return made
            nearest = made
            speedup = 1 + (speedup - 1) * (_STEP_IN_HASTE if self.time.is_over() else _STEP)
            shape, more = choose_shape(self, speedup, settings)
            tried += more
        words = "no plan was found"
        if nearest is not None:
            promise = nearest.figures["promise"]
            words = (
                f"the nearest is {promise['layer_speedup']:.3f}x at {promise['held_out']:.4f} "
                f"(at most {promise['bound']:.4f} with 95% confidence)"
            )
        raise DepthDecayError(
            f"no plan for this model keeps the {goal.measure} within {goal.budget:g} on held-out text; {words}"
        )

    def _fastest_guess(self, goal: Goal) -> float:
        """A speed-up to start from: bisection on validation texts, with maps of the first size at constant depth."""
        assert goal.budget is not None
        settings = self.size or self.settings.maps[0]
        layers = self.stack.num_layers
        started = time.monotonic()
        self.constant_maps(settings, layers - 1)
        each = time.monotonic() - started
        # As far down the ladder as there is time to fit maps: what is not measured cannot keep a budget.
        floor = layers - self.time.affordable(layers - self.least_layers, each, by=MAPS_SHARE)
        maps = self.constant_maps(settings, floor)
        low, high = 1.0, self.fastest(settings, floor)
        simulator = Simulator(self.select)
        for _ in range(7):
            middle = (low + high) / 2
            plan = self.plan_at(middle, settings, Shape(floor))
            loss = goal.loss(simulator.measure(plan, maps.only(set(reached_depths(plan)))))
            self.say(f"at {middle:.3f}x the loss is {loss:.4f}")
            low, high = (middle, high) if loss <= goal.budget else (low, middle)
        return max(low, _LEAST_SPEEDUP)

    def fastest(self, settings: FitSettings, floor: int) -> float:
        """A speed-up just below the most that the ladder can reach down to a depth."""
        low, high = 1.0, 1 / self.settings.lowest_share
        for _ in range(12):
            middle = (low + high) / 2
            try:
                self.plan_at(middle, settings, Shape(floor))
                low = middle
            except DepthDecayError:
                high = middle
        return low

    def _finish(
        self, goal: Goal, speedup: float, settings: FitSettings, shape: Shape, tried: list[dict[str, Any]]
    ) -> Calibrated:
        plan, repairs = self.repaired(speedup, settings, shape)
        learned = None
        if self.settings.learning_minutes:
            self.forget_traces()
            repairs, learned = learn_repairs(self, plan, repairs)
        return with_figures(self, goal, speedup, plan, repairs, settings, shape, tried, learned)


_LEAST_SPEEDUP = 1.01
# What is left of the gain at the next try, if a plan misses its budget; once the time is up, fewer tries are made.
_STEP, _STEP_IN_HASTE = 0.85, 0.5
# The time for one depth of the ladder, in passes over the texts to fit on: maps at constant depth, then those of a plan
# or of drafts, each with half of the layers to run and its own sums.
_PASSES_A_RUNG = 3


def _sizes_of_maps(plan: Plan, stack: LayerStack, settings: FitSettings) -> Repairs:
    """Placeholders in the shapes of maps with these settings, so that costs are known before anything is fitted."""
    hidden = stack.hidden_size
    rank = min(settings.rank, hidden)
    at_depth = {}
    for depth in range(plan.ladder.min_layers, plan.num_layers):
        maps = []
        for start, end in runs_of(plan.dropped(depth)):
            known = [stack.gated_mlp(layer) for layer in range(start, end)]
            count = sum(min(settings.neurons, m.gate.shape[0]) for m in known if m) if all(known) else 0
            shapes = [(rank, hidden), (hidden, rank), (hidden,)]
            shapes += [(count, hidden), (count, hidden), (hidden, count)] if count else []
            maps.append(Repair(start, end, *(torch.empty(shape, device="meta") for shape in shapes)))
        at_depth[depth] = tuple(maps)
    return Repairs(at_depth)
