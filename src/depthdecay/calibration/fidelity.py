"""How far a plan's next-token distributions are from the full model's, without decoding: one pass per batch.

A ladder is nested and depth never rises, so each layer runs for the first positions of a text and is bypassed at all
later ones. A teacher-forced pass in which each layer runs or is bypassed by position therefore gives exactly what
decoding token by token would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from depthdecay.calibration.recording import RecordedBatch, Recording
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan


@dataclass
class Fidelity:
    """Means over decoded positions, from T_1 on: T_0 comes from the prefill, at full depth."""

    kl: float  # to the full model, in nats
    agreement: float  # share of positions where both would pick the same token
    perplexity: float  # the plan's, on text the full model wrote
    full_perplexity: float
    tokens: int
    prompts: int
    kl_by_position: list[float]
    agreement_by_position: list[float]
    perplexity_by_position: list[float]
    full_perplexity_by_position: list[float]
    entropy_by_position: list[float]
    tokens_by_position: list[int]
    kl_by_prompt: list[float]
    agreement_by_prompt: list[float]
    tokens_by_prompt: list[int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def depth_segments(plan: Plan, columns: int) -> dict[int, tuple[int, int]]:
    """The columns (first, last + 1) that run at each depth; column j predicts T_(j+1)."""
    depths = [plan.depth(column + 1) for column in range(columns)]
    return {depth: (depths.index(depth), columns - depths[::-1].index(depth)) for depth in sorted(set(depths))}


def shown_positions(tokens_by_position: Sequence[int]) -> int:
    """How many positions a quarter of the texts reach; figures beyond reflect which texts are long, not position."""
    return sum(count >= tokens_by_position[0] / 4 for count in tokens_by_position)


class Simulator:
    """Measures plans on one recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def measure(self, plan: Plan, repairs: Repairs | None = None) -> Fidelity:
        """The plan's fidelity; its repairs, if any, are passed separately."""
        tally = Tally(self.recording.columns)
        for batch in self.recording.batches:
            tally.add(self.recording, batch, self.final_state(batch, plan, repairs))
        return tally.fidelity()

    @torch.no_grad()
    def final_state(self, batch: RecordedBatch, plan: Plan, repairs: Repairs | None = None) -> torch.Tensor:
        return final_state(self.recording, batch, plan, repairs)


def first_bypassed(plan: Plan, columns: int) -> int:
    """The first layer that any column bypasses: before it, the hidden states are the full model's."""
    depths = depth_segments(plan, columns)
    return min((layer for depth in depths for layer in plan.dropped(depth)), default=plan.num_layers)


def final_state(recording: Recording, batch: RecordedBatch, plan: Plan, repairs: Repairs | None = None) -> torch.Tensor:
    """The hidden state after the last layer, every column at the depth of the token that it predicts.

    No in-place writes, so that gradients can flow through layers and maps.
    """
    columns = batch.inputs.shape[1]
    segments = sorted(depth_segments(plan, columns).items(), key=lambda segment: segment[1])
    dropped = {depth: frozenset(plan.dropped(depth)) for depth, _ in segments}
    maps = {depth: ({} if repairs is None else repairs.at(depth)) for depth, _ in segments}
    first = recording.first_kept(first_bypassed(plan, columns))
    state = batch.states[first]
    for layer in range(first, len(batch.calls)):
        kept = any(layer not in layers for layers in dropped.values())
        output = recording.run_layer(batch, layer, state) if kept else state
        parts = []
        for depth, (start, end) in segments:
            source = state if layer in dropped[depth] else output
            part = source[:, start:end]
            parts.append(maps[depth][layer](part) if layer in dropped[depth] and layer in maps[depth] else part)
        state = torch.cat(parts, dim=1)
    return state


class Tally:
    """Sums of figures by position and by prompt, over batches."""

    def __init__(self, columns: int) -> None:
        self.sums = torch.zeros((5, columns), dtype=torch.float64)  # kl, agreement, nll, full nll, entropy
        self.counts = torch.zeros(columns, dtype=torch.float64)
        self.kl_by_prompt: list[float] = []
        self.agreement_by_prompt: list[float] = []
        self.tokens_by_prompt: list[int] = []

    @torch.no_grad()
    def add(self, recording: Recording, batch: RecordedBatch, state: torch.Tensor) -> None:
        full = recording.logits(batch, batch.states[-1])
        for (rows, expected), (_, given) in zip(full, recording.logits(batch, state), strict=True):
            figures = compare(expected, given, batch.targets[rows])  # (5, rows, columns)
            valid = batch.valid[rows]
            figures = torch.where(valid, figures, 0.0).double()
            columns = valid.shape[1]  # a batch may have fewer columns than others
            self.sums[:, :columns] += figures.sum(1).cpu()
            self.counts[:columns] += valid.sum(0).cpu()
            length = valid.sum(1)
            self.tokens_by_prompt += length.tolist()
            self.kl_by_prompt += (figures[0].sum(1) / length).tolist()
            self.agreement_by_prompt += (figures[1].sum(1) / length).tolist()

    @property
    def kl(self) -> float:
        return float(self.sums[0].sum() / self.counts.sum())

    def fidelity(self) -> Fidelity:
        total = self.sums.sum(1) / self.counts.sum()
        by_position = self.sums / self.counts.clamp(min=1)
        return Fidelity(
            kl=float(total[0]),
            agreement=float(total[1]),
            perplexity=_exp(float(total[2])),
            full_perplexity=_exp(float(total[3])),
            tokens=int(self.counts.sum()),
            prompts=len(self.kl_by_prompt),
            kl_by_position=by_position[0].tolist(),
            agreement_by_position=by_position[1].tolist(),
            perplexity_by_position=[_exp(value) for value in by_position[2].tolist()],
            full_perplexity_by_position=[_exp(value) for value in by_position[3].tolist()],
            entropy_by_position=by_position[4].tolist(),
            tokens_by_position=[int(count) for count in self.counts],
            kl_by_prompt=self.kl_by_prompt,
            agreement_by_prompt=self.agreement_by_prompt,
            tokens_by_prompt=self.tokens_by_prompt,
        )


def _exp(value: float) -> float:
    """exp, bounded to what a result file can store."""
    return math.exp(min(value, 700.0))


def compare(expected: torch.Tensor, given: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """KL, agreement, both models' negative log-likelihood, and the full model's entropy, at every position."""
    full = expected.float().log_softmax(-1)
    plan = given.float().log_softmax(-1)
    likely = full.exp()
    kl = (likely * (full - plan)).sum(-1)
    entropy = -(likely * full).sum(-1)
    agreement = (full.argmax(-1) == plan.argmax(-1)).float()
    chosen = targets.unsqueeze(-1)
    nll, full_nll = -plan.gather(-1, chosen).squeeze(-1), -full.gather(-1, chosen).squeeze(-1)
    return torch.stack([kl.clamp(min=0), agreement, nll, full_nll, entropy])
