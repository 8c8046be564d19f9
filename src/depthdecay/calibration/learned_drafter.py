"""A learned drafter for lossless mode, trained in minutes on text the model wrote itself.

The model's weights stay unchanged. Heads on top of more or fewer of its first layers are trained briefly. The one with
the highest expected speed-up, from the cost of its drafts and their accuracy on unseen text, is trained further. One in
the format that other engines load is saved as well.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from depthdecay.calibration.gradient_steps import Learned, Progress, StepSettings, descend
from depthdecay.calibration.head_fit import HeadFigures, HeadFit, frequent_tokens
from depthdecay.calibration.head_states import StatesOfTexts, Text, output_matrix
from depthdecay.calibration.own_questions import Say
from depthdecay.engine.engine import Engine
from depthdecay.engine.request import PLAIN_GREEDY
from depthdecay.errors import DepthDecayError
from depthdecay.model.devices import free_bytes
from depthdecay.model.layers import LayerStack
from depthdecay.speculative.draft_head import (
    HEAD_FILE,
    PORTABLE_HEAD_FILE,
    DraftHead,
    HeadShape,
    outer_states,
    portable_states,
)
from depthdecay.speculative.expected_gain import LONGEST, Pace

LEAST_TEXTS = 16
_LEAST_LAYERS = 8  # of a model, for heads that other engines load: they use the states of fixed layers
_SHARE_OF_MEMORY = 0.5  # of what is free, for the states of texts
_SHARE_FOR_A_STEP = 0.35  # for a training step
_TOKENS_TO_A_ROW = 512  # in a batch of long texts, which has fewer rows
_SHORT_STEPS, _SHORT_TIME = 0.05, 0.05  # share of the steps, and of the time, for each head that is compared
# Seconds left, for comparing heads at all: with fewer, the head that is kept is short of steps.
_TIME_TO_COMPARE = 360.0
# On a GPU, heads whose expected gain is this close to the best are timed, if the total time is at least this long.
_NEAR, _TIME_TO_MEASURE, _PROMPTS_TO_MEASURE = 0.9, 480.0, 4
_LEAST_STEPS, _MOST_EPOCHS = 800, 12
_RATE_FURTHER = 0.5  # the learning rate of a head that is trained already, relative to that of a new one
_BEHIND_OTHERS, _MOST_BEFORE = 0.25, 4  # share of texts that follow other texts, and how many of those at most
_COMPARED = 64  # texts, of which the most similar ones come first
_VOCABULARIES = (2048, 4096, 8192, 16384, 32768, 65536)
_GUESSED_RIGHT = 0.6  # assumed acceptance for choosing a vocabulary, before anything is trained


@dataclass(frozen=True)
class DrafterSettings:
    """How much text a head is trained on, and how."""

    epochs: float = 8.0
    drafts: int = 4  # per unrolled window
    rows: int = 32
    longest: int = 1536  # tokens of a text, with preceding texts
    rate: float = 5e-4
    width: float = 1.0  # of a layer's neurons
    first_layers: tuple[int, ...] = (0, 2, 5)  # how many of the model's layers heads build on
    most_text: int = 5_000_000  # tokens
    seed: int = 0

    @classmethod
    def for_device(cls, device: torch.device) -> DrafterSettings:
        if device.type == "cuda":
            return cls()
        # On a CPU the model's first layers cost as much as a whole head, so no head builds on them.
        return cls(epochs=4.0, drafts=3, rows=8, longest=320, rate=8e-4, first_layers=(0,))


@dataclass
class LearnedDrafter:
    """Heads, the best one first, and their measurements."""

    head: DraftHead
    portable: DraftHead | None
    figures: dict[str, Any]
    in_4_bits: bool = False

    def save(self, folder: Path) -> None:
        """A head that other engines can load as it is is saved only once."""
        self.head.save(folder / HEAD_FILE, in_4_bits=self.in_4_bits)
        (folder / PORTABLE_HEAD_FILE).unlink(missing_ok=True)  # of an earlier run
        if self.portable is not None and self.portable is not self.head:
            self.portable.save(folder / PORTABLE_HEAD_FILE)


class DrafterLesson:
    """One model, its texts, and the heads trained on them."""

    def __init__(
        self,
        stack: LayerStack,
        texts: Sequence[tuple[Text, str]],
        settings: DrafterSettings | None = None,
        *,
        seconds: float = math.inf,
        folder: Path | None = None,
        in_4_bits: bool = False,
        start: DraftHead | None = None,
        say: Say = lambda message: None,
    ) -> None:
        """`texts`: each with its kind. `seconds`: for everything. `folder`: where to keep the state for resuming.

        `start`: a trained head to train further, for this model or another one of its shape.
        `in_4_bits`: heads will draft with int4 matrices, so they are judged and saved with these; other engines' heads
        are not rounded.
        """
        output_matrix(stack)  # refuse unsupported LM heads at once
        self.in_4_bits = in_4_bits
        self.stack, self.say, self.folder = stack, say, folder
        self.settings = DrafterSettings.for_device(stack.model.device) if settings is None else settings
        self.ends = time.monotonic() + seconds
        self.seconds = seconds
        shuffled = [text for text in texts if len(text[0][0]) + len(text[0][1]) > self.settings.drafts + 2]
        if len(shuffled) < LEAST_TEXTS:
            raise DepthDecayError(
                f"{len(shuffled)} texts are too few to train a drafter on; give at least {LEAST_TEXTS}"
            )
        random = Random(self.settings.seed)
        random.shuffle(shuffled)
        held = max(4, min(256, len(shuffled) // 16))
        parts = shuffled[:held], shuffled[held : 2 * held], shuffled[2 * held :]
        self.held_out, self.select, self.fit = (some_behind_others(part, random) for part in parts)
        self.start = start
        self.shapes, self.portable_shape = self._new_shapes() if start is None else self._shapes_of(start)
        self.trained: list[_Fitted] = []  # in full, or interrupted
        self.tried: list[dict[str, Any]] = []  # briefly, to compare

    def _new_shapes(self) -> tuple[list[HeadShape], HeadShape | None]:
        """Those to try, and the one that other engines load, if the model has enough layers for it."""
        stack, layers, width = self.stack, self.stack.num_layers, self.settings.width
        # The states that other engines use too: on a 1.5B model, the last layer's instead drafted no better.
        states = portable_states(layers) if layers >= _LEAST_LAYERS else outer_states(layers)
        tried = [
            HeadShape.of(stack, first_layers=first, states=states, width=width)
            for first in self.settings.first_layers
            if first < layers
        ]
        return tried, HeadShape.of(stack, states=states, width=width) if layers >= _LEAST_LAYERS else None

    def _shapes_of(self, start: DraftHead) -> tuple[list[HeadShape], HeadShape | None]:
        start.shape.check(self.stack)
        return [start.shape], start.shape if start.shape.is_portable(self.stack.num_layers) else None

    def learn(self) -> LearnedDrafter:
        self.started = time.monotonic()
        shapes = self.shapes
        self._read_texts()
        best = shapes[0]
        if len(shapes) > 1 and self.ends - time.monotonic() > _TIME_TO_COMPARE:
            short = [self._fitted(shape, _SHORT_STEPS, _SHORT_TIME) for shape in shapes]
            self.tried = [fitted.told for fitted in short]
            best = shapes[short.index(self._chosen(short))]
        alone = self.portable_shape in (None, best)
        self._fitted(best, 1.0, 1.0 if alone else 0.7)
        if not alone and self.portable_shape is not None:
            self._fitted(self.portable_shape, 1.0, 1.0)
        learned = self.best_so_far()
        assert learned is not None
        return learned

    def best_so_far(self) -> LearnedDrafter | None:
        """The best head of those that were trained, also by an interrupted `learn`; None if there is none yet."""
        if not self.trained:
            return None
        fitted = max(self.trained, key=lambda fitted: fitted.gain)
        can_be_portable = [] if self.portable_shape is None else self.trained
        portable = next((fitted for fitted in can_be_portable if not fitted.head.shape.first_layers), None)
        figures = {
            "texts": len(self.fit) + len(self.select) + len(self.held_out),
            "settings": asdict(self.settings),
            "seconds": round(time.monotonic() - self.started, 1),
            "tried": self.tried,
            "head": fitted.told,
            "portable_head": None if portable is None else portable.told,
        }
        return LearnedDrafter(fitted.head, None if portable is None else portable.whole, figures, self.in_4_bits)

    def _chosen(self, heads: Sequence[_Fitted]) -> _Fitted:
        """The head with the highest expected gain; among those close to it, the fastest if there is time to measure.

        Otherwise the one on the fewest layers, which can draft in batches and in other engines too.
        """
        best = max(fitted.gain for fitted in heads)
        near = [fitted for fitted in heads if fitted.gain > _NEAR * best]
        if len(near) > 1 and self.stack.model.device.type == "cuda" and self.seconds > _TIME_TO_MEASURE:
            prompts = [list(prompt) for (prompt, _), _ in self.held_out[:_PROMPTS_TO_MEASURE]]
            for fitted in near:
                fitted.told["measured_speedup"] = measured = measured_gain(self.stack.model, fitted.head, prompts)
                self.say(f"a head on {fitted.head.shape.first_layers} layers: {measured:.2f}x measured")
            return max(near, key=lambda fitted: fitted.told["measured_speedup"])
        return near[0]

    def _fitted(self, shape: HeadShape, share: float, time_share: float) -> _Fitted:
        """A head of this shape, trained for this share of all steps, within a share of the time left."""
        settings = self.settings
        seconds = max(0.0, (self.ends - time.monotonic()) * time_share) if math.isfinite(self.seconds) else math.inf
        name = f"a head on {shape.first_layers} layers" if shape.first_layers else "a head"
        fit, select = self.fit_states, self.select_states
        torch.manual_seed(settings.seed)
        head = DraftHead.new(self.stack, shape, self.vocabulary).float()
        fitting = HeadFit(self.stack, head)
        rate = settings.rate
        if self.start is None:
            fitting.start_closed_form(fit, range(0, len(fit), max(1, len(fit) // 32)))
        else:
            head.load_state_dict(self.start.state_dict())
            rate *= _RATE_FURTHER
        before = fitting.judge(select, settings.drafts)
        # Little text is repeated more often: the best result is kept anyway.
        few = min(_LEAST_STEPS, _MOST_EPOCHS * len(fit))
        steps = max(8, int(share * max(settings.epochs * len(fit), few)))
        order = [number for epoch in range(-(-steps // len(fit))) for number in self._order(len(fit), epoch)]

        def told(progress: Progress) -> None:
            if progress.step % max(1, steps // 50) == 0 or progress.step == steps:
                self.say(
                    f"training {name}: step {progress.step} of {steps}, loss {progress.loss:.3f}, "
                    f"about {progress.seconds_left:.0f} s left"
                )

        # Short trainings, for comparing heads, are not checkpointed: repeating them is faster.
        name_of_file = f"head-{shape.first_layers}-{shape.states[-1]}-{steps}"
        file = None if self.folder is None or share < 1 else self.folder / name_of_file
        learned = Learned()
        try:
            descend(
                list(head.parameters()),
                lambda step: fitting.loss(fit.batch(order[step], shape), settings.drafts),
                lambda: fitting.judge(select, settings.drafts).kl,
                StepSettings(steps, seconds=seconds, rate=rate),
                told,
                file,
                learned,
            )
        except KeyboardInterrupt:
            if share == 1 and learned.curve:  # what has been learned so far is of use
                learned.ended = "the user interrupted it"
                self.trained.append(self._finished(name, fitting, learned, before))
            raise
        fitted = self._finished(name, fitting, learned, before)
        if share == 1:
            self.trained.append(fitted)
        return fitted

    def _finished(self, name: str, fitting: HeadFit, learned: Learned, before: HeadFigures) -> _Fitted:
        """A trained head as it is saved, judged on unseen text."""
        head, drafts = fitting.head, self.settings.drafts
        head.requires_grad_(False)
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())
        whole = head
        if self.in_4_bits:
            whole = copy.deepcopy(head)
            head.round_to_4_bits()
        judged = {kind: fitting.judge(texts, drafts) for kind, texts in self.judged_states.items()}
        head.right = judged["all"].right[0]
        cost = self._cost(head)
        gain = self._gain(judged["all"], cost)
        self.say(
            f"{name}: first-draft accuracy {judged['all'].right[0]:.1%} on unseen text, "
            f"{judged['all'].tokens_a_window:.2f} tokens per window, {gain:.2f}x expected"
        )
        began = {"closed_form" if self.start is None else "trained_before": asdict(before)}
        told = _told(head.shape, self.fit_states, learned, began, judged, cost, gain, len(self.vocabulary))
        whole.right = head.right
        return _Fitted(head, whole, gain, told)

    def _order(self, batches: int, epoch: int) -> list[int]:
        return Random(f"{self.settings.seed} {epoch}").sample(range(batches), batches)

    def _read_texts(self) -> None:
        """The full model's hidden states on all texts, for heads of all shapes."""
        self.judged_states = {name: self._states(texts) for name, texts in self._held_out_kinds().items()}
        self.select_states = self._states([text for text, _ in self.select])
        self.fit_states = self._states([text for text, _ in self.fit], "reading texts", to_learn_from=True)
        self.vocabulary = self._vocabulary(self.fit_states)

    def _held_out_kinds(self) -> dict[str, list[Text]]:
        """All held-out texts, and each kind separately."""
        kinds = sorted({kind for _, kind in self.held_out})
        groups = {"all": [text for text, _ in self.held_out]}
        if len(kinds) > 1:
            groups |= {kind: [text for text, own in self.held_out if own == kind] for kind in kinds}
        return groups

    def _states(self, texts: Sequence[Text], title: str = "", *, to_learn_from: bool = False) -> StatesOfTexts:
        def told(done: int, total: int) -> None:
            if title and done % max(1, total // 20) == 0:
                self.say(f"{title}, {done} of {total} batches")

        return StatesOfTexts(
            self.stack,
            [*self.shapes, *([] if self.portable_shape is None else [self.portable_shape])],
            texts,
            rows=self.settings.rows,
            most_tokens=self._tokens_at_once(),
            longest=self.settings.longest,
            room=int(_SHARE_OF_MEMORY * free_bytes(self.stack.model.device)),
            to_learn_from=to_learn_from,
            told=told,
        )

    def _tokens_at_once(self) -> int:
        """Tokens of a batch: fewer than asked for where memory is short."""
        settings, device = self.settings, self.stack.model.device
        most = settings.rows * _TOKENS_TO_A_ROW
        if device.type != "cuda":
            return most
        # What the backward pass keeps of a token, for each draft: of the MLP, of states, and attention's scores.
        kept = max(8 * shape.neurons + 40 * shape.hidden + 8 * shape.heads * settings.longest for shape in self.shapes)
        return max(settings.longest, min(most, int(_SHARE_FOR_A_STEP * free_bytes(device) / (settings.drafts * kept))))

    def _vocabulary(self, fit: StatesOfTexts) -> torch.Tensor:
        """The draft vocabulary: as many tokens as pay off, by how often others are needed and what their rows cost."""
        if self.start is not None:
            return self.start.vocabulary
        matrix = output_matrix(self.stack)
        size, row = matrix.weight.shape[0], matrix.weight.shape[1] * matrix.weight.element_size()
        whole = sum(self.stack.layer_bytes()) + self.stack.head_bytes()
        counts = fit.token_counts(size)
        covered = counts.sort(descending=True).values.cumsum(0) / counts.sum().clamp(min=1)

        def rate(tokens: int) -> float:
            costs = self._untimed.costs(
                tokens * row / whole + sum(self.stack.layer_bytes()) / self.stack.num_layers / whole
            )
            p = _GUESSED_RIGHT * float(covered[tokens - 1])
            return costs.rate(p, max(1, costs.best(p, LONGEST)))

        best = max((min(count, size) for count in _VOCABULARIES), key=rate)
        ends = self.stack.model.generation_config.eos_token_id
        always = [] if ends is None else torch.tensor(ends).reshape(-1).tolist()
        return frequent_tokens(counts, best, [token for token in always if 0 <= token < size])

    @property
    def _untimed(self) -> Pace:
        return Pace.untimed_on(self.stack.model.device.type)

    def _cost(self, head: DraftHead) -> float:
        """The cost of a draft in full-depth steps, by bytes read."""
        matrix = output_matrix(self.stack)
        size = matrix.weight.element_size()
        own = sum(parameter.numel() for parameter in head.parameters()) * size
        rows = len(head.vocabulary) * matrix.weight.shape[1] * size
        first = sum(self.stack.layer_bytes()[: head.shape.first_layers])
        return (own + rows + first) / (sum(self.stack.layer_bytes()) + self.stack.head_bytes())

    def _gain(self, figures: HeadFigures, cost: float) -> float:
        """The best expected speed-up over window lengths, given that later drafts are less accurate."""
        pace = self._untimed
        best, tokens, sure = 1.0, 1.0, 1.0
        for drafts, right in enumerate(figures.right, 1):
            sure *= right
            tokens += sure
            best = max(best, tokens / (drafts * cost + pace.verify(drafts + 1)))
        return best


def measured_gain(model: Any, head: DraftHead, prompts: Sequence[list[int]], tokens: int = 96) -> float:
    """The measured speed-up of this head's drafts over full depth, on this machine."""
    engine = Engine(model, draft_head=head)
    seconds = {"full": 0.0, "lossless": 0.0}
    for counts in (False, True):  # the first run compiles and captures
        for prompt in prompts:
            for mode in seconds:
                (result,) = engine.generate([prompt], tokens, mode=mode, lookup=0, eos_token_id=-1, **PLAIN_GREEDY)
                seconds[mode] += result.decode_seconds if counts else 0.0
    return seconds["full"] / seconds["lossless"]


def some_behind_others(texts: Sequence[tuple[Text, str]], random: Random) -> list[tuple[Text, str]]:
    """Puts some texts after similar ones, as in a conversation or behind examples.

    Drafts must work after long contexts too, and take from them what an answer repeats. Only the last answer is judged.
    """
    words = [{*prompt, *answer} for (prompt, answer), _ in texts]
    found: list[tuple[Text, str]] = []
    for number, ((prompt, answer), kind) in enumerate(texts):
        before: list[int] = []
        if random.random() < _BEHIND_OTHERS:
            others = [
                other for other in random.sample(range(len(texts)), min(_COMPARED, len(texts))) if other != number
            ]
            others.sort(key=lambda other: _similarity(words[number], words[other]))
            for other in others[-random.randint(1, _MOST_BEFORE) :]:
                (asked, said), _ = texts[other]
                before += [*asked, *said]
        found.append((([*before, *prompt], answer), kind))
    return found


def _similarity(these: set[int], those: set[int]) -> float:
    """The share of tokens that two texts have in common."""
    return len(these & those) / len(these | those)


@dataclass
class _Fitted:
    head: DraftHead
    whole: DraftHead  # the same before it was rounded to 4 bits, if it was
    gain: float
    told: dict[str, Any]


def _told(
    shape: HeadShape,
    fit: StatesOfTexts,
    learned: Learned,
    began: dict[str, Any],
    judged: dict[str, HeadFigures],
    cost: float,
    gain: float,
    vocabulary: int,
) -> dict[str, Any]:
    return {
        "shape": asdict(replace(shape)),
        "vocabulary": vocabulary,
        "tokens_fitted_on": fit.tokens,
        **began,
        "learned": learned.to_dict(),
        "held_out": {name: asdict(figures) for name, figures in judged.items()},
        "cost_of_a_draft": cost,
        "expected_speedup": gain,
    }
