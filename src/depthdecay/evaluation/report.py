"""From answers to figures: accuracy, cost, and every difference with its confidence interval."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from depthdecay.evaluation.answers import Answers, PromptBatch
from depthdecay.evaluation.methods import MethodPlan
from depthdecay.evaluation.statistics import paired_difference
from depthdecay.evaluation.task import Example, Score

CostSpeedup = Callable[[int], float]  # over so many tokens
_OWN_METHODS = ("full", "lossless", "depthdecay")


@dataclass
class EvaluationRow:
    """One method at one budget. Planned figures are over the fixed horizon, executed ones over the actual answers.

    Lossless mode's cost depends on its drafts, not on a plan, so it has no planned figures and no cost speed-up.
    """

    method: str
    asked_speedup: float | None
    plan: str
    n: int
    accuracy: float
    correct: str  # a 0 or 1 for each question, in data order
    tokens: int
    layers_executed: int
    layer_speedup: float
    cost_speedup: float | None
    planned_layer_speedup: float | None
    planned_cost_speedup: float | None
    decode_seconds: float
    prefill_seconds: float
    decode_steps: int
    ms_per_step: float | None  # median over batches; cold ones, which include graph capture, only if all are cold
    tokens_per_second: float | None
    batch_ms_per_step: list[float | None] = field(default_factory=list)  # None for batches left out of the timing
    wall_clock_speedup: float | None = None  # relative to full depth, batch by batch
    difference_to_full: dict[str, Any] | None = None
    measures: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_mean: float | None = None  # every subtask has equal weight
    acceptance: float | None = None  # of lossless drafts
    verifications: int | None = None  # full-depth passes of lossless mode

    @property
    def scores(self) -> list[float]:
        return [float(digit) for digit in self.correct]

    @property
    def title(self) -> str:
        return self.method if self.asked_speedup is None else f"{self.method} {self.asked_speedup:g}x"


@dataclass
class EvaluationReport:
    """A whole evaluation."""

    model: str
    task: str
    settings: dict[str, Any]
    rows: list[EvaluationRow] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_row(
    contender: MethodPlan,
    num_layers: int,
    over_tokens: int,
    answers: Answers,
    scores: Sequence[Score],
    examples: Sequence[Example],
    cost: CostSpeedup,
) -> EvaluationRow:
    tokens = sum(answer.tokens for answer in answers.answers)
    layers = sum(answer.layers for answer in answers.answers)
    timed = [batch for batch in answers.batches if not batch.is_cold] or answers.batches
    row = EvaluationRow(
        method=contender.method,
        asked_speedup=contender.speedup,
        plan=_described(contender),
        n=len(scores),
        accuracy=sum(score.correct for score in scores) / len(scores),
        correct="".join("1" if score.correct else "0" for score in scores),
        tokens=tokens,
        layers_executed=layers,
        layer_speedup=num_layers * tokens / layers,
        cost_speedup=None,
        planned_layer_speedup=None,
        planned_cost_speedup=None,
        decode_seconds=sum(batch.decode_seconds for batch in answers.batches),
        prefill_seconds=sum(batch.prefill_seconds for batch in answers.batches),
        decode_steps=sum(batch.steps for batch in answers.batches),
        ms_per_step=_median([ms for ms in map(_ms_per_step, timed) if ms is not None]),
        tokens_per_second=_tokens_per_second(timed),
        batch_ms_per_step=[_ms_per_step(batch) if batch in timed else None for batch in answers.batches],
    )
    if contender.mode == "lossless":
        drafted = sum(answer.drafted for answer in answers.answers)
        row.acceptance = sum(answer.accepted for answer in answers.answers) / drafted if drafted else 0.0
        row.verifications = sum(answer.verifications for answer in answers.answers)
    else:
        plan = contender.plan
        row.cost_speedup = executed_cost_speedup([answer.tokens for answer in answers.answers], cost)
        row.planned_layer_speedup = 1.0 if plan is None else plan.layer_speedup(over_tokens)
        row.planned_cost_speedup = cost(over_tokens) if over_tokens > 1 else 1.0
    for name in scores[0].measures:
        values = [float(score.measures[name]) for score in scores]
        row.measures[name] = {"mean": sum(values) / len(values), "values": [round(value, 4) for value in values]}
    by_group: dict[str, list[bool]] = {}
    for example, score in zip(examples, scores, strict=True):
        by_group.setdefault(example.group, []).append(score.correct)
    if any(by_group):
        row.groups = {name: {"n": len(right), "accuracy": sum(right) / len(right)} for name, right in by_group.items()}
        row.group_mean = sum(group["accuracy"] for group in row.groups.values()) / len(row.groups)
    return row


def _described(contender: MethodPlan) -> str:
    plan = "" if contender.plan is None else contender.plan.describe()
    if contender.mode == "lossless":
        return f"full depth, drafts with {plan or 'the default plan'}"
    return plan or "full depth"


def executed_cost_speedup(lengths: Sequence[int], cost: CostSpeedup) -> float:
    """Weight bytes read at full depth divided by those read, for answers of these lengths; T_0 is not a decode step."""
    steps = {length: (length - 1) * count for length, count in Counter(lengths).items() if length > 1}
    if not steps:
        return 1.0
    return sum(steps.values()) / sum(number / cost(length) for length, number in steps.items())


def _ms_per_step(batch: PromptBatch) -> float | None:
    return 1000 * batch.decode_seconds / batch.steps if batch.steps and batch.decode_seconds > 0 else None


def _tokens_per_second(batches: Sequence[PromptBatch]) -> float | None:
    """For all rows together. Each row's first token comes from prefill; finished rows yield nothing."""
    seconds = sum(batch.decode_seconds for batch in batches)
    tokens = sum(answer.tokens - 1 for batch in batches for answer in batch.answers)
    return tokens / seconds if seconds > 0 and tokens else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _times_as_fast(row: EvaluationRow, full: EvaluationRow) -> float | None:
    """The median over batches, which have the same questions in both; an occasional graph capture has no effect."""
    pairs = zip(full.batch_ms_per_step, row.batch_ms_per_step, strict=True)
    ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
    if not ratios and full.ms_per_step and row.ms_per_step:  # after an interruption no batch may be warm in both
        return full.ms_per_step / row.ms_per_step
    return _median(ratios)


def compare(rows: Sequence[EvaluationRow]) -> list[dict[str, Any]]:
    """Fill in every method's difference to full depth; return depthdecay's differences to each peer at its budget."""
    full = next((row for row in rows if row.method == "full"), None)
    for row in rows:
        if full is None or row is full:
            continue
        row.difference_to_full = asdict(paired_difference(row.scores, full.scores))
        for name, measure in row.measures.items():
            other = full.measures[name]["values"]
            measure["difference_to_full"] = asdict(paired_difference(measure["values"], other))
        row.wall_clock_speedup = _times_as_fast(row, full)
    comparisons = []
    for ours, peer in itertools.product(rows, rows):
        peers = peer.method not in _OWN_METHODS
        if ours.method == "depthdecay" and peers and ours.asked_speedup == peer.asked_speedup:
            found = asdict(paired_difference(ours.scores, peer.scores))
            comparisons.append({"speedup": ours.asked_speedup, "method": ours.method, "peer": peer.method} | found)
    return comparisons
