"""Speed without loss: our lossless mode and its peers on the same prompts, each answer held against full depth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .devices import synchronize
from .engine import Engine, Result
from .errors import DepthDecayError, one_line
from .plan import Plan
from .request import PLAIN_GREEDY

PEERS = ("generate", "prompt-lookup", "assisted")


@dataclass
class LosslessRow:
    """One way to decode over all prompts. Seconds are of decoding; transformers' include the prompt's pass."""

    method: str
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    speedup: float | None = None  # against our own full depth, prompt by prompt in turns
    drafted: int = 0
    accepted: int = 0
    acceptance: float | None = None
    tokens_per_verification: float | None = None
    passes_per_token: float | None = None  # layer passes, in full-depth steps; its inverse is the ideal speed-up
    realised: float | None = None
    answers_that_differ: int = 0  # from full depth
    first_differences: list[int] = field(default_factory=list)  # by answer, the place of the first token that differs
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


def run_lossless_bench(
    model: Any,
    tokenizer: Any,
    name: str,
    prompts: Sequence[Sequence[int]],
    plans: dict[str, Plan | None],
    *,
    new_tokens: int,
    peers: Sequence[str] = PEERS[:2],
    assistant: Any = None,
    compile_layers: bool = True,
    progress: Callable[[str], None] = lambda message: None,
) -> LosslessReport:
    """Every prompt by every method in turns: what a machine does meanwhile falls on all of them alike.

    Plans are drafters by label; each runs with and without lookup in the text before.
    """
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        raise DepthDecayError(f"unknown method '{unknown[0]}'; known are {', '.join(PEERS)}")
    on_cuda = torch.device(model.device).type == "cuda"
    compile = compile_layers and on_cuda
    engines = {label: Engine(model, plan=plan, compile=compile) for label, plan in plans.items()}
    full = Engine(model, compile=compile)
    ways: dict[str, Callable[[list[int]], tuple[list[int], float, Result | None]]] = {
        "full": lambda ids: _ours(full, ids, new_tokens, "full")
    }
    for label, engine in engines.items():
        for lookup in (False, True):
            key = f"lossless, {label}{' and lookup' if lookup else ''}"
            ways[key] = lambda ids, e=engine, k=lookup: _ours(e, ids, new_tokens, "lossless", lookup=k)  # type: ignore[misc]
    for peer in peers:
        ways[f"transformers {peer}"] = lambda ids, p=peer: _transformers(  # type: ignore[misc]
            model, tokenizer, ids, new_tokens, p, assistant
        )
    rows = {method: LosslessRow(method) for method in ways}
    for method, way in ways.items():
        progress(f"warming up {method}")
        try:
            way(list(prompts[0]))
        except Exception as error:
            rows[method].error = one_line(f"{type(error).__name__}: {error}", limit=300)
    for number, prompt in enumerate(prompts):
        expected: list[int] = []
        for method, way in ways.items():
            row = rows[method]
            if row.error is not None:
                continue
            progress(f"prompt {number + 1} of {len(prompts)}: {method}")
            tokens, seconds, result = way(list(prompt))
            if method == "full":
                expected = tokens
            _add(row, tokens, seconds, result, expected)
    for row in rows.values():
        _finish(row, rows["full"])
    settings = {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.device(model.device).type,
        "plans": {label: None if plan is None else plan.describe() for label, plan in plans.items()},
    }
    return LosslessReport(name, settings, list(rows.values()))


def _ours(engine: Engine, ids: list[int], tokens: int, mode: str, **settings: Any) -> tuple[list[int], float, Result]:
    (result,) = engine.generate([ids], tokens, mode=mode, stop=[], **PLAIN_GREEDY, **settings)
    return result.token_ids, result.decode_seconds, result


def _transformers(
    model: Any, tokenizer: Any, ids: list[int], tokens: int, peer: str, assistant: Any
) -> tuple[list[int], float, None]:
    options: dict[str, Any] = {}
    if peer == "prompt-lookup":
        options["prompt_lookup_num_tokens"] = 10
    if peer == "assisted":
        if assistant is None:
            raise DepthDecayError("assisted generation needs a smaller model; give one with --assistant")
        options["assistant_model"] = assistant
    given = torch.tensor([ids], device=model.device)
    synchronize(given.device)
    started = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, **PLAIN_GREEDY, **options
        )
    synchronize(given.device)
    return output[0, len(ids) :].tolist(), time.perf_counter() - started, None


def _add(row: LosslessRow, tokens: list[int], seconds: float, result: Result | None, expected: list[int]) -> None:
    row.tokens += len(tokens) - (result is not None)  # our first token comes with the prompt, which is not timed
    row.seconds += seconds
    if tokens != expected:
        row.answers_that_differ += 1
        pairs = enumerate(zip(tokens, expected, strict=False))
        row.first_differences.append(next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(expected))))
    if result is not None and result.mode == "lossless":
        row.drafted += result.drafted
        row.accepted += result.accepted
        row._verifications += result.verifications
        row._passes += result.layer_passes / result.num_layers


def _finish(row: LosslessRow, full: LosslessRow) -> None:
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
