"""Repair maps that learn: gradient steps from the closed-form maps, for the plan as a whole.

Closed form brings each map as near as it can to the full model's state behind its run, one after the other. What counts
is what the last layer says, so here all maps of a plan learn together, by the KL at the positions and depths of the
plan; the layers between them stay as they are. A plan reads what it wrote, so part of the text is the plan's own,
judged by the full model like the rest, and written anew as the maps improve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from depthdecay.calibration.continuations import Continuation, continue_prompts
from depthdecay.calibration.differentiable_texts import DifferentiableTexts, frozen, logits_of
from depthdecay.calibration.divergence import mean_kl
from depthdecay.calibration.fidelity import Simulator, final_state, first_bypassed
from depthdecay.calibration.fit import stored
from depthdecay.calibration.gradient_steps import Progress, StepSettings, descend
from depthdecay.calibration.recording import Recording
from depthdecay.engine.engine import Engine
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repair, Repairs, reached_depths
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.calibration.run import Calibration


@dataclass(frozen=True)
class LearningSettings:
    """How long maps learn, and from what."""

    minutes: float
    passes: int = 6  # over all texts
    rows: int = 16  # texts a step
    rate: float = 1e-2  # in units of each part's own size
    pull: float = 0.01  # of the weight decay, towards the closed-form start
    own_share: float = 0.25  # of the texts, whose prompts the plan answers itself
    renewals: int = 3  # how often it does so anew
    seed: int = 0


class MapMasters:
    """A plan's maps as parameters in 32 bits: what was learned, in units of each part's own size at the start.

    Parts differ in scale by orders of magnitude, and from model to model; in these units one rate suits all of them,
    and weight decay pulls towards the start instead of towards nothing.
    """

    def __init__(self, repairs: Repairs, depths: Sequence[int], examples: Sequence[torch.Tensor]) -> None:
        self.repairs = repairs
        self.depths = tuple(depths)
        self.examples = examples
        each = {id(repair): repair for depth in self.depths for repair in repairs.at_depth[depth]}
        self.starts = {
            key: [part.detach().to(examples[repair.start].device, torch.float32) for part in repair.parts]
            for key, repair in each.items()
        }
        self.sizes = {key: [_size_of(part) for part in parts] for key, parts in self.starts.items()}
        self.learned = {
            key: [nn.Parameter(torch.zeros_like(part)) for part in parts] for key, parts in self.starts.items()
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [part for parts in self.learned.values() for part in parts]

    def maps(self) -> Repairs:
        """The maps as they are now, in the precision of their layers, for a gradient to pass through."""
        return self._made(lambda repair: repair.to(*_place(self.examples[repair.start])))

    @torch.no_grad()
    def stored(self) -> Repairs:
        """The maps as they would be saved and run."""
        return self._made(lambda repair: stored(repair, self.examples[repair.start]))

    def _made(self, finish: Callable[[Repair], Repair]) -> Repairs:
        made = {}
        for depth in self.depths:
            for repair in self.repairs.at_depth[depth]:
                if id(repair) not in made:
                    made[id(repair)] = finish(Repair(repair.start, repair.end, *self._parts(id(repair))))
        at_depth = {
            depth: tuple(made.get(id(repair), repair) for repair in maps) if depth in self.depths else maps
            for depth, maps in self.repairs.at_depth.items()
        }
        return Repairs(at_depth, self.repairs.vocabulary)

    def _parts(self, key: int) -> list[torch.Tensor]:
        every = zip(self.starts[key], self.sizes[key], self.learned[key], strict=True)
        return [start + size * learned for start, size, learned in every]


def _size_of(part: torch.Tensor) -> float:
    """The root of the mean square; of a part that is nothing yet, what a part of its width would have."""
    size = float(part.pow(2).mean().sqrt())
    return size if size > 0 else part.shape[-1] ** -0.5


def _place(example: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return example.device, example.dtype


class LearnedRepairs:
    """One plan whose maps learn on given texts, judged on texts to choose by."""

    def __init__(
        self,
        stack: LayerStack,
        plan: Plan,
        repairs: Repairs,
        texts: Sequence[Continuation],
        select: Recording,
        settings: LearningSettings,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.stack, self.plan, self.settings, self.say = stack, plan, settings, say
        self.select = Simulator(select)
        self.horizon = max(len(text.tokens) for text in texts)
        self.masters = MapMasters(repairs, reached_depths(plan), stack.examples())
        self.first = first_bypassed(plan, self.horizon)
        self.given = self._readable(texts)
        self.own = self._readable(())
        generator = torch.Generator().manual_seed(settings.seed)
        chosen = torch.randperm(len(texts), generator=generator)[: int(settings.own_share * len(texts))].tolist()
        self.prompts = list(dict.fromkeys(texts[index].prompt for index in chosen))
        self.steps_made = 0
        self.curve: list[tuple[int, float]] = []  # steps, and the KL on the texts to choose by after them
        self.ended = ""

    def learn(self) -> Repairs:
        """The best maps that were seen on the texts to choose by, as they will be saved.

        An interrupt ends the learning and not the program: what has been learned by then is of use.
        """
        settings = self.settings
        steps = StepSettings(
            steps=max(1, settings.passes * (len(self.given) + self._own_batches)),
            seconds=60 * settings.minutes,
            rate=settings.rate,
            weight_decay=settings.pull,
        )
        self.renewed_every = max(1, -(-steps.steps // max(1, settings.renewals)))
        try:
            with frozen(self.stack.model), torch.enable_grad():
                self.ended = descend(self.masters.parameters, self.loss, self.judge, steps, self._told).ended
        except KeyboardInterrupt:  # the best maps are in place
            if not self.curve:
                raise
            self.ended = f"the user interrupted step {self.steps_made + 1} of {steps.steps}"
        start, best = self.curve[0][1], min(kl for _, kl in self.curve)
        self.say(f"maps have learned: KL {start:.4f} before and {best:.4f} now, on texts to choose by; {self.ended}")
        return self.masters.stored()

    def loss(self, step: int) -> torch.Tensor:
        """The plan's KL to the full model on the texts of one step."""
        if self.prompts and self.settings.renewals and step % self.renewed_every == 0:
            self.own = self._readable(self.write(self.prompts))
        texts, number = self._texts_of(step)
        batch = texts.batch(number)
        places = batch.valid & self._below_full(batch.inputs.shape[1]).to(batch.valid.device)
        state = final_state(texts, batch, self.plan, self.masters.maps())
        said = functools.partial(logits_of, self.stack)
        return mean_kl(state[places], said, batch.states[-1][places], said)

    def judge(self) -> float:
        """KL on the texts to choose by, of the maps as they would be saved."""
        kl = self.select.measure(self.plan, self.masters.stored()).kl
        self.curve.append((self.steps_made, kl))
        return kl

    @torch.no_grad()
    def write(self, prompts: Sequence[Sequence[int]], repairs: Repairs | None = None) -> list[Continuation]:
        """What the plan itself answers, greedily."""
        maps = self.masters.stored() if repairs is None else repairs
        engine = Engine(self.stack.model, plan=self.plan, repairs=maps, compile=False)
        return continue_prompts(engine, prompts, self.horizon, mode="decay", batch=min(len(prompts), 64))

    @property
    def _own_batches(self) -> int:
        return -(-len(self.prompts) // self.settings.rows) if self.settings.renewals else 0

    def _readable(self, texts: Sequence[Continuation]) -> DifferentiableTexts:
        return DifferentiableTexts(self.stack, texts, first=self.first, rows=self.settings.rows)

    def _texts_of(self, step: int) -> tuple[DifferentiableTexts, int]:
        """Every text once a pass, in an order of the seed's."""
        total = len(self.given) + len(self.own)
        generator = torch.Generator().manual_seed(self.settings.seed + 1 + step // total)
        number = int(torch.randperm(total, generator=generator)[step % total])
        return (self.given, number) if number < len(self.given) else (self.own, number - len(self.given))

    def _below_full(self, columns: int) -> torch.Tensor:
        """Columns at full depth have nothing to learn from."""
        return torch.tensor([self.plan.depth(column + 1) < self.plan.num_layers for column in range(columns)])

    def _told(self, progress: Progress) -> None:
        self.steps_made = progress.step
        self.say(
            f"maps learn: step {progress.step} of {progress.steps}, KL {progress.loss:.4f} "
            f"(about {progress.seconds_left:.0f} s left)"
        )


def learn_repairs(run: Calibration, plan: Plan, repairs: Repairs) -> tuple[Repairs, dict[str, Any] | None]:
    """The maps of a calibration's plan after learning, and the figures of it on held-out text.

    Text of the plan's own is measured for closed-form and learned maps alike: each as it would answer the held-out
    prompts, held against what the full model would have said in its place.
    """
    if run.stack.model.dtype == torch.float16:
        run.say("maps do not learn in float16, where gradients vanish; load the model in bf16 or fp32 for that")
        return repairs, None
    settings = LearningSettings(
        minutes=run.settings.learning_minutes, rows=max(1, run.settings.rows // 2), seed=run.settings.seed
    )
    learning = LearnedRepairs(run.stack, plan, repairs, run.fit_texts, run.select, settings, run.say)
    better = learning.learn()
    prompts = [text.prompt for text in run.held_out_texts]
    run.say("measuring on text that the plan writes")
    figures = {}
    for name, maps in (("closed_form", repairs), ("maps", better)):
        measured = Simulator(run.held_out).measure(plan, maps)
        written = Recording.of(run.stack, learning.write(prompts, maps), rows=run.settings.rows)
        on_own = Simulator(written).measure(plan, maps)
        figures[name] = {
            "kl": measured.kl,
            "agreement": measured.agreement,
            "kl_on_own_text": on_own.kl,
            "agreement_on_own_text": on_own.agreement,
        }
    curve = [{"step": step, "kl": kl} for step, kl in learning.curve]
    return better, {**figures, "settings": asdict(settings), "ended": learning.ended, "curve": curve}
