"""Training repair maps: gradient steps from the closed-form maps, for the plan as a whole.

The closed form fits each map on its own, to the full model's hidden state after its run. What counts is the model's
output, so here all maps of a plan are trained together, on the KL at the plan's positions and depths; the layers
between them are frozen. The model first writes more text: it answers further prompts of the user's, and questions that
it asks itself. In use, a plan continues its own text, so part of the text is written by the plan, scored by the full
model like the rest, and rewritten as the maps improve.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from depthdecay.calibration.continuations import Continuation, continue_prompts
from depthdecay.calibration.differentiable_texts import DifferentiableTexts, frozen, logits_of
from depthdecay.calibration.divergence import mean_kl, rows_on
from depthdecay.calibration.fidelity import Simulator, final_state, first_bypassed
from depthdecay.calibration.fit import stored
from depthdecay.calibration.gradient_steps import Progress, StepSettings, descend
from depthdecay.calibration.kept_answers import OpensEngine
from depthdecay.calibration.own_text import TooLittleTime, write_own_text
from depthdecay.calibration.recording import Recording
from depthdecay.calibration.time_budget import TimeBudget
from depthdecay.engine.engine import Engine
from depthdecay.model.devices import in_fast_precision
from depthdecay.model.layers import LayerStack, primary_device
from depthdecay.model.repairs import Repair, Repairs, reached_depths
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.calibration.run import Calibration

# Share of the first plan's minutes for writing text to train on: the calibration's own texts, on a CPU some 60 by
# default, are soon overfitted.
WRITING = 0.25
MOST_TEXT = 3_000_000  # tokens
_SHARE_GIVEN = 0.5  # of the batches, if the user gave prompts: answers to these
_LEAST_ANSWER = 8  # tokens
_LEARNING_SHARE = 0.8  # of the time left for a plan; the rest is for measuring it
_LEAST_SECONDS = 1.0
_ROWS_WRITTEN, _ROWS_WRITTEN_ELSEWHERE = 256, 64  # batch size for the plan's own answers, on a GPU and elsewhere


@dataclass(frozen=True)
class LearningSettings:
    """How long maps are trained, and on what."""

    minutes: float
    passes: int = 6  # over all texts
    rows: int = 16  # texts per step
    rate: float = 1e-2  # relative to each part's own size
    pull: float = 0.01  # weight decay, towards the closed-form start
    own_share: float = 0.25  # of the texts, answered by the plan itself
    most_own: int = 512  # prompts for these
    renewals: int = 3  # how often the plan answers them, the first time at the start
    seed: int = 0


class PartsInARow:
    """Parts of many maps as one long 32-bit parameter: the learned change, in units of each part's initial size.

    Parts differ in scale by orders of magnitude, and from model to model; in these units one rate suits all of them,
    and weight decay pulls towards the start instead of towards zero. A plan has hundreds of parts, so a GPU would wait
    for the host if each were updated separately.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.shapes = [part.shape for part in parts]
        self.start = torch.cat([part.flatten() for part in parts])
        self.sizes = torch.cat([torch.full_like(part, _size_of(part)).flatten() for part in parts])
        is_matrix = parts[0].dim() > 1  # only matrices decay; the training loop recognises them by their dimensions
        self.learned = nn.Parameter(torch.zeros_like(self.start.unsqueeze(0) if is_matrix else self.start))

    def values(self, dtype: torch.dtype) -> list[torch.Tensor]:
        return self.split(torch.addcmul(self.start, self.sizes, self.learned.flatten()).to(dtype))

    def split(self, row: torch.Tensor) -> list[torch.Tensor]:
        """A row like this one, as parts in their shapes."""
        pieces = row.flatten().split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class MapMasters:
    """A plan's maps as 32-bit parameters, concatenated where device, precision and kind are the same."""

    def __init__(self, repairs: Repairs, depths: Sequence[int], examples: Sequence[torch.Tensor]) -> None:
        self.repairs = repairs
        self.depths = tuple(depths)
        self.examples = examples
        self.each = {id(repair): repair for depth in self.depths for repair in repairs.at_depth[depth]}
        grouped: dict[_Group, list[torch.Tensor]] = {}
        for repair in self.each.values():
            for part in repair.parts:
                start = part.detach().to(examples[repair.start].device, torch.float32)
                grouped.setdefault(self._group(repair, part), []).append(start)
        self.rows = {group: PartsInARow(parts) for group, parts in grouped.items()}

    def _group(self, repair: Repair, part: torch.Tensor) -> _Group:
        return *_place(self.examples[repair.start]), part.dim() > 1

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [row.learned for row in self.rows.values()]

    def maps(self) -> Repairs:
        """The current maps, in the precision of their layers, differentiable."""
        return self._made({group: row.values(group[1]) for group, row in self.rows.items()})

    @torch.no_grad()
    def stored(self) -> Repairs:
        """The maps as they would be saved and run."""
        exact = {group: row.values(torch.float32) for group, row in self.rows.items()}
        return self._made(exact, lambda repair: stored(repair, self.examples[repair.start]))

    def gradients(self) -> Repairs:
        """The last gradient, in the shapes of the maps."""
        found = {group: row.split(_gradient(row.learned)) for group, row in self.rows.items()}
        return self._made(found)

    def _made(
        self, parts: Mapping[_Group, list[torch.Tensor]], finish: Callable[[Repair], Repair] = lambda repair: repair
    ) -> Repairs:
        left = {group: iter(of_group) for group, of_group in parts.items()}
        made = {}
        for key, repair in self.each.items():
            own = [next(left[self._group(repair, part)]) for part in repair.parts]
            made[key] = finish(Repair(repair.start, repair.end, *own))
        at_depth = {
            depth: tuple(made.get(id(repair), repair) for repair in maps) if depth in self.depths else maps
            for depth, maps in self.repairs.at_depth.items()
        }
        return Repairs(at_depth, self.repairs.vocabulary)


_Group = tuple[torch.device, torch.dtype, bool]  # device and dtype of parts, and whether they are matrices


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _size_of(part: torch.Tensor) -> float:
    """The root mean square; for a part that is still zero, what is typical for its width."""
    size = float(part.pow(2).mean().sqrt())
    return size if size > 0 else part.shape[-1] ** -0.5


def _place(example: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return example.device, example.dtype


class LearnedRepairs:
    """Trains the maps of one plan on given texts, judged on validation texts."""

    def __init__(
        self,
        stack: LayerStack,
        plan: Plan,
        repairs: Repairs,
        texts: Sequence[Continuation],
        select: Recording,
        settings: LearningSettings,
        say: Callable[[str], None] = lambda message: None,
        opens: OpensEngine = Engine,
    ) -> None:
        """`opens`: makes the engines that write the plan's own text."""
        self.stack, self.plan, self.settings, self.say = stack, plan, settings, say
        self.opens = opens
        self.select = Simulator(select)
        self.horizon = max(len(text.tokens) for text in texts)
        self.masters = MapMasters(repairs, reached_depths(plan), stack.examples())
        self.first = first_bypassed(plan, self.horizon)
        self.at_full_depth = sum(plan.depth(column + 1) == plan.num_layers for column in range(self.horizon))
        vocabulary = stack.model.get_input_embeddings().weight.shape[0]
        self.rows_at_once = rows_on(primary_device(stack.model), vocabulary)
        self.given = self._readable(texts)
        self.own = self._readable(())
        generator = torch.Generator().manual_seed(settings.seed)
        count = min(settings.most_own, int(settings.own_share * len(texts)))
        chosen = torch.randperm(len(texts), generator=generator)[:count].tolist()
        self.prompts = list(dict.fromkeys(texts[index].prompt for index in chosen)) if settings.renewals else []
        self.steps = max(1, settings.passes * (len(self.given) + -(-len(self.prompts) // settings.rows)))
        self.renewals_made = 0
        self.started = time.monotonic()
        self.steps_made = 0
        self.curve: list[tuple[int, float]] = []  # steps, and the KL on validation texts after them
        self.ended = ""

    def learn(self) -> Repairs:
        """The best maps on the validation texts, as they will be saved.

        Ctrl-C ends the training, not the program: what has been learned by then is useful.
        """
        steps = StepSettings(
            steps=self.steps,
            seconds=60 * self.settings.minutes,
            rate=self.settings.rate,
            weight_decay=self.settings.pull,
        )
        self.started = time.monotonic()
        try:
            with frozen(self.stack.model), torch.enable_grad():
                self.ended = descend(self.masters.parameters, self.loss, self.judge, steps, self._told).ended
        except KeyboardInterrupt:  # the best maps are in place
            if not self.curve:
                raise
            self.ended = f"the user interrupted step {self.steps_made + 1} of {steps.steps}"
        start, best = self.curve[0][1], min(kl for _, kl in self.curve)
        self.say(f"maps trained: KL {start:.4f} before and {best:.4f} now, on validation texts; {self.ended}")
        return self.masters.stored()

    def loss(self, step: int) -> torch.Tensor:
        """The plan's KL to the full model on the texts of one step, where it runs below full depth."""
        if self._is_renewal_due(step):
            self.renewals_made += 1
            self.own = self._readable(self.write(self.prompts))
        texts, number = self._texts_of(step)
        said = functools.partial(logits_of, self.stack)
        with in_fast_precision(self.stack.model):
            batch = texts.batch(number)
            state = final_state(texts, batch, self.plan, self.masters.maps())
            return mean_kl(batch.judged(state), said, batch.wanted, said, self.rows_at_once)

    def _is_renewal_due(self, step: int) -> bool:
        """At the start, and again after equal shares of the training."""
        renewals = self.settings.renewals if self.prompts else 0
        return self.renewals_made < renewals and self._share_done(step) * renewals >= self.renewals_made

    def _share_done(self, step: int) -> float:
        """Share of the training: by steps, or by time if that ends first."""
        return max(step / self.steps, (time.monotonic() - self.started) / (60 * self.settings.minutes))

    def judge(self) -> float:
        """KL on the validation texts, of the maps as they would be saved."""
        kl = self.select.measure(self.plan, self.masters.stored()).kl
        self.curve.append((self.steps_made, kl))
        return kl

    @torch.no_grad()
    def write(self, prompts: Sequence[Sequence[int]], repairs: Repairs | None = None) -> list[Continuation]:
        """The plan's own greedy answers."""
        maps = self.masters.stored() if repairs is None else repairs
        engine = self.opens(self.stack.model, plan=self.plan, repairs=maps, compile=False)
        rows = _ROWS_WRITTEN if primary_device(self.stack.model).type == "cuda" else _ROWS_WRITTEN_ELSEWHERE
        return continue_prompts(engine, prompts, self.horizon, mode="decay", batch=min(len(prompts), rows))

    def _readable(self, texts: Sequence[Continuation]) -> DifferentiableTexts:
        return DifferentiableTexts(
            self.stack, texts, first=self.first, rows=self.settings.rows, judged_from=self.at_full_depth
        )

    def _texts_of(self, step: int) -> tuple[DifferentiableTexts, int]:
        """Given texts and the plan's own by their shares, each in seeded order, every text once per pass."""
        before, now = (int(count * self.settings.own_share) for count in (step, step + 1))
        if len(self.own) and now > before:
            return self.own, self._drawn(before, len(self.own))
        return self.given, self._drawn(step - before if len(self.own) else step, len(self.given))

    def _drawn(self, turn: int, batches: int) -> int:
        generator = torch.Generator().manual_seed(self.settings.seed + 1 + turn // batches)
        return int(torch.randperm(batches, generator=generator)[turn % batches])

    def _told(self, progress: Progress) -> None:
        self.steps_made = progress.step
        self.say(
            f"training maps: step {progress.step} of {progress.steps}, KL {progress.loss:.4f} "
            f"(about {progress.seconds_left:.0f} s left)"
        )


def learn_repairs(run: Calibration, plan: Plan, repairs: Repairs) -> tuple[Repairs, dict[str, Any] | None]:
    """The maps of a calibration's plan after training, and their figures on held-out text.

    Closed-form and trained maps are also measured on text that each writes itself, in answer to the held-out prompts,
    compared with the full model on the same text.
    """
    if run.stack.model.dtype == torch.float16:
        run.say("maps are not trained in float16, where gradients vanish; load the model in bf16 or fp32 for that")
        return repairs, None
    budget = TimeBudget(_minutes_to_learn(run))
    if budget.seconds < _LEAST_SECONDS:
        run.say("no time is left to train maps")
        return repairs, None
    device = primary_device(run.stack.model).type
    if run.own_texts is None:
        run.own_texts = _own_texts(run, budget.left_of(WRITING))
    texts = [*run.fit_texts, *run.own_texts]
    # A GPU is fastest with thousands of tokens per step; with fewer, it waits for the host.
    rows = run.settings.rows if device == "cuda" else max(1, run.settings.rows // 2)
    settings = LearningSettings(minutes=budget.left_of() / 60, rows=rows, seed=run.settings.seed)
    learning = LearnedRepairs(run.stack, plan, repairs, texts, run.select, settings, run.say, run.opens)
    if not len(learning.given):
        run.say("no text is long enough to run below full depth, so no maps are trained")
        return repairs, None
    better = learning.learn()
    prompts = [text.prompt for text in run.held_out_texts]
    run.say("measuring on text that the plan writes")
    figures: dict[str, Any] = {}
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
    learned_from = {"texts": len(texts), "of_its_own": len(run.own_texts)}
    figures |= {"settings": asdict(settings), "learned_from": learned_from}
    return better, {**figures, "ended": learning.ended, "curve": curve}


def _minutes_to_learn(run: Calibration) -> float:
    """The minutes requested; fewer if the total time is too short for all plans."""
    asked = run.settings.learning_minutes
    if not run.time.is_bounded:
        return asked
    return min(asked, _LEARNING_SHARE * run.time.left_of() / run.plans_left / 60)


def _own_texts(run: Calibration, seconds: float) -> list[Continuation]:
    """Text that the model writes in this time: its own questions with answers, and further answers to prompts.

    It uses the prompts that maps are fitted on and those that the calibration had no use for, and its questions differ
    from those it may have written for the calibration itself: validation and held-out texts stay unseen.
    """
    if run.tokenizer is None or seconds <= 0:
        return []
    until = time.monotonic() + seconds
    try:
        texts = write_own_text(
            run.opens(run.stack.model, compile=False),
            run.tokenizer,
            MOST_TEXT,
            seed=run.settings.seed + 1,
            prompts=[*run.spare_prompts, *dict.fromkeys(text.prompt for text in run.fit_texts)],
            share_given=_SHARE_GIVEN,
            answer_tokens=max(_LEAST_ANSWER, run.settings.new_tokens),
            folder=run.work.folder / "own",
            say=run.say,
            until=until,
        )
    except TooLittleTime as reason:
        run.say(f"{reason}; maps are trained on the calibration's texts only")
        return []
    return [Continuation(tuple(text.prompt), tuple(text.answer)) for text in texts]
