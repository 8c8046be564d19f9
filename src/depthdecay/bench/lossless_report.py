"""The report of lossless mode's benchmark: a row per method, and where its answers diverge from full depth."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from depthdecay.engine.result import Result


@dataclass
class Divergence:
    """Where an answer diverges from full depth, and how near the tie was there.

    The margin is between the two tokens' logits, in a plain pass of the model over the shared text. `as_close` is the
    share of tokens in the full-depth answer whose lead over the second best is no larger than that.
    """

    prompt: int
    token: int
    margin: float
    spacing: float  # of the dtype at logits of this size: one rounding step
    as_close: float


@dataclass
class LosslessRow:
    """One method over all prompts. Seconds are of decoding; those of transformers include the prefill."""

    method: str
    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    speedup: float | None = None  # over our own full depth, measured in turns prompt by prompt
    drafted: int = 0
    accepted: int = 0
    acceptance: float | None = None
    tokens_per_verification: float | None = None
    passes_per_token: float | None = None  # layer passes, in full-depth steps; its inverse is the ideal speed-up
    realised: float | None = None
    answers_that_differ: int = 0  # from full depth
    differences: list[Divergence] = field(default_factory=list)
    error: str | None = None
    _verifications: int = 0
    _passes: float = 0.0


@dataclass
class LosslessReport:
    model: str
    settings: dict[str, Any]
    lossless_rows: list[LosslessRow]

    def to_dict(self) -> dict[str, Any]:
        rows = [{k: v for k, v in asdict(row).items() if not k.startswith("_")} for row in self.lossless_rows]
        return {"model": self.model, "settings": self.settings, "lossless_rows": rows}


@torch.no_grad()
def divergence(model: Any, number: int, ids: list[int], expected: list[int], tokens: list[int]) -> list[Divergence]:
    place = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
    if place is None:  # one is a prefix of the other
        return []
    output = model(torch.tensor([ids + expected], device=model.device), logits_to_keep=len(expected) + 1)
    logits = output.logits[0, :-1].float()
    best, second = logits.topk(2).values.unbind(-1)
    margin = float(logits[place, expected[place]] - logits[place, tokens[place]])
    spacing = torch.finfo(model.dtype).eps * 2 ** math.floor(math.log2(max(abs(float(best[place])), 1e-30)))
    as_close = float((best - second <= abs(margin)).float().mean())
    return [Divergence(number, place, round(margin, 5), spacing, round(as_close, 5))]


def add_answer(row: LosslessRow, tokens: list[int], seconds: float, result: Result | None) -> None:
    row.tokens += len(tokens) - (result is not None)  # our first token comes from the prefill, which is not timed
    row.seconds += seconds
    if result is not None and result.mode == "lossless":
        row.drafted += result.drafted
        row.accepted += result.accepted
        row._verifications += result.verifications
        row._passes += result.layer_passes / result.num_layers - 1  # without the first token's pass either


def finish_row(row: LosslessRow, full: LosslessRow) -> None:
    if row.error is not None or not row.tokens or not row.seconds:
        return
    row.tokens_per_second = row.tokens / row.seconds
    if full.tokens_per_second:
        row.speedup = row.tokens_per_second / full.tokens_per_second
    if row._verifications:
        row.acceptance = row.accepted / row.drafted if row.drafted else None
        row.tokens_per_verification = row.tokens / row._verifications
        row.passes_per_token = row._passes / row.tokens
        if row.speedup is not None:
            row.realised = row.speedup * row.passes_per_token
