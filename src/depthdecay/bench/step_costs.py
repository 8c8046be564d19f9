"""The cost of lossless mode's draft steps and verifications, in full-depth steps, and the speed-up that follows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from depthdecay.argument_checks import whole_number
from depthdecay.bench.model_shapes import check_source, load_model_or_shape
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import guess_is_meant
from depthdecay.engine.request import PLAIN_GREEDY, prepare_request
from depthdecay.errors import DepthDecayError, NotCapturable
from depthdecay.model.devices import synchronize
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.plan.plan import Plan
from depthdecay.result_files import require_writable, write_report
from depthdecay.runners.contract import Ask, Part
from depthdecay.speculative.drafters import Lane
from depthdecay.speculative.expected_gain import Pace, StepCosts
from depthdecay.speculative.host_lane import HostLane

VERIFIED = (2, 4, 8, 16)
ACCEPTED = (0.7, 0.8, 0.9, 0.95)


@dataclass
class StepCostReport:
    """The cost of lossless mode's passes on this machine, in full-depth steps, and the speed-up by acceptance rate."""

    model: str
    settings: dict[str, Any]
    full_ms: float
    drafts: dict[str, float]  # by depth
    verifications: dict[str, float]  # by number of tokens
    speedups: list[dict[str, float]]  # by depth and acceptance rate, each with its best window

    def to_dict(self) -> dict[str, Any]:
        return {"step_costs": asdict(self)}


def benchmark_step_costs(
    model: str | LoadedModel | None = None,
    *,
    shape: str | None = None,
    prompt_tokens: int = 32,
    compile: bool = True,
    rounds: int = 5,
    result_file: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Callable[[str], None] | None = None,
) -> StepCostReport:
    """Time a draft step at a quarter, half and three quarters of the layers, and verifications of 2 to 16 tokens.

    report = benchmark_step_costs(shape="llama-2-7b")
    report.drafts  # by depth, in full-depth steps
    """
    check_source(model, shape)
    whole_number("prompt_tokens", prompt_tokens, 1)
    whole_number("rounds", rounds, 1)
    require_writable(result_file)
    say = progress or (lambda message: None)
    loaded = load_model_or_shape(model, shape, device, dtype, say)
    say("timing passes")
    report = _step_costs(loaded.model, loaded.shown_name, prompt_tokens, compile, rounds)
    write_report(result_file, report)
    return report


def _step_costs(model: Any, name: str, prompt_tokens: int, compile_layers: bool, rounds: int) -> StepCostReport:
    on_cuda = torch.device(model.device).type == "cuda"
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    depths = sorted({max(1, layers * part // 4) for part in (1, 2, 3)})
    plan = Plan.constant(layers, depths[0], core_head=1 if depths[0] > 1 else 0, core_tail=0)
    with guess_is_meant():
        engine = Engine(model, plan=plan, compile=compile_layers and on_cuda)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
    request = prepare_request(engine, ids.tolist(), 64, PLAIN_GREEDY)
    lanes, sampler = engine.lanes, engine.sampler(request)
    drafting = lanes.drafting(engine.repairs)
    with torch.no_grad(), lanes.lane(prompt_tokens, request.max_new_tokens, sampler, engine.pass_settings) as lane:
        lane.read(request.prompts[0])
        lane.begin(0)
        pace = (
            _paced_by_clock(lane, depths, rounds) if isinstance(lane, HostLane) else _paced(lane, drafting.pace, depths)
        )
    full = pace.verifications[1]
    drafts = {depth: pace.drafts[depth] / full for depth in depths}
    checks = {tokens: pace.verifications[tokens] / full for tokens in VERIFIED}
    speedups = []
    for depth, draft in drafts.items():
        costs = StepCosts(draft, lambda tokens: _between({1: 1.0, **checks}, tokens))
        for p in ACCEPTED:
            window = costs.best(p, VERIFIED[-1] - 1)
            speedups.append(
                {"depth": depth, "acceptance": p, "drafts": window, "speedup": round(costs.rate(p, window), 3)}
            )
    settings = {
        "layers": layers,
        "prompt_tokens": prompt_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.device(model.device).type,
        "short_head": lanes.short_head is not None,
    }
    return StepCostReport(
        name,
        settings,
        1000 * full,
        {str(depth): round(cost, 4) for depth, cost in drafts.items()},
        {str(tokens): round(cost, 4) for tokens, cost in checks.items()},
        speedups,
    )


def _between(known: dict[int, float], tokens: int) -> float:
    """The cost for this many tokens, interpolated between those that were timed."""
    return float(np.interp(tokens, list(known), list(known.values())))


def _paced(lane: Lane, pace: Pace, depths: Sequence[int]) -> Pace:
    """Runs each pass once: graphs are timed when they are captured."""
    try:
        for depth in depths:
            lane.draft(depth, 0)
            lane.begin(0)
        for tokens in (1, *VERIFIED):
            lane.verify(tokens - 1)
            lane.begin(0)
    except NotCapturable:
        raise DepthDecayError("this model cannot be captured in CUDA graphs; its passes were not timed") from None
    return pace


def _paced_by_clock(lane: HostLane, depths: Sequence[int], rounds: int) -> Pace:
    """The fastest of several rounds over all passes, so that other load on the machine affects all alike."""
    pace, layers = Pace(), lane.plan.num_layers

    def seconds(depth: int, tokens: int, before: float | None, is_draft: bool) -> float:
        part = Part(0, lane.length, [0] * tokens, depth, lane.plan, wanted=tokens)
        started = time.perf_counter()
        logits = lane.runner.run([part], Ask(short=lane.short_head if is_draft else None)).logits
        synchronize(logits.device)
        taken = time.perf_counter() - started
        return taken if before is None else min(taken, before)

    for _ in range(rounds):
        for depth in depths:
            pace.takes_to_draft(depth, seconds(depth, 1, pace.drafts.get(depth), True))
        for tokens in (1, *VERIFIED):
            pace.takes_to_verify(tokens, seconds(layers, tokens, pace.verifications.get(tokens), False))
    return pace
