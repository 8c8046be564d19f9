"""The training loop of calibration: limited by steps and by time, it keeps the best result so far.

The model stays frozen. What is trained is small and can overfit, so the result is evaluated regularly on text that no
step has seen. The best of these is kept, also when the time is up, the user interrupts, or a loss is not finite.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from depthdecay.errors import DepthDecayError
from depthdecay.files import write_whole

# Where the parameters get worse than at the start, the steps are too large: training goes back to the best, this much
# slower, and so on. With a fixed rate, maps that closed form had made good came back from 100 steps as they were.
SLOWING, MOST_SLOWINGS = 0.25, 4
KEEP_EVERY = 45.0  # seconds between checkpoints, each four times the parameters in 32 bits


@dataclass(frozen=True)
class StepSettings:
    """Number of steps and learning rate. The rate warms up, stays constant, and decays to zero at the end."""

    steps: int
    seconds: float = math.inf
    rate: float = 4e-4
    warmup: float = 0.03  # share of the steps, with a minimum if enough steps follow
    least_warmup: int = 40
    cooldown: float = 0.3  # share of the steps, or of the time if that ends first
    weight_decay: float = 0.01
    clip: float = 1.0
    judgements: int = 8


@dataclass
class Judged:
    """One point of the learning curve."""

    step: int
    seconds: float
    training_loss: float | None  # the mean since the previous point
    judged_loss: float


@dataclass
class Learned:
    """The outcome of training."""

    curve: list[Judged] = field(default_factory=list)
    best: float = math.inf
    slowings: int = 0  # how often the learning rate was reduced because steps were too large
    ended: str = "all steps were made"  # or why not

    def to_dict(self) -> dict[str, object]:
        curve = [vars(point) for point in self.curve]
        return {"best": self.best, "ended": self.ended, "slowings": self.slowings, "curve": curve}


@dataclass(frozen=True)
class Progress:
    """The figures for a progress line."""

    step: int
    steps: int
    loss: float
    seconds_left: float


class _NotFinite(Exception):
    pass


_KEPT = ("value", "best", "first_mean", "second_mean")


def descend(
    parameters: Sequence[nn.Parameter],
    loss_of: Callable[[int], torch.Tensor],
    judge: Callable[[], float],
    settings: StepSettings,
    told: Callable[[Progress], None] = lambda progress: None,
    file: Path | None = None,
    learned: Learned | None = None,
) -> Learned:
    """Minimize `loss_of(step)`, and leave in `parameters` what `judge` found best.

    `loss_of` picks its batch by the step number, so that a seed gives the same result each time. `judge` returns the
    loss on text that no step sees; the initial parameters are judged too, so the result is never worse. `file`:
    checkpoints are kept there, and an interrupted training resumes from it. `Learned.ended` says why training ended;
    a KeyboardInterrupt is raised again, with the best parameters in place. `learned`: filled in along the way, for a
    caller that uses what an interrupted training has learned.
    """
    loop = _Descent(parameters, loss_of, judge, settings, told, file, Learned() if learned is None else learned)
    try:
        loop.run()
    finally:
        loop.restore()
    return loop.learned


class _Descent:
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        loss_of: Callable[[int], torch.Tensor],
        judge: Callable[[], float],
        settings: StepSettings,
        told: Callable[[Progress], None],
        file: Path | None,
        learned: Learned,
    ) -> None:
        self.parameters = list(parameters)
        self.loss_of = loss_of
        self.judge = judge
        self.settings = settings
        self.told = told
        self.file = file
        self.learned = learned
        self.kept = [parameter.detach().clone() for parameter in self.parameters]
        self.started = time.monotonic()
        self.kept_at = 0.0
        matrices = [parameter for parameter in self.parameters if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters if parameter.dim() <= 1]
        decays = ((matrices, settings.weight_decay), (others, 0.0))
        groups: list[dict[str, Any]] = [{"params": of, "weight_decay": decay} for of, decay in decays if of]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def run(self) -> None:
        settings = self.settings
        step = self._resumed()
        if step == 0:
            try:
                self._judge(0, None)
            except _NotFinite:
                raise DepthDecayError(
                    "the loss is not a finite number from the start; try dtype fp32 or bf16"
                ) from None
        every = max(1, settings.steps // max(1, settings.judgements))
        losses: list[float] = []
        try:
            while step < settings.steps and self.seconds <= settings.seconds:
                losses.append(self._step(step))
                step += 1
                self.told(self._progress(step, losses[-1]))
                if step % every == 0:
                    self._judge(step, sum(losses) / len(losses))
                    losses.clear()
                    if self.seconds - self.kept_at >= KEEP_EVERY:
                        self._keep(step)
                        self.kept_at = self.seconds
            if losses:
                self._judge(step, sum(losses) / len(losses))
            if step < settings.steps:
                self.learned.ended = f"the time was up after {step} of {settings.steps} steps"
        except _NotFinite:
            self.learned.ended = f"the loss of step {step + 1} was not a finite number; the best before it is kept"

    def _step(self, step: int) -> float:
        factor = self._factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * factor * SLOWING**self.learned.slowings
        loss = self.loss_of(step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        value = float(loss.detach())  # waits for the device, which by now has the backward pass queued as well
        if not math.isfinite(value):
            raise _NotFinite
        nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        return value

    def _factor(self, step: int) -> float:
        """The learning rate relative to its maximum: by steps, or by time if that runs out first."""
        settings = self.settings
        left = 1 - step / settings.steps
        if math.isfinite(settings.seconds):
            left = min(left, max(0.0, 1 - self.seconds / settings.seconds))
        least = min(settings.least_warmup, settings.steps // 4)
        rising = (step + 1) / max(1.0, least, settings.warmup * settings.steps)
        return min(1.0, rising, left / settings.cooldown if settings.cooldown else 1.0)

    def _progress(self, done: int, loss: float) -> Progress:
        by_steps = self.seconds / done * (self.settings.steps - done)
        return Progress(done, self.settings.steps, loss, min(by_steps, max(0.0, self.settings.seconds - self.seconds)))

    def _judge(self, step: int, training_loss: float | None) -> None:
        with torch.no_grad():
            found = self.judge()
        if not math.isfinite(found):
            raise _NotFinite
        self.learned.curve.append(Judged(step, self.seconds, training_loss, found))
        if found < self.learned.best:
            self.learned.best = found
            self.kept = [parameter.detach().clone() for parameter in self.parameters]
        elif found > self.learned.curve[0].judged_loss and self.learned.slowings < MOST_SLOWINGS:
            self.learned.slowings += 1
            self.restore()
            for state in self.optimizer.state.values():
                for moment in state.values():
                    moment.zero_()

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self.parameters, self.kept, strict=True):
                parameter.copy_(kept)

    def _keep(self, step: int) -> None:
        """Write a checkpoint: parameters, the best so far, the optimizer's two moments."""
        if self.file is None:
            return
        from safetensors.torch import save

        tensors: dict[str, torch.Tensor] = {}
        for number, (parameter, kept) in enumerate(zip(self.parameters, self.kept, strict=True)):
            state = self.optimizer.state[parameter]
            parts = (parameter.detach(), kept, state["exp_avg"], state["exp_avg_sq"])
            tensors |= {f"{number}.{name}": part.cpu().clone() for name, part in zip(_KEPT, parts, strict=True)}
        about = {"step": step, "seconds": self.seconds, "learned": self.learned.to_dict()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, save(tensors, {"about": json.dumps(about), "settings": repr(self.settings)}))
        except OSError as error:
            raise DepthDecayError(f"cannot write to {self.file.parent}: {error.strerror or error}") from None

    def _resumed(self) -> int:
        """The step to resume at; 0 without a matching checkpoint."""
        from safetensors import SafetensorError, safe_open

        if self.file is None or not self.file.exists():
            return 0
        try:
            with safe_open(self.file, "pt") as content:
                about = content.metadata() or {}
                if about.get("settings") != repr(self.settings):
                    return 0
                parts = [
                    [content.get_tensor(f"{number}.{name}") for name in _KEPT] for number in range(len(self.parameters))
                ]
                told = json.loads(about["about"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return 0
        if [part[0].shape for part in parts] != [parameter.shape for parameter in self.parameters]:
            return 0
        for number, (parameter, (value, kept, first, second)) in enumerate(zip(self.parameters, parts, strict=True)):
            device = parameter.device
            with torch.no_grad():
                parameter.copy_(value)
            self.kept[number] = kept.to(device)
            step = torch.tensor(float(told["step"]))
            self.optimizer.state[parameter] = {
                "step": step,
                "exp_avg": first.to(device),
                "exp_avg_sq": second.to(device),
            }
        curve = [Judged(**point) for point in told["learned"]["curve"]]
        self.learned.curve, self.learned.best = curve, told["learned"]["best"]
        self.learned.slowings = told["learned"].get("slowings", 0)
        self.started -= told["seconds"]
        return int(told["step"])
