"""The analysis behind the charts: is later text easier, which layers matter where, and what does a plan cost?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from depthdecay.bench.drawing import Chart
from depthdecay.bench.figures import (
    THIS_PLAN,
    QualityPoint,
    depth_chart,
    influence_chart,
    influence_map_chart,
    kl_chart,
    perplexity_chart,
)
from depthdecay.errors import DepthDecayError, one_line
from depthdecay.files import read_bytes
from depthdecay.plan.ladder import Ladder
from depthdecay.plan.plan import Plan

# torch is imported only to measure: drawing charts from result files does not need it.
if TYPE_CHECKING:
    from depthdecay.calibration.fidelity import Fidelity, Simulator
    from depthdecay.engine.engine import Engine

SPEEDUPS = ("1.1", "1.25", "1.5", "2")
_LARGEST = 1e9  # larger values in a result file are refused


@dataclass
class Analysis:
    """The measurements. Lists by position begin with T_1, the first token that comes from a decode step."""

    num_layers: int
    prompts: int
    tokens: int
    perplexity_by_position: list[float]
    entropy_by_position: list[float]
    influence: list[float]  # KL when only that layer is dropped
    influence_by_position: list[list[float]]  # layers, then positions
    plan_kl_by_position: dict[str, list[float]] = field(default_factory=dict)
    plan_kl: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fitting_prompts(engine: Engine, prompts: Sequence[Any], limit: int, new_tokens: int) -> list[list[int]]:
    """The first `limit` prompts that leave room for the answer, as token ids."""
    from depthdecay.model.prompts import token_ids

    vocabulary = engine.stack.model.get_input_embeddings().weight.shape[0]
    context = engine.stack.context_limit()
    every = (token_ids(engine.tokenizer, prompt, {}, vocabulary) for prompt in prompts)
    fitting = list(islice((ids for ids in every if context is None or len(ids) + new_tokens <= context), limit))
    if not fitting:
        raise DepthDecayError(
            f"no prompt leaves room for {new_tokens} new tokens in the model's context of {context}; reduce them"
        )
    return fitting


def analyze(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    progress: Callable[[str], None] = lambda message: None,
) -> Analysis:
    """Let the full model answer, then measure the effect of dropping each layer, and of the engine's plan if any."""
    from depthdecay.calibration.continuations import continue_prompts
    from depthdecay.calibration.fidelity import Simulator, shown_positions
    from depthdecay.calibration.recording import Recording

    answers = continue_prompts(
        engine,
        prompts,
        new_tokens,
        batch=min(64, len(prompts)),
        progress=lambda done, total: progress(f"answering at full depth, {done} of {total}"),
    )
    progress("recording the full model's hidden states")
    simulator = Simulator(Recording.of(engine.stack, answers))
    layers = engine.stack.num_layers
    dropped = []
    for layer in range(layers):
        progress(f"measuring without layer {layer} of {layers}")
        dropped.append(simulator.measure(Plan.constant(layers, layers - 1, drop_order=[layer])))
    shown = shown_positions(dropped[0].tokens_by_position)
    made = Analysis(
        num_layers=layers,
        prompts=dropped[0].prompts,
        tokens=dropped[0].tokens,
        perplexity_by_position=dropped[0].full_perplexity_by_position[:shown],
        entropy_by_position=dropped[0].entropy_by_position[:shown],
        influence=[fidelity.kl for fidelity in dropped],
        influence_by_position=[fidelity.kl_by_position[:shown] for fidelity in dropped],
    )
    if engine.plan is not None:
        for label, fidelity in _plan_fidelity(engine, engine.plan, simulator, progress).items():
            made.plan_kl[label] = fidelity.kl
            made.plan_kl_by_position[label] = fidelity.kl_by_position[:shown]
    return made


def charts(analysis: Analysis, plan: Plan | None, new_tokens: int) -> list[Chart]:
    """The charts of an analysis, including those about the plan if there is one."""
    dropped = () if plan is None else plan.dropped(plan.depth(new_tokens - 1))
    made = [
        perplexity_chart(analysis.perplexity_by_position, analysis.entropy_by_position),
        influence_chart(analysis.influence, dropped),
        influence_map_chart(analysis.influence_by_position),
        depth_chart(depth_curves(analysis.num_layers, plan, new_tokens), analysis.num_layers),
    ]
    if analysis.plan_kl_by_position:
        made.append(kl_chart(analysis.plan_kl_by_position))
    return made


def depth_curves(num_layers: int, plan: Plan | None, tokens: int) -> dict[str, Sequence[int]]:
    """Depth by token at several speed-ups (a small model may not reach all of them), and of the plan."""
    curves: dict[str, Sequence[int]] = {}
    for speedup in SPEEDUPS:
        try:
            curves[f"{speedup}×"] = Plan.for_speedup(num_layers, speedup, over_tokens=tokens).depths(tokens)
        except DepthDecayError:
            continue
    if plan is not None:
        curves[THIS_PLAN] = plan.depths(tokens)
    return curves or {"full": Plan.full(num_layers).depths(tokens)}


def _plan_fidelity(
    engine: Engine, plan: Plan, simulator: Simulator, progress: Callable[[str], None]
) -> dict[str, Fidelity]:
    """The plan with its repairs, without them, and its schedule on the uncalibrated middle-out ladder."""
    progress("measuring the plan")
    found = {}
    if plan.repairs is not None:
        found["repaired"] = simulator.measure(plan, engine.repairs)
    found["plain"] = simulator.measure(plan)
    try:
        unmeasured = Plan(Ladder.middle_out(plan.num_layers), plan.schedule, "decay")
    except DepthDecayError:  # the plan goes below the core layers of the middle-out ladder
        return found
    if unmeasured.ladder != plan.ladder:
        found["middle-out"] = simulator.measure(unmeasured)
    return found


def read_quality(files: Sequence[str]) -> list[QualityPoint]:
    """Speed and quality of every method in result files of `depthdecay eval --json-file`."""
    points = [point for file in files for point in _points_of(file)]
    if not points:
        raise DepthDecayError(f"{', '.join(files)}: no method besides full depth, so there is nothing to compare")
    return points


def _points_of(file: str) -> list[QualityPoint]:
    content = read_bytes(file, f"the result file '{file}'")
    try:
        values = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DepthDecayError(f"the result file '{file}' is not JSON: {one_line(error)}") from None
    rows = values.get("rows") if isinstance(values, dict) else None
    if not isinstance(rows, list) or not rows:
        raise DepthDecayError(f"the file '{file}' has no rows; expected a file from depthdecay eval --json-file")
    panel = _printable(f"{values.get('model')}, {values.get('task')}")
    try:
        return [_point(panel, row) for row in rows if row["method"] != "full"]
    except (KeyError, TypeError, ValueError) as error:
        raise DepthDecayError(
            f"the file '{file}' has a row that cannot be drawn ({type(error).__name__}: {one_line(error)}); expected "
            "a file from depthdecay eval --json-file, with full among its methods"
        ) from None


def _point(panel: str, row: dict[str, Any]) -> QualityPoint:
    """Speed as executed, not as planned: a method that rambles on does not get credit for its plan."""
    found = row["difference_to_full"]
    numbers = [row["layer_speedup"], row["accuracy"], found["value"], found["low"], found["high"], row["n"]]
    if not all(abs(number) < _LARGEST for number in numbers):  # also false for NaN
        raise ValueError("a value is not finite, or absurdly large")
    speedup, accuracy, difference, low, high = map(float, numbers[:5])
    return QualityPoint(panel, _printable(str(row["method"])), speedup, accuracy, difference, low, high, int(row["n"]))


def _printable(name: str) -> str:
    """Without the characters that no font, table or SVG can show."""
    return "".join(c if c.isprintable() else "�" for c in name)
