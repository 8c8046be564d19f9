"""Calibration from prompts to a plan: record, search the ladder, repair it, choose the fastest plan within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from depthdecay.calibration.continuations import Continuation, Split, continue_prompts, split_prompts, variety
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings, Trace, fit_plan
from depthdecay.calibration.goal import CONFIDENCE, Goal, upper_bound
from depthdecay.calibration.influence import block_influence, unrepaired_share
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.search import Found, Search
from depthdecay.calibration.settings import CalibrationSettings
from depthdecay.calibration.work_folder import WorkFolder
from depthdecay.engine.engine import Engine
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.model.costs import Costs
from depthdecay.model.devices import free_bytes
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import REPAIRS_FILE, Repair, Repairs, reached_depths
from depthdecay.model.speedup import plan_at_speedup
from depthdecay.plan.file import PLAN_FILE
from depthdecay.plan.identity import identity
from depthdecay.plan.ladder import Ladder, runs_of
from depthdecay.plan.plan import Plan

Say = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """A decay apart from its speed: where it ends, and after which share of the horizon it begins."""

    floor: int
    warmup: float = 0.0


@dataclass
class Calibrated:
    """A plan that keeps its promise on held-out text, its maps, and the figures behind it."""

    plan: Plan
    repairs: Repairs
    figures: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Repairs first, and no older plan beside them: a plan that is there belongs to its maps."""
        (folder / PLAN_FILE).unlink(missing_ok=True)
        self.repairs.save(folder / REPAIRS_FILE)
        return self.plan.save(folder)


class Calibration:
    """One model on one set of prompts. The parts are made in order, each kept for an interrupted run."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompts: Sequence[Any],
        folder: Path,
        settings: CalibrationSettings | None = None,
        *,
        name: str = "the model",
        say: Say = lambda message: None,
    ) -> None:
        self.started = time.monotonic()
        self.stack = LayerStack.of(model)
        self.model = model
        self.name = name
        self.identity = identity(self.stack.model)
        device = self.stack.model.device
        self.say = say
        self.settings = settings or CalibrationSettings.for_device(device)
        split = self._split(prompts, tokenizer)
        others = self._others(prompts, tokenizer, len(split.calibration))
        inputs = {
            "model": self.identity.to_dict(),
            "numbers": f"{self.stack.model.dtype} {device.type}",
            "settings": repr(self.settings),
            "prompts": split.calibration,
            "held_out": split.held_out,
            "others": others,
        }
        self.work = WorkFolder(folder, inputs)
        split = self._that_fit(split, len(others), device)
        texts = self._texts([*split.calibration, *split.held_out, *others])
        again = self._answers_again(split.calibration[: self._fitted(len(split.calibration))], len(texts), device)
        own, rest = texts[: len(split.calibration)], texts[len(split.calibration) :]
        held_out, more = rest[: len(split.held_out)], rest[len(split.held_out) :]
        self.settings = self._within_texts([*own, *held_out])
        # Of the other kinds some are held out, the rest are fitted on. Choices go by the user's own texts alone: other
        # kinds lose several times as much, and would outvote them.
        elsewhere, more = more[: len(more) // 6], more[len(more) // 6 :]
        fit = self._fitted(len(own))
        seen = {token for text in (*own, *again, *more) for token in (*text.prompt, *text.tokens)}
        self.vocabulary = torch.tensor(sorted(seen))
        self.fit = self._record([*own[:fit], *again, *more], "reading calibration texts")
        self.select = self._record(own[fit:], "reading texts to choose by")
        self.held_out = self._record(held_out, "reading held-out texts")
        self.elsewhere = self._record(elsewhere, "reading other held-out texts") if elsewhere else None
        self.influence = block_influence(self.select)
        self.found = self._search()
        self.ladder_plan = self._ladder_plan()
        self._traces: dict[FitSettings, tuple[Trace, dict[int, tuple[Repair, ...]]]] = {}
        self._size: FitSettings | None = None  # once chosen

    def _fitted(self, count: int) -> int:
        """How many of so many texts are fitted on; the others are chosen by."""
        wanted = self.settings.fit_prompts + self.settings.select_prompts
        return min(max(4, self.settings.fit_prompts * count // wanted), count)

    def _others(self, prompts: Sequence[Any], tokenizer: Any, own: int) -> list[list[int]]:
        """Prompts of other kinds than the user's: maps that have seen one kind of text only ruin all others."""
        count = int(self.settings.variety * self._fitted(own))
        return variety(count, tokenizer, besides=prompts, **self._bounds())

    def _that_fit(self, split: Split, others: int, device: torch.device) -> Split:
        """Fewer prompts where the states of so many would not fit the memory: twice, since maps are tried on a copy.

        What was decided once is kept, so that an interrupted run goes on with the same prompts.
        """
        most = self._room_for_texts(device) - len(split.held_out) - others
        kept = self.work.read("prompts")
        most = min(most, len(split.calibration)) if kept is None else kept
        if most < min(8, len(split.calibration)):
            raise ArgumentError(
                f"the states of {len(split.held_out)} texts of {self.settings.new_tokens} tokens leave no memory to "
                "calibrate in; ask for fewer new_tokens or held_out_prompts",
                *("new_tokens", "held_out_prompts"),
            )
        self.work.write("prompts", most)
        if most == len(split.calibration):
            return split
        self.say(f"the memory holds the states of {most} prompts, so fewer than {len(split.calibration)} are used")
        return replace(split, calibration=split.calibration[:most])

    def _room_for_texts(self, device: torch.device) -> int:
        """How many texts' states the memory holds."""
        size = torch.empty((), dtype=self.stack.model.dtype).element_size()
        states = self.settings.new_tokens * self.stack.hidden_size * (self.stack.num_layers + 1) * size
        return int(0.7 * free_bytes(device) / (2.5 * states))

    def _within_texts(self, texts: Sequence[Continuation]) -> CalibrationSettings:
        """A horizon that texts reach: what few of them come to cannot be measured, so it is not promised."""
        lengths = sorted((len(text.tokens) for text in texts), reverse=True)
        reached = max(lengths[len(lengths) // 4], 2)
        if reached >= self.settings.new_tokens:
            return self.settings
        self.say(f"a quarter of the answers reach {reached} tokens, so that is the plan's horizon")
        return replace(self.settings, new_tokens=reached)

    def _split(self, prompts: Sequence[Any], tokenizer: Any) -> Split:
        calibration = self.settings.fit_prompts + self.settings.select_prompts
        held_out = self.settings.held_out_prompts
        return split_prompts(prompts, tokenizer, calibration=calibration, held_out=held_out, **self._bounds())

    def _bounds(self) -> dict[str, Any]:
        """Which prompts a model takes, and the seed by which they are dealt out."""
        limit, new_tokens = self.stack.context_limit(), self.settings.new_tokens
        if limit is not None and limit <= new_tokens:
            raise DepthDecayError(f"{new_tokens} new tokens do not fit the model's context of {limit}")
        return {
            "vocabulary": self.stack.model.get_input_embeddings().weight.shape[0],
            "longest": None if limit is None else limit - new_tokens,
            "seed": self.settings.seed,
        }

    def _texts(self, prompts: list[list[int]]) -> list[Continuation]:
        """The full model's answers, from the work folder where they lie there."""
        kept = self.work.read("texts")
        if kept is not None:
            self.say("going on with the texts of an interrupted run")
            return [Continuation(tuple(p), tuple(t)) for p, t in zip(prompts, kept, strict=True)]
        texts = self._answered(Engine(self.model, compile=False), prompts, "the full model answers prompts")
        self.work.write("texts", [text.tokens for text in texts])
        return texts

    def _answered(
        self, engine: Engine, prompts: list[list[int]], title: str, seed: int | None = None
    ) -> list[Continuation]:
        batch, told = min(self.settings.batch, len(prompts)), self._told(title)
        return continue_prompts(engine, prompts, self.settings.new_tokens, batch=batch, seed=seed, progress=told)

    def _answers_again(self, prompts: list[list[int]], texts: int, device: torch.device) -> list[Continuation]:
        """Sampled answers to the same prompts, where these are few: maps need more text than choices do.

        `texts` are there already, and the memory must hold them all.
        """
        kept = self.work.read("again")
        if kept is None:
            wanted = min(self.settings.fit_prompts - len(prompts), self._room_for_texts(device) - texts)
            rounds = min(max(wanted, 0) // len(prompts), self.settings.again)
            engine, title = Engine(self.model, compile=False), "the full model answers the same prompts again"
            answers = (self._answered(engine, prompts, title, seed=number + 1) for number in range(rounds))
            kept = [text.tokens for answer in answers for text in answer]
            self.work.write("again", kept)
        repeated = prompts * (len(kept) // len(prompts))
        return [Continuation(tuple(p), tuple(t)) for p, t in zip(repeated, kept, strict=True)]

    def _record(self, texts: Sequence[Continuation], title: str) -> Recording:
        return Recording.of(self.stack, texts, rows=self.settings.rows, progress=self._told(title))

    def _told(self, title: str) -> Callable[[int, int], None]:
        return lambda done, total: self.say(f"{title}: {done} of {total}")

    def _search(self) -> Found:
        settings, layers = self.settings, self.stack.num_layers
        few = max(1, -(-settings.search_prompts // settings.rows))
        batches = self.fit.batches[:: max(1, len(self.fit.batches) // few)][:few]
        recording = Recording(self.stack, batches + self.select.batches, max(self.fit.columns, self.select.columns))
        started = time.monotonic()

        def told(message: str, done: int, total: int) -> None:
            left = (time.monotonic() - started) / done * (total - done)
            self.say(f"searching the ladder, {message} (about {left:.0f} s left)")

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
            seconds=60 * settings.minutes,
            progress=told,
            save=lambda beam: self.work.write("search", [found.to_dict() for found in beam]),
        )
        promise = unrepaired_share(self.select, settings.maps[0])
        return search.run(promise, [Found.from_dict(values) for values in kept or ()])

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
        """Maps of every depth down to the lowest, each fitted as if all positions had run at that depth."""
        layers = self.stack.num_layers
        if settings not in self._traces:
            self.forget_traces()
        trace, maps = self._traces.get(settings, (Trace(self.fit), {}))
        for layer in self.found.order[len(maps) : layers - lowest]:
            trace = trace.without([layer], settings)
            maps[layers - len(trace.dropped)] = trace.repairs
            self.say(f"fitting maps at constant depth {layers - len(trace.dropped)}")
        self._traces[settings] = trace, maps
        return Repairs(maps)

    def forget_traces(self) -> None:
        """A trace holds the states of all texts at all layers."""
        self._traces.clear()

    def plan_at(self, speedup: float, settings: FitSettings, shape: Shape) -> Plan:
        """The ladder with the decay that reaches a speed-up, maps of this size counted."""
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
        """KL on the texts to choose by, with maps fitted at constant depths."""
        plan = self.plan_at(speedup, settings, shape)
        visited = reached_depths(plan)
        maps = self.constant_maps(settings, min(visited, default=plan.num_layers))
        return Simulator(self.select).measure(plan, maps.only(set(visited))).kl

    def choose_shape(self, speedup: float, settings: FitSettings) -> tuple[Shape, list[dict[str, Any]]]:
        """How deep the decay goes before it holds its depth, and how long it waits.

        KL grows faster than the number of dropped layers, so a decay that stops early costs less than one that goes
        deep late; but later tokens are easier. Which of the two weighs more is measured.
        """
        tried: list[dict[str, Any]] = []

        def attempt(shape: Shape) -> float:
            try:
                kl = self.loss_at(speedup, settings, shape)
            except DepthDecayError:  # not reachable: the floor is too high, or the ladder too short
                return math.inf
            tried.append({"min_layers": shape.floor, "warmup": shape.warmup, "kl": kl})
            self.say(f"  KL {kl:.5f} at {speedup:g}x down to {shape.floor} layers, warm-up {shape.warmup:g}")
            return kl

        losses: dict[int, float] = {}
        worse = 0
        for floor in range(int(self.stack.num_layers / speedup), self.least_layers - 1, -1):
            best = min(losses.values(), default=math.inf)
            losses[floor] = attempt(Shape(floor))
            worse = worse + 1 if losses[floor] >= best and math.isfinite(best) else 0
            if worse == 2:  # it only gets deeper from here
                break
        best = min(losses.values(), default=math.inf)
        if not math.isfinite(best):
            self.plan_at(speedup, settings, Shape(self.least_layers))  # says why
        # Longer answers go on at the floor, where nothing was measured: of equals the highest.
        floor = max(floor for floor, kl in losses.items() if kl <= _AS_GOOD * best)
        best, shape = losses[floor], Shape(floor)
        for warmup in self.settings.warmups:
            kl = attempt(replace(shape, warmup=warmup))
            if kl < best:
                best, shape = kl, replace(shape, warmup=warmup)
        return shape, tried

    def choose(self, speedup: float) -> tuple[FitSettings, Shape, list[dict[str, Any]]]:
        """Shape of the decay, size of maps and ridge with the lowest KL at this speed-up.

        On texts that nothing was fitted on. Further plans of one run differ in speed, hardly in the best size, so that
        one is chosen once.
        """
        if self._size is not None:
            shape, tried = self.choose_shape(speedup, self._size)
            return self._size, shape, tried
        first = self.settings.maps[0]
        shape, tried = self.choose_shape(speedup, first)
        best: dict[FitSettings, float] = {}

        def attempt(settings: FitSettings) -> None:
            if settings in best:
                return
            try:
                kl = self.loss_at(speedup, settings, shape)
            except DepthDecayError:
                # Larger maps cost more, which may take one layer more than this floor leaves.
                deeper = replace(shape, floor=max(shape.floor - 1, self.least_layers))
                try:
                    kl = self.loss_at(speedup, settings, deeper)
                except DepthDecayError:
                    return
            best[settings] = kl
            tried.append({**asdict(settings), "kl": kl})
            self.say(f"  KL {kl:.5f} with rank {settings.rank}, {settings.neurons} neurons, ridge {settings.ridge:g}")

        for settings in self.settings.maps:
            attempt(settings)
        for ridge in self.settings.ridges:
            attempt(replace(min(best, key=lambda size: best[size]), ridge=ridge))
        self._size = min(best, key=lambda size: best[size])
        if self._size != first:
            shape, more = self.choose_shape(speedup, self._size)
            tried += more
        return self._size, shape, tried

    def repaired(self, speedup: float, settings: FitSettings, shape: Shape) -> tuple[Plan, Repairs]:
        """A plan for a speed-up with its maps: at constant depths, then again for the positions that it runs there.

        Two depths more have maps than the plan visits, so that it can be re-scheduled; deeper, its ladder ends.
        """
        plan = self.plan_at(speedup, settings, shape)
        visited = reached_depths(plan)
        lowest = max(plan.ladder.min_layers, min(visited, default=plan.num_layers) - 2)
        constant = self.constant_maps(settings, lowest)
        self.say(f"fitting maps for {speedup:g}x, rank {settings.rank} and {settings.neurons} neurons a layer")
        fitted = fit_plan(self.fit, plan, replace(settings, ridge=10 * settings.ridge), constant)
        maps = {depth: maps for depth, maps in constant.at_depth.items() if depth >= lowest} | dict(fitted.at_depth)
        ladder = Ladder(plan.num_layers, plan.ladder.drop_order[: plan.num_layers - lowest])
        return replace(plan, ladder=ladder), Repairs(maps, self.vocabulary)

    def make(self, goal: Goal) -> Calibrated:
        """The fastest plan whose held-out loss, with its confidence bound, is inside the budget."""
        if goal.lossless:
            from depthdecay.calibration.drafter import make_drafter

            return make_drafter(self)
        if goal.speedup is not None:
            return self._finish(goal, goal.speedup, *self.choose(goal.speedup))
        assert goal.budget is not None
        speedup = self._fastest_guess(goal)
        settings, shape, tried = self.choose(speedup)
        nearest: Calibrated | None = None
        while speedup >= _LEAST_SPEEDUP:
            made = self._finish(goal, speedup, settings, shape, tried)
            if made.figures["promise"]["bound"] <= goal.budget:
                return made
            nearest = made
            speedup = 1 + (speedup - 1) * 0.85
            shape, more = self.choose_shape(speedup, settings)
            tried += more
        words = "no plan was found"
        if nearest is not None:
            promise = nearest.figures["promise"]
            words = (
                f"the nearest is {promise['layer_speedup']:.3f}x at {promise['held_out']:.4f} "
                f"(at most {promise['bound']:.4f} with 95% confidence)"
            )
        raise DepthDecayError(
            f"no plan of this model keeps the {goal.measure} within {goal.budget:g} on held-out text; {words}"
        )

    def _fastest_guess(self, goal: Goal) -> float:
        """A speed-up to start from: bisection on texts to choose by, with maps of the first size at constant depths."""
        assert goal.budget is not None
        settings = self._size or self.settings.maps[0]
        maps = self.constant_maps(settings, self.least_layers)
        low, high = 1.0, self.fastest(settings)
        simulator = Simulator(self.select)
        for _ in range(7):
            middle = (low + high) / 2
            plan = self.plan_at(middle, settings, Shape(self.least_layers))
            loss = goal.loss(simulator.measure(plan, maps.only(set(reached_depths(plan)))))
            self.say(f"at {middle:.3f}x the loss is {loss:.4f}")
            low, high = (middle, high) if loss <= goal.budget else (low, middle)
        return max(low, _LEAST_SPEEDUP)

    def fastest(self, settings: FitSettings) -> float:
        """A speed-up just within what the ladder can reach."""
        low, high = 1.0, 1 / self.settings.lowest_share
        for _ in range(12):
            middle = (low + high) / 2
            try:
                self.plan_at(middle, settings, Shape(self.least_layers))
                low = middle
            except DepthDecayError:
                high = middle
        return low

    def _elsewhere(self, plan: Plan, repairs: Repairs) -> dict[str, Any] | None:
        """How the plan does on other kinds of text than the user's. Nothing is promised about them."""
        if self.elsewhere is None:
            return None
        simulator = Simulator(self.elsewhere)
        measured, plain = simulator.measure(plan, repairs), simulator.measure(plan)
        return {
            "kl": measured.kl,
            "agreement": measured.agreement,
            "plain_kl": plain.kl,
            "prompts": measured.prompts,
            "tokens": measured.tokens,
        }

    def _finish(
        self, goal: Goal, speedup: float, settings: FitSettings, shape: Shape, tried: list[dict[str, Any]]
    ) -> Calibrated:
        plan, repairs = self.repaired(speedup, settings, shape)
        return self.measured(goal, speedup, plan, repairs, settings, shape, tried)

    def measured(
        self,
        goal: Goal,
        speedup: float,
        plan: Plan,
        repairs: Repairs,
        settings: FitSettings,
        shape: Shape,
        tried: list[dict[str, Any]],
    ) -> Calibrated:
        """A fitted plan with its figures on held-out text."""
        simulator = Simulator(self.held_out)
        self.say("measuring on held-out text")
        measured, plain = simulator.measure(plan, repairs), simulator.measure(plan)
        tokens = self.settings.new_tokens
        bound = upper_bound(goal.losses(measured), measured.tokens_by_prompt, self.settings.seed)
        costs = Costs(self.stack, plan, repairs)
        promise = {
            "measure": goal.measure,
            "budget": goal.budget,
            "held_out": goal.loss(measured),
            "bound": bound,
            "confidence": CONFIDENCE,
            "asked_speedup": speedup,
            "layer_speedup": plan.layer_speedup(tokens),
            "layer_speedup_with_repairs": float(costs.layer_speedup(plan, tokens)),
            "cost_speedup": costs.speedup(plan, tokens),
            "prompts": measured.prompts,
            "tokens": measured.tokens,
        }
        figures: dict[str, Any] = {
            "promise": promise,
            "repaired": measured.to_dict(),
            "plain": plain.to_dict(),
            "elsewhere": self._elsewhere(plan, repairs),
            "choices": {
                "rank": settings.rank,
                "neurons a layer": settings.neurons,
                "ridge": settings.ridge,
                "least layers": shape.floor,
                "warm-up tokens": int(shape.warmup * tokens),
                "new tokens": tokens,
                "calibration prompts": self.fit.prompts,
                "calibration tokens": self.fit.tokens,
                "prompts to choose by": self.select.prompts,
                "seed": self.settings.seed,
                "dtype": str(self.stack.model.dtype).removeprefix("torch."),
                "device": self.stack.model.device.type,
                "seconds": round(time.monotonic() - self.started, 1),
            },
            "tried": tried,
            "search": {"order": self.found.order, "kls": self.found.kls},
        }
        notes = {
            "calibration": {**promise, "kl": measured.kl, "agreement": measured.agreement} | figures["choices"],
            "block_influence": [round(value, 5) for value in self.influence],
            "over_tokens": tokens,
        }
        return Calibrated(replace(plan, repairs=REPAIRS_FILE, notes=notes), repairs, figures)


_LEAST_SPEEDUP = 1.01
_AS_GOOD = 1.05  # times the best KL: closer than texts to choose by can tell apart


def _sizes_of_maps(plan: Plan, stack: LayerStack, settings: FitSettings) -> Repairs:
    """Stand-ins with the shapes that maps of these settings will have: costs are known before anything is fitted."""
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
