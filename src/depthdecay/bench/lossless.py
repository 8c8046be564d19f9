"""Speed of lossless mode and of transformers' methods on the same prompts, each answer compared with full depth."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from depthdecay.argument_checks import whole_number
from depthdecay.bench.lossless_report import LosslessReport, LosslessRow, add_answer, divergence, finish_row
from depthdecay.bench.lossless_ways import PEERS, Way, our_answer, transformers_answer
from depthdecay.cpu.packed_weights import check_setting
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DepthSettings, guess_is_meant
from depthdecay.engine.request import PLAIN_GREEDY
from depthdecay.engine.result import Result
from depthdecay.errors import ArgumentError, DepthDecayError, failure
from depthdecay.model.load import as_loaded
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.prompts import token_ids
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.plan.plan import Plan
from depthdecay.plan.stored_plans import drafter_of, plan_with_head, shipped_plan
from depthdecay.prompt_files import Prompts, prompts_for
from depthdecay.result_files import require_writable, write_report, write_result

SAVE_EVERY = 10.0  # seconds
WARM_UPS = 6


def benchmark_lossless(
    model: str | LoadedModel,
    prompts: Prompts,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    task: str | None = None,
    limit: int = 20,
    compared: int | None = None,
    new_tokens: int = 256,
    peers: Sequence[str] | None = None,
    assistant: str | LoadedModel | None = None,
    temperature: float = 0.0,
    compile: bool = True,
    quantize: str | None = None,
    result_file: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Callable[[str], None] | None = None,
) -> LosslessReport:
    """Measure lossless mode and its peers in transformers on prompts, each answer compared with full depth.

        report = benchmark_lossless("smollm2-135m", "prompts.jsonl", "my-plan")
        {row.method: row.speedup for row in report.lossless_rows}

    The drafters: uncalibrated layers, the plan's ladder without and with its repair maps, and the plan's learned head.
    If there is a plan to draft with next to the given one, it is used; without a plan, the embedded model uses its own.
    `prompts` is a .jsonl or .txt file or a list, or with a `task` its file; the first `limit` are used. `peers` are
    some of generate, prompt-lookup, early-exit and assisted, which needs a smaller model as `assistant`; by default,
    all that apply. Peers are slower, so they run only the first `compared` prompts. With a `temperature` above 0,
    answers are sampled with a seed, without the peers, which sample differently. `quantize` is as in `dd.Engine`, which
    runs the embedded model in its file's own 4 bits; the peers run the dtype. `result_file` is updated regularly.
    """
    whole_number("limit", limit, 1)
    if compared is not None:
        whole_number("compared", compared, 0)
    whole_number("new_tokens", new_tokens, 2)
    _check_peers(peers, assistant)
    if not 0 <= temperature <= 10:
        raise ArgumentError(f"temperature is {temperature}; expected a number from 0 to 10", "temperature")
    if temperature > 0 and (peers or assistant is not None):
        raise ArgumentError("peers sample differently; with a temperature above 0, give none", "peers", "temperature")
    check_setting(quantize)
    require_writable(result_file)
    asked = prompts_for(prompts, task)
    stored = DepthSettings.of(plan).stored()
    drafter = None if stored is None else drafter_of(stored)
    loaded = as_loaded(model, device=device, dtype=dtype, progress=progress)
    helper = None
    if assistant is not None:
        own = {} if isinstance(assistant, LoadedModel) else {"device": device, "dtype": dtype}
        helper = as_loaded(assistant, **own, progress=progress).model
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    report = run_lossless_bench(
        loaded.model,
        loaded.tokenizer,
        loaded.shown_name,
        [token_ids(loaded.tokenizer, text, {}, vocabulary) for text in asked(loaded.tokenizer)[:limit]],
        drafters(drafter or shipped_plan(loaded.name)),
        new_tokens=new_tokens,
        peers=() if temperature > 0 else peers if peers is not None else PEERS if helper is not None else PEERS[:3],
        temperature=temperature,
        assistant=helper,
        compile_layers=compile,
        quantize=loaded.quantize_as_filed() if quantize is None else quantize,
        origin=loaded.origin,
        compared=compared,
        progress=progress or (lambda message: None),
        save=lambda part: _save_in_between(result_file, part),
    )
    write_report(result_file, report)
    return report


def _save_in_between(result_file: str | os.PathLike[str] | None, part: LosslessReport) -> None:
    """A full disk does not end the measurement: the last write may succeed, and raises an error if not."""
    with contextlib.suppress(DepthDecayError):
        write_result(result_file, part.to_dict())


def _check_peers(peers: Sequence[str] | None, assistant: object = None) -> None:
    unknown = [peer for peer in peers or () if peer not in PEERS]
    if unknown:
        raise ArgumentError(f"peers contains '{unknown[0]}'; known are {', '.join(PEERS)}", "peers")
    if assistant is not None and peers is not None and "assisted" not in peers:
        given = ", ".join(peers) or "none"
        raise ArgumentError(f"assistant is for the peer assisted, which peers {given} leaves out", "assistant", "peers")


def drafters(plan: Plan | None) -> dict[str, Plan | None]:
    """The drafters by label, the best one last."""
    found: dict[str, Plan | None] = {"guessed layers": None}
    if plan is None:
        return found
    by_layers = replace(plan, draft_head=None)
    if plan.schedule.final_depth < plan.num_layers:
        found["calibrated"] = replace(by_layers, repairs=None)
    if plan.repairs is not None:
        found["calibrated and repaired"] = by_layers
    if with_head := plan_with_head(plan):
        found["learned head"] = with_head
    return found


def run_lossless_bench(
    model: Any,
    tokenizer: Any,
    name: str,
    prompts: Sequence[Sequence[int]],
    plans: dict[str, Plan | None],
    *,
    new_tokens: int,
    peers: Sequence[str] = PEERS[:3],
    assistant: Any = None,
    temperature: float = 0.0,
    sampling: Mapping[str, Any] | None = None,
    compile_layers: bool = True,
    quantize: str | None = None,
    origin: WeightsOrigin | None = None,
    compared: int | None = None,
    engines: dict[str, Engine] | None = None,
    lookups: Sequence[bool] = (False, True),
    progress: Callable[[str], None] = lambda message: None,
    save: Callable[[LosslessReport], None] = lambda report: None,
) -> LosslessReport:
    """Run every prompt with every method in turn, so that changes in machine load affect all of them alike.

    `plans` are drafters by label. Full depth and the last drafter run on all prompts; the others, some far slower, on
    the first `compared`, and with 0 not at all. `sampling`: further sampling settings, if there is a temperature.
    `save` gets the results so far now and then, so that a run that is cut off is not lost. `engines`: from
    `bench_engines`, for several runs to share them and what they compiled. `lookups`: with prompt lookup, without, or
    both.
    """
    _check_peers(peers)
    on_cuda = torch.device(model.device).type == "cuda"
    engines = dict(engines or bench_engines(model, plans, compile_layers, quantize=quantize, origin=origin))
    full = engines.pop("full")
    picked = dict(PLAIN_GREEDY)
    if temperature:
        picked |= {"do_sample": True, "temperature": temperature, "seed": 0, **(sampling or {})}
    ways: dict[str, Way] = {"full": partial(our_answer, full, new_tokens, "full", **picked)}
    for label, engine in engines.items():
        ours = partial(our_answer, engine, new_tokens, "lossless", **picked)
        for lookup in lookups:
            ways[f"lossless, {label}{' and lookup' if lookup else ''}"] = partial(ours, lookup=lookup)
    for peer in peers:
        ways[f"transformers {peer}"] = partial(transformers_answer, model, new_tokens, peer, assistant)
    best = f"lossless, {next(reversed(plans), None)}"
    main = ("full", best, f"{best} and lookup")
    if compared == 0:
        ways = {method: way for method, way in ways.items() if method in main}
    rows = {method: LosslessRow(method) for method in ways}
    full_alone = LosslessRow("full")  # on the prompts that all methods share
    # Short to long, so that graphs are captured for every length before anything is timed.
    by_length = sorted(prompts, key=len)
    spread = [by_length[place * (len(by_length) - 1) // (WARM_UPS - 1)] for place in range(WARM_UPS)]
    asked = spread if compared is None else sorted(prompts[:compared], key=len)
    for method, way in ways.items():
        progress(f"warming up {method}")
        texts = spread if method in main else asked
        if not on_cuda or method.startswith("transformers"):  # nothing is captured
            texts = spread[:1]
        for prompt in texts:
            if rows[method].error is None:
                _attempted(rows[method], way, list(prompt))

    def report(done: int) -> LosslessReport:
        finish_row(full_alone, full_alone)
        for method, row in rows.items():
            row.prompts = done if compared is None or method in main else min(compared, done)
            finish_row(row, rows["full"] if row.prompts == done else full_alone)
        settings: dict[str, Any] = {
            "prompts": done,
            "compared": compared,
            "new_tokens": new_tokens,
            "temperature": temperature,
            **(sampling or {}),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantize": quantize,
            "device": torch.device(model.device).type,
            "plans": {label: None if plan is None else plan.describe() for label, plan in plans.items()},
        }
        if done < len(prompts):
            settings["cut_off"] = f"after {done} of {len(prompts)} prompts"
        return LosslessReport(name, settings, list(rows.values()))

    saved = time.monotonic()
    for number, prompt in enumerate(prompts):
        expected: list[int] = []
        for method, way in ways.items():
            row = rows[method]
            if row.error is not None or (compared is not None and number >= compared and method not in main):
                continue
            progress(f"prompt {number + 1} of {len(prompts)}: {method}")
            answer = _attempted(row, way, list(prompt))
            if answer is None:
                continue
            tokens, seconds, result = answer
            if method == "full":
                expected = tokens
            add_answer(row, tokens, seconds, result)
            if tokens != expected:
                row.answers_that_differ += 1
                if not temperature:  # the size of a near-tie is only defined for greedy decoding
                    row.differences += divergence(model, number, list(prompt), expected, tokens)
            if method == "full" and (compared is None or number < compared):
                add_answer(full_alone, tokens, seconds, result)
        if time.monotonic() - saved > SAVE_EVERY:
            save(report(number + 1))
            saved = time.monotonic()
    return report(len(prompts))


def bench_engines(
    model: Any,
    plans: dict[str, Plan | None],
    compile_layers: bool = True,
    *,
    quantize: str | None = None,
    origin: WeightsOrigin | None = None,
) -> dict[str, Engine]:
    """One engine per drafter, by label, and one for full depth."""
    compile = compile_layers and torch.device(model.device).type == "cuda"
    engine = partial(Engine, model, compile=compile, quantize=quantize, origin=origin)
    with guess_is_meant():
        engines = {label: engine(plan=plan) for label, plan in plans.items()}
    return {**engines, "full": engine()}


def _attempted(row: LosslessRow, way: Way, ids: list[int]) -> tuple[list[int], float, Result | None] | None:
    """The answer; if the method fails, its row gets the reason, and the others continue."""
    try:
        return way(ids)
    except Exception as error:
        if row.method == "full":  # all others are compared with it
            raise
        row.error = failure(error)
        return None
