"""A whole evaluation: prompts, plans, answers, scores, report."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdecay.argument_checks import Number, whole_number
from depthdecay.cpu.choose_stack import open_stack
from depthdecay.cpu.packed_weights import check_setting
from depthdecay.engine.plan_choice import DepthSettings
from depthdecay.engine.request import PLAIN_GREEDY
from depthdecay.errors import ArgumentError, DepthDecayError, UnwrittenResultError, one_line
from depthdecay.evaluation.answers import Answerer, Answers, Questions
from depthdecay.evaluation.gsm8k import EXEMPLARS
from depthdecay.evaluation.methods import MethodPlan, checked_speedups, chosen_methods, contenders
from depthdecay.evaluation.report import CostSpeedup, EvaluationReport, EvaluationRow, compare, make_row
from depthdecay.evaluation.task import Score, Task, TaskOptions, open_task
from depthdecay.evaluation.work_file import WorkFile, digest
from depthdecay.files import write_whole
from depthdecay.model.costs import Costs
from depthdecay.model.layers import LayerStack
from depthdecay.model.load import as_loaded
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.prompts import prompt_ids
from depthdecay.plan.compatibility import check_plan
from depthdecay.plan.identity import identity
from depthdecay.plan.plan import Plan
from depthdecay.result_files import require_writable, write_report

if TYPE_CHECKING:
    import torch

_WORK_FORMAT = 1  # version of the batches in work files


@dataclass(frozen=True)
class EvaluationSettings:
    """The methods to compare, and how the questions are asked."""

    methods: tuple[str, ...] = ("full",)
    speedups: tuple[float, ...] = ()
    over_tokens: int = 256
    batch: int = 64
    max_new_tokens: int | None = None  # None: the task's default
    chat: bool | None = None  # None: for models that have a chat template
    allow_other_weights: bool = False
    quantize: str | None = None  # on a CPU


def evaluate(
    model: str | LoadedModel,
    task: str | Task,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    methods: Sequence[str] | None = None,
    speedups: Sequence[Number] = (),
    over_tokens: int = 256,
    data: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    shots: int | None = None,
    subtasks: Sequence[str] | None = None,
    prompts_dir: str | os.PathLike[str] | None = None,
    chat: bool | None = None,
    max_new_tokens: int | None = None,
    batch: int = 64,
    allow_other_weights: bool = False,
    result_file: str | os.PathLike[str] | None = None,
    answers_file: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> EvaluationReport:
    """Run a task with every method, at the same layer budgets, and compare each with full depth.

        report = dd.evaluate("smollm2-135m", "gsm8k", "my-plan", limit=200)
        for row in report.rows:
            print(row.title, row.accuracy, row.layer_speedup, row.difference_to_full)

    `task` is gsm8k, bbh, humaneval, mbpp, squad, or your own `Task`. For a named task, `data`, `limit`, `shots`,
    `subtasks` and `prompts_dir` say where its questions are and which to use. `methods` are some of full, lossless,
    depthdecay (the plan), and other papers' rules, which need a layer budget in `speedups`, averaged over
    `over_tokens`. The default is full depth and the plan as it is. `device`, `dtype` and `trust_remote_code` are for a
    model given by name.

    `result_file` receives the report with machine and versions. Until then every finished batch is saved next to it, so
    that repeating an interrupted call resumes it. `answers_file` receives every answer, one per line.
    """
    names = chosen_methods(methods, speedups, plan is not None)
    budgets = checked_speedups(speedups)
    whole_number("over_tokens", over_tokens, 1)
    whole_number("batch", batch, 1)
    if max_new_tokens is not None:
        whole_number("max_new_tokens", max_new_tokens, 1)
    check_setting(quantize)
    stored = DepthSettings.of(plan).stored()
    asked = _opened(task, TaskOptions(_path(data), limit, shots, _tuple(subtasks), _path(prompts_dir)))
    target, answers = require_writable(result_file), require_writable(answers_file)
    say = progress or (lambda message: None)
    trusted = trust_remote_code or None
    loaded = as_loaded(model, device=device, dtype=dtype, trust_remote_code=trusted, progress=say)
    if loaded.tokenizer is None:
        raise DepthDecayError(f"'{loaded.name}' has no tokenizer, which an evaluation needs; give a model that has one")
    settings = EvaluationSettings(
        names,
        budgets,
        over_tokens,
        batch,
        max_new_tokens,
        chat,
        allow_other_weights,
        loaded.quantize_as_filed() if quantize is None else quantize,
    )
    work = WorkFile(None) if target is None else WorkFile.beside(target)
    told: list[str] = []
    report = run_evaluation(loaded, asked, settings, stored, work=work, tell=told.append, progress=say)
    try:
        _write_answers(answers, told, report)
    finally:
        write_report(target, report)
        work.remove()
    return report


def _write_answers(file: Path | None, told: Sequence[str], report: EvaluationReport) -> None:
    if file is None:
        return
    try:
        write_whole(file, "".join(told))
    except OSError as error:
        raise UnwrittenResultError(f"cannot write the answers to {file}: {one_line(error)}", report) from error


def _opened(task: str | Task, options: TaskOptions) -> Task:
    if isinstance(task, str):
        return open_task(task, options)
    given = [field.name for field in fields(options) if getattr(options, field.name) is not None]
    if given:
        raise ArgumentError(f"{given[0]} is for a task given by name; your own task has its own options", given[0])
    return task


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def run_evaluation(
    loaded: LoadedModel,
    task: Task,
    settings: EvaluationSettings,
    plan: Plan | None = None,
    *,
    work: WorkFile | None = None,
    tell: Callable[[str], None] = lambda answer: None,
    progress: Callable[[str], None] = lambda message: None,
) -> EvaluationReport:
    """Run every method on every question. Batches in the work file are not run again.

    `tell` receives every answer as a line of JSON.
    """
    stack = open_stack(loaded.model, quantize=settings.quantize, origin=loaded.origin, say=progress)
    if plan is not None:
        _refuse_early(plan, stack, settings.allow_other_weights)
    chat = bool(getattr(loaded.tokenizer, "chat_template", None)) if settings.chat is None else settings.chat
    questions = ask_all(loaded, task, settings, chat)
    _require_room(stack, questions)
    methods = contenders(
        settings.methods,
        settings.speedups,
        stack,
        settings.over_tokens,
        plan,
        lambda: block_influence(loaded.tokenizer, stack, plan),
    )
    report = EvaluationReport(loaded.shown_name, task.name, _described(loaded, task, settings, questions, chat, plan))
    answerer = Answerer(
        loaded.model,
        loaded.tokenizer,
        questions,
        work or WorkFile(None),
        _run_key(loaded, questions, settings.quantize),
        settings.quantize,
        loaded.origin,
    )
    for contender in methods:
        say = partial(_say, progress, contender.title)
        answers = answerer.ask(contender.plan, settings.allow_other_weights, say, contender.mode)
        progress(f"{contender.title}: scoring")
        scores = score_all(task, answers)
        for line in _told(contender, answers, scores):
            tell(line)
        report.rows.append(_row(contender, stack, settings, answers, scores, task))
    report.comparisons = compare(report.rows)
    return report


def _say(progress: Callable[[str], None], title: str, message: str) -> None:
    progress(f"{title}: {message}")


def ask_all(loaded: LoadedModel, task: Task, settings: EvaluationSettings, chat: bool) -> Questions:
    """The task's prompts as token ids."""
    prompts = [prompt_ids(loaded.tokenizer, task.prompt(example, chat), chat=chat) for example in task.examples]
    own = loaded.model.generation_config.stop_strings or []
    stop = tuple([own] if isinstance(own, str) else own) + (() if chat else task.stop)
    return Questions(prompts, settings.max_new_tokens or task.max_new_tokens, settings.batch, stop)


def score_all(task: Task, answers: Answers) -> list[Score]:
    """Score in threads, since scoring may run programs."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(task.score, task.examples, [answer.text for answer in answers.answers]))


def block_influence(tokenizer: Any, stack: LayerStack, plan: Plan | None) -> Sequence[float]:
    """ShortGPT's layer scores: from the plan, or else measured on worked examples that are in no test set."""
    kept = plan.notes.get("block_influence") if plan is not None else None
    if kept is not None:
        return _layer_scores(kept, stack.num_layers)
    from depthdecay.calibration.continuations import Continuation
    from depthdecay.calibration.influence import block_influence as measure
    from depthdecay.calibration.recording import Recording

    texts = []
    for asked, answered in EXEMPLARS:
        begun = len(prompt_ids(tokenizer, f"Q: {asked}\nA:", chat=False))
        ids = tuple(prompt_ids(tokenizer, f"Q: {asked}\nA: {answered}", chat=False))
        texts.append(Continuation(ids[:begun], ids[begun:]))
    return measure(Recording.of(stack, texts))


def _layer_scores(kept: Any, num_layers: int) -> list[float]:
    """Validated, since a plan's notes are free-form and may come from anyone."""
    fits = isinstance(kept, list) and len(kept) == num_layers
    if not fits or not all(type(score) in (int, float) and abs(score) <= sys.float_info.max for score in kept):
        raise DepthDecayError(
            f"the plan's note block_influence is {one_line(repr(kept), 60)}; shortgpt needs {num_layers} finite "
            "numbers there, one per layer"
        )
    return [float(score) for score in kept]


def _row(
    contender: MethodPlan,
    stack: LayerStack,
    settings: EvaluationSettings,
    answers: Answers,
    scores: list[Score],
    task: Task,
) -> EvaluationRow:
    # Built once per row: it reads the plan's repairs, and is called for every answer length.
    plan = contender.plan if contender.mode is None else None
    cost: CostSpeedup = (lambda n_tokens: 1.0) if plan is None else partial(Costs(stack, plan).speedup, plan)
    return make_row(contender, stack.num_layers, settings.over_tokens, answers, scores, task.examples, cost)


def _refuse_early(plan: Plan, stack: LayerStack, allow_other_weights: bool) -> None:
    """Refuse another model's plan before full depth has run for an hour; the engine repeats any warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_plan(plan, stack.model, allow_other_weights=allow_other_weights)


def _require_room(stack: LayerStack, questions: Questions) -> None:
    longest, limit = max(map(len, questions.prompts)), stack.context_limit()
    if limit is not None and longest + questions.max_new_tokens > limit:
        raise ArgumentError(
            f"the longest prompt has {longest} tokens, which with {questions.max_new_tokens} new ones exceeds the "
            f"model's context of {limit}; use fewer max_new_tokens or shots",
            *("max_new_tokens", "shots"),
        )


def _run_key(loaded: LoadedModel, questions: Questions, quantize: str | None) -> str:
    """A digest of everything except the plan that affects an answer or its timing."""
    model = loaded.model
    place = [str(model.dtype), model.device.type, *([] if quantize is None else [quantize])]
    return digest([_WORK_FORMAT, identity(model).to_dict(), place, asdict(questions), PLAIN_GREEDY])


def _described(
    loaded: LoadedModel, task: Task, settings: EvaluationSettings, questions: Questions, chat: bool, plan: Plan | None
) -> dict[str, Any]:
    data = task.options.data
    return {
        "data": Path(data).name if data is not None else None,
        "data_digest": digest([dict(example.data) for example in task.examples]),
        "questions": len(task.examples),
        "asked": task.describe(chat),
        "max_new_tokens": questions.max_new_tokens,
        "stop": list(questions.stop),
        "decoding": "greedy",
        "batch": questions.batch,
        "over_tokens": settings.over_tokens,
        "calibrated_over_tokens": None if plan is None else plan.notes.get("over_tokens"),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
        "quantize": settings.quantize,
    }


def _told(contender: MethodPlan, answers: Answers, scores: Sequence[Score]) -> list[str]:
    """Every answer as a line of JSON, for reading what was scored."""
    lines = []
    for number, (answer, score) in enumerate(zip(answers.answers, scores, strict=True)):
        line = {"method": contender.title, "question": number, "correct": score.correct, **asdict(answer)}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return lines
