"""A whole evaluation on a tiny model: the same answers as the engine's, counted, saved and compared."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from typer.testing import CliRunner

import depthdecay as dd
from depthdecay import Plan
from depthdecay.cli import app
from depthdecay.engine.engine import Engine
from depthdecay.engine.result import Result
from depthdecay.errors import DepthDecayError
from depthdecay.evaluation import evaluate as module
from depthdecay.evaluation.answers import (
    Answerer,
    Answers,
    PromptBatch,
    Questions,
    TaskAnswer,
    _account,
    end_tokens,
    first_stop,
)
from depthdecay.evaluation.evaluate import EvaluationSettings, block_influence, run_evaluation
from depthdecay.evaluation.methods import MethodPlan, checked_speedups, chosen_methods
from depthdecay.evaluation.report import EvaluationReport, compare, executed_cost_speedup, make_row
from depthdecay.evaluation.task import Example, Score, Task, TaskOptions
from depthdecay.evaluation.work_file import WorkFile
from depthdecay.model.layers import LayerStack
from depthdecay.model.load import load
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.prompts import prompt_ids
from depthdecay.model.repairs import REPAIRS_FILE, Repair, Repairs, reached_depths
from depthdecay.plan.ladder import runs_of

LAYERS = 8
PEERS = ("middle-out", "skipdecode", "unified", "shortgpt", "early-exit", "constant")


class Letters(Task):
    """A toy task: correct if the answer has more lower-case letters than the question has characters."""

    name = "letters"
    max_new_tokens = 12
    stop = ("e",)

    def load(self) -> list[Example]:
        words = ["one", "twenty-two", "three hundred", "4", "five five five", "six", "seven of nine"]
        return [Example({"word": word}, "long" if len(word) > 5 else "short") for word in words]

    def prompt(self, example: Example, chat: bool) -> str:
        return f"Say {example.data['word']}"

    def score(self, example: Example, text: str) -> Score:
        share = sum(c.islower() for c in text) / 12
        return Score(share > 0.2, {"share": share})


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def tiny(tiny_folder: str) -> LoadedModel:
    return load(tiny_folder, device="cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of prompts in each call of the engine."""
    seen: list[int] = []
    whole = Engine.generate

    def counted(engine: Engine, prompts: Any, *arguments: Any, **settings: Any) -> Any:
        seen.append(len(prompts))
        return whole(engine, prompts, *arguments, **settings)

    monkeypatch.setattr(Engine, "generate", counted)
    return seen


SETTINGS = EvaluationSettings(("full", "depthdecay", *PEERS), (1.5,), over_tokens=12, batch=3)
OWN_PLAN = Plan.decay(LAYERS, 0.9, drop_order=[4, 3, 5, 2])


def test_every_method_is_run_at_the_budget_and_compared(tiny: LoadedModel) -> None:
    report = run_evaluation(tiny, Letters(TaskOptions()), SETTINGS, OWN_PLAN)
    rows = {row.method: row for row in report.rows}
    assert list(rows) == ["full", "depthdecay", *PEERS]
    assert rows["full"].layers_executed == LAYERS * rows["full"].tokens
    assert rows["full"].difference_to_full is None
    for row in report.rows[1:]:
        assert row.planned_layer_speedup == pytest.approx(1.5, rel=0.15)
        assert row.layer_speedup == pytest.approx(LAYERS * row.tokens / row.layers_executed)
        assert row.layer_speedup > 1
        assert row.difference_to_full is not None
        assert row.difference_to_full["value"] == pytest.approx(row.accuracy - rows["full"].accuracy)
        assert "p" in row.difference_to_full
        assert set(row.measures["share"]["difference_to_full"]) >= {"value", "low", "high"}
        assert set(row.groups) == {"short", "long"}
        assert row.group_mean == pytest.approx((row.groups["short"]["accuracy"] + row.groups["long"]["accuracy"]) / 2)
    for row in report.rows:
        assert len(row.correct) == row.n == 7
        assert row.accuracy == row.correct.count("1") / 7
    assert [found["peer"] for found in report.comparisons] == list(PEERS)
    json.dumps(report.to_dict())


def test_answers_are_the_engines_own_whatever_the_batch(tiny: LoadedModel, calls: list[int]) -> None:
    task = Letters(TaskOptions())
    prompts = [prompt_ids(tiny.tokenizer, task.prompt(example, True)) for example in task.examples]
    plan = Plan.for_speedup(LAYERS, 1.5, over_tokens=12)
    engine = Engine(tiny.model, tiny.tokenizer, plan)
    alone = [engine.generate([prompt], 12, do_sample=False)[0] for prompt in prompts]
    calls.clear()
    for batch in (1, 3, 64):
        asked = Answerer(tiny.model, tiny.tokenizer, Questions(prompts, 12, batch), WorkFile(None), "").ask(plan)
        assert [answer.text for answer in asked.answers] == [result.text for result in alone]
        assert [answer.layers for answer in asked.answers] == [result.layers_executed for result in alone]
        assert [batch.is_cold for batch in asked.batches] == [True] + [False] * (len(asked.batches) - 1)
    # The last of three batches is padded, and no batch is larger than the number of questions.
    assert calls == [1] * 7 + [3] * 3 + [7]


def test_longest_prompts_come_first() -> None:
    questions = Questions([[1], [1, 2, 3], [1, 2], [4, 5, 6]], 5, batch=2)
    assert list(questions.batches()) == [[1, 3], [2, 0]]


def test_a_stop_string_ends_text_and_count_as_in_the_engine(tiny: LoadedModel) -> None:
    """It is searched for afterwards, with the same result as if the engine had checked after every token."""
    plan = Plan.for_speedup(LAYERS, 1.3, over_tokens=12)
    engine = Engine(tiny.model, tiny.tokenizer, plan)
    prompts = [[9, 40, 77], [100, 101], [5, 6, 7, 8], [200, 9]]
    free = [result.text for result in engine.generate(prompts, 30, do_sample=False)]
    # Whole characters only: a random model's bytes may be invalid, and their rendering depends on what follows.
    stop = tuple(next(c for c in text[place:] if c.isascii()) for text, place in ((free[0], 4), (free[1], 7)))
    wanted = engine.generate(prompts, 30, do_sample=False, stop=list(stop))
    asked = Answerer(tiny.model, tiny.tokenizer, Questions(prompts, 30, 4, stop), WorkFile(None), "").ask(plan)
    assert [answer.text for answer in asked.answers] == [result.text for result in wanted]
    assert [answer.tokens for answer in asked.answers] == [len(result.token_ids) for result in wanted]
    assert [answer.layers for answer in asked.answers] == [result.layers_executed for result in wanted]
    assert any(len(result.token_ids) < 30 for result in wanted)


def test_a_token_that_holds_a_stop_string_ends_its_row(tiny: LoadedModel) -> None:
    ends = end_tokens(tiny.model, tiny.tokenizer, ("e", "ab"))
    assert [tiny.tokenizer.decode([token]) for token in ends] == ["e"]  # type: ignore[union-attr]
    assert end_tokens(tiny.model, tiny.tokenizer, ()) == [-1]
    assert first_stop("xaby", ("y", "ab")) == 1
    assert first_stop("xyz", ("a",)) is None


# Resuming after an interruption


def test_an_interrupted_run_goes_on(tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, few = (
        Letters(TaskOptions()),
        EvaluationSettings(("full", "depthdecay", "unified"), (1.5,), over_tokens=12, batch=3),
    )
    undisturbed = run_evaluation(tiny, task, few, OWN_PLAN)
    whole, number = Engine.generate, 0

    def interrupted(engine: Engine, *arguments: Any, **settings: Any) -> Any:
        nonlocal number
        number += 1
        if number == 6:
            raise KeyboardInterrupt
        return whole(engine, *arguments, **settings)

    monkeypatch.setattr(Engine, "generate", interrupted)
    result = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(tiny, task, few, OWN_PLAN, work=WorkFile.beside(result))
    file = tmp_path / "r.json.partial.jsonl"
    assert len(file.read_text().splitlines()) == 5
    with file.open("a") as torn:  # as if killed in the middle of a line
        torn.write('{"key": "x", "numb')
    again = run_evaluation(tiny, task, few, OWN_PLAN, work=WorkFile.beside(result))
    assert number == 6 + 3 * 3 - 5
    assert [row.correct for row in again.rows] == [row.correct for row in undisturbed.rows]
    assert [row.layers_executed for row in again.rows] == [row.layers_executed for row in undisturbed.rows]
    # Everything is saved now, so a third run generates nothing.
    run_evaluation(tiny, task, few, OWN_PLAN, work=WorkFile.beside(result))
    assert number == 6 + 3 * 3 - 5


@pytest.mark.parametrize("change", ["plan", "tokens", "batch", "data", "weights"])
def test_nothing_is_taken_over_from_another_run(
    tiny: LoadedModel, tmp_path: Path, calls: list[int], change: str
) -> None:
    work = tmp_path / "w.jsonl"
    task, settings, plan = (
        Letters(TaskOptions()),
        EvaluationSettings(("depthdecay",), batch=4, max_new_tokens=5),
        OWN_PLAN,
    )
    run_evaluation(tiny, task, settings, plan, work=WorkFile(work))
    calls.clear()
    run_evaluation(tiny, task, settings, plan, work=WorkFile(work))
    assert calls == []
    if change == "plan":
        plan = Plan.decay(LAYERS, 0.8, drop_order=[4, 3, 5, 2])
    elif change == "tokens":
        settings = EvaluationSettings(("depthdecay",), batch=4, max_new_tokens=6)
    elif change == "batch":
        settings = EvaluationSettings(("depthdecay",), batch=3, max_new_tokens=5)
    elif change == "data":
        task = Letters(TaskOptions(limit=2))
    else:
        other = load(save_tiny_chat_model(tmp_path / "other", seed=1, max_position_embeddings=2048), device="cpu")
        tiny = other
    run_evaluation(tiny, task, settings, plan, work=WorkFile(work))
    assert calls


# Figures


def test_cost_is_weighed_by_steps() -> None:
    """Answers of 3 and 11 tokens take 2 and 10 steps, at a half and a fifth of the cost: 12 / (2/2 + 10/5)."""
    cost = {3: 2.0, 11: 5.0}
    assert executed_cost_speedup([3, 11, 1], lambda length: cost[length]) == pytest.approx(4.0)
    assert executed_cost_speedup([1, 1], lambda length: 1 / 0) == 1.0


def test_cold_batches_are_not_timed(tiny: LoadedModel) -> None:
    def row(method: str, seconds: float) -> Any:
        answer = TaskAnswer("x", 11, 88)
        batches = [PromptBatch([answer], 10, 100.0, 1.0, True), PromptBatch([answer], 10, seconds, 1.0, False)]
        scores, examples = [Score(True), Score(False)], [Example({}), Example({})]
        contender = MethodPlan(method, None, None)
        return make_row(contender, 8, 256, Answers([answer, answer], batches), scores, examples, lambda n: 1.0)

    full, other = row("full", 2.0), row("unified", 1.0)
    compare([full, other])
    assert full.ms_per_step == pytest.approx(200)
    assert full.tokens_per_second == pytest.approx(5)
    assert full.decode_seconds == 102
    assert other.wall_clock_speedup == pytest.approx(2)


def test_batches_are_compared_one_by_one() -> None:
    def row(method: str, seconds: list[float], cold: int) -> Any:
        answer = TaskAnswer("x", 11, 88)
        batches = [PromptBatch([answer], 10, s, 1.0, number == cold) for number, s in enumerate(seconds)]
        many = [answer] * len(seconds)
        scores, examples = [Score(True)] * len(seconds), [Example({})] * len(seconds)
        contender = MethodPlan(method, None, None)
        return make_row(contender, 8, 256, Answers(many, batches), scores, examples, lambda n: 1.0)

    full, other = row("full", [9.0, 4.0, 2.0, 1.0], cold=0), row("unified", [5.0, 2.0, 9.0, 0.25], cold=2)
    compare([full, other])
    assert other.wall_clock_speedup == pytest.approx((4 / 2 + 1 / 0.25) / 2)
    resumed = [row("full", [9.0, 4.0], cold=0), row("unified", [5.0, 2.0], cold=1)]
    compare(resumed)
    assert resumed[1].wall_clock_speedup == pytest.approx(4 / 5)  # no batch is warm in both


def test_layer_scores_come_from_the_plan_first(tiny: LoadedModel) -> None:
    stack = LayerStack.of(tiny.model)
    noted = Plan(OWN_PLAN.ladder, OWN_PLAN.schedule, "decay", notes={"block_influence": [1, 2, 3, 4, 5, 6, 7, 8]})
    assert block_influence(tiny.tokenizer, stack, noted) == [1, 2, 3, 4, 5, 6, 7, 8]
    measured = block_influence(tiny.tokenizer, stack, OWN_PLAN)
    assert len(measured) == LAYERS
    assert all(0 < score < 2 for score in measured)


@pytest.mark.parametrize(
    "noted",
    ["high", 7, {"0": 1.0}, [0.1] * (LAYERS - 1), [0.1] * LAYERS + [0.1], ["0.1"] * LAYERS, [None] * LAYERS]
    + [[0.1] * (LAYERS - 1) + [odd] for odd in (math.nan, math.inf, 10**400, True, [1.0])],
)
def test_layer_scores_that_are_none_are_refused_before_anything_runs(
    tiny: LoadedModel, calls: list[int], noted: Any
) -> None:
    plan = replace(OWN_PLAN, notes={"block_influence": noted})
    settings = EvaluationSettings(("full", "shortgpt"), (1.5,), over_tokens=12)
    with pytest.raises(DepthDecayError, match=r"block_influence is .* shortgpt needs 8 finite numbers") as refused:
        run_evaluation(tiny, Letters(TaskOptions()), settings, plan)
    assert "\n" not in str(refused.value)
    assert calls == []


def test_repairs_are_read_once_a_row_whatever_the_lengths(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from depthdecay.model.costs import cost_speedup

    def nothing(start: int, end: int) -> Repair:
        return Repair(start, end, torch.zeros(1, 32), torch.zeros(32, 1), torch.zeros(32))

    depths = reached_depths(OWN_PLAN)
    maps = {depth: tuple(nothing(*run) for run in runs_of(OWN_PLAN.dropped(depth))) for depth in depths}
    Repairs(maps).save(tmp_path / REPAIRS_FILE)
    replace(OWN_PLAN, repairs=REPAIRS_FILE).save(tmp_path)
    plan, stack = Plan.load(tmp_path), LayerStack.of(tiny.model)
    task = Letters(TaskOptions())
    answers = [TaskAnswer("", length, 8 * length) for length in range(2, 9)]
    wanted = executed_cost_speedup(range(2, 9), lambda length: cost_speedup(plan, stack, length))
    read: list[Path] = []
    load_repairs = Repairs.load

    def counted(path: Path, *arguments: Any) -> Repairs:
        read.append(path)
        return load_repairs(path, *arguments)

    monkeypatch.setattr(Repairs, "load", counted)
    found = Answers(answers, [PromptBatch(answers, 7, 1.0, 1.0, False)])
    scores = [Score(True)] * 7
    row = module._row(MethodPlan("depthdecay", None, plan), stack, EvaluationSettings(), found, scores, task)
    assert len(read) == 1
    assert row.cost_speedup == pytest.approx(wanted)


# Lossless


@pytest.mark.parametrize("plan", [None, OWN_PLAN])
def test_lossless_answers_as_full_depth_does_once_for_all_budgets(tiny: LoadedModel, plan: Plan | None) -> None:
    settings = EvaluationSettings(
        ("unified", "lossless", "full"), (1.2, 1.5), over_tokens=12, batch=3, max_new_tokens=40
    )
    report = run_evaluation(tiny, Letters(TaskOptions()), settings, plan)
    assert [row.title for row in report.rows] == ["full", "lossless", "unified 1.2x", "unified 1.5x"]
    full, lossless, unified = report.rows[:3]
    assert (lossless.correct, lossless.tokens, lossless.measures["share"]["values"]) == (
        full.correct,
        full.tokens,
        full.measures["share"]["values"],
    )
    assert lossless.difference_to_full is not None
    assert lossless.difference_to_full["value"] == 0
    assert lossless.acceptance is not None
    assert 0 <= lossless.acceptance <= 1
    assert lossless.verifications
    assert lossless.verifications <= lossless.tokens
    assert lossless.layer_speedup == pytest.approx(LAYERS * lossless.tokens / lossless.layers_executed)
    assert (lossless.cost_speedup, lossless.planned_layer_speedup) == (None, None)
    assert ("drop" in lossless.plan) == (plan is not None)
    assert (full.acceptance, full.verifications, unified.acceptance) == (None, None, None)


def test_a_cut_lossless_answer_took_its_share_of_the_passes() -> None:
    """A pass yields several tokens, so its cost cannot be attributed to single ones."""
    result = Result(token_ids=list(range(10)), depths=[8] * 10, num_layers=8, mode="lossless")
    result.layer_passes, result.drafted, result.accepted, result.verifications = 60, 8, 6, 4
    assert _account(result, "whole", 10) == TaskAnswer("whole", 10, 60, 8, 6, 4)
    assert _account(result, "half", 5) == TaskAnswer("half", 5, 30, 4, 3, 2)
    decayed = Result(token_ids=[1, 2, 3], depths=[8, 7, 6], num_layers=8, mode="decay")
    assert _account(decayed, "two", 2) == TaskAnswer("two", 2, 15)


def test_lossless_and_full_answers_are_kept_apart(tiny: LoadedModel, tmp_path: Path, calls: list[int]) -> None:
    work, task = tmp_path / "w.jsonl", Letters(TaskOptions())
    run_evaluation(tiny, task, EvaluationSettings(("full",), batch=7, max_new_tokens=5), work=WorkFile(work))
    first = run_evaluation(
        tiny, task, EvaluationSettings(("lossless",), batch=7, max_new_tokens=5), work=WorkFile(work)
    )
    assert calls == [7, 7]
    again = run_evaluation(
        tiny, task, EvaluationSettings(("full", "lossless"), batch=7, max_new_tokens=5), work=WorkFile(work)
    )
    assert calls == [7, 7]
    assert again.rows[1].verifications == first.rows[0].verifications


def test_lossless_is_no_peer_of_ours(tiny: LoadedModel) -> None:
    report = run_evaluation(
        tiny, Letters(TaskOptions()), EvaluationSettings(("full", "lossless", "depthdecay")), OWN_PLAN
    )
    assert report.comparisons == []
    assert chosen_methods(["lossless"], (), has_plan=False) == ("lossless",)


# Which methods run


def test_what_is_run_by_default() -> None:
    assert chosen_methods(None, (), has_plan=True) == ("full", "depthdecay")
    assert chosen_methods(None, (), has_plan=False) == ("full",)
    assert chosen_methods(None, ["1.5"], has_plan=False) == ("full", "middle-out")
    assert checked_speedups(["1.5", "1.25", "1.50"]) == (1.5, 1.25)


def test_a_plan_without_budgets_is_run_as_it_stands(tiny: LoadedModel) -> None:
    report = run_evaluation(
        tiny, Letters(TaskOptions()), EvaluationSettings(("full", "depthdecay"), over_tokens=12), OWN_PLAN
    )
    assert [(row.method, row.asked_speedup) for row in report.rows] == [("full", None), ("depthdecay", None)]
    assert report.rows[1].plan == OWN_PLAN.describe()


def test_a_plan_for_another_model_is_refused_before_anything_runs(tiny: LoadedModel, calls: list[int]) -> None:
    with pytest.raises(DepthDecayError, match="for 12 layers"):
        run_evaluation(tiny, Letters(TaskOptions()), EvaluationSettings(("full", "depthdecay")), Plan.decay(12, 0.9))
    assert calls == []


def test_a_prompt_too_long_for_the_context_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(DepthDecayError, match=r"longest prompt .* context of 2048"):
        run_evaluation(tiny, Letters(TaskOptions()), EvaluationSettings(max_new_tokens=2040))


# From Python


def test_a_task_of_ones_own_is_evaluated_by_a_plain_call(tiny: LoadedModel) -> None:
    own = dd.evaluate(tiny, Letters(TaskOptions()), OWN_PLAN, over_tokens=12, batch=3)
    assert [row.title for row in own.rows] == ["full", "depthdecay"]
    settings = EvaluationSettings(("full", "depthdecay"), over_tokens=12, batch=3)
    assert untimed(own) == untimed(run_evaluation(tiny, Letters(TaskOptions()), settings, OWN_PLAN))


def untimed(report: EvaluationReport) -> dict[str, Any]:
    """A report without its times."""
    timed = ("seconds", "ms_per_step", "tokens_per_second", "wall_clock")
    values = report.to_dict()
    rows = [{k: v for k, v in row.items() if not any(word in k for word in timed)} for row in values["rows"]]
    return values | {"rows": rows}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"methods": ["best"]}, "no method 'best'"),
        ({"methods": ["depthdecay"]}, "give it with plan"),
        ({"methods": ["unified"]}, "add speedups"),
        ({"speedups": [0.5]}, "speedups contains 0.5"),
        ({"over_tokens": 0}, "over_tokens is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"limit": 3}, "limit is for a task given by name"),
        ({"quantize": "int3"}, "quantize is 'int3'"),
        ({"plan": "no-such-plan.json"}, "no plan at"),
        ({"result_file": "/no/such/folder/x.json"}, "cannot write"),
    ],
)
def test_bad_values_are_refused_by_pythons_names_before_a_model_is_loaded(
    given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DepthDecayError, match=complaint) as caught:
        dd.evaluate("no/such-model", Letters(TaskOptions()), **given)
    assert "--" not in str(caught.value)


# The command


def test_the_command_only_calls_evaluate(
    tiny_folder: str, gsm8k: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", tiny_folder, "--device", "cpu", "--task", "gsm8k", "--data", gsm8k, "--limit", "3", "-n", "6"]
    result = run(*words, "--methods", "full,unified", "--speedups", "1.5", "--json", str(tmp_path / "typed.json"))
    assert result.exit_code == 0, result.output
    given: dict[str, Any] = {"limit": 3, "max_new_tokens": 6, "methods": ["full", "unified"], "speedups": [1.5]}
    called = tmp_path / "called.json"
    report = dd.evaluate(tiny_folder, "gsm8k", data=gsm8k, device="cpu", result_file=called, **given)
    typed = json.loads((tmp_path / "typed.json").read_text())
    assert [row["correct"] for row in typed["rows"]] == [row.correct for row in report.rows]
    assert [row["layers_executed"] for row in typed["rows"]] == [row.layers_executed for row in report.rows]
    assert typed["settings"] == report.settings == json.loads(called.read_text())["settings"]

    seen: list[Any] = []

    def noted(*given: Any, **named: Any) -> None:
        seen.append((given, named))
        raise DepthDecayError("that is enough")

    monkeypatch.setattr(module, "evaluate", noted)
    assert run(*words, "--mode", "lossless", "--over", "12").exit_code == 2
    assert seen[0][0][0] == tiny_folder
    assert seen[0][1]["methods"] == ("full", "lossless")
    assert seen[0][1]["over_tokens"] == 12


def test_help_and_refusals_do_not_import_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from depthdecay.cli import app\n"
        "assert CliRunner().invoke(app, ['eval', '--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['eval', '--task', 'chess']).exit_code == 2\n"
        "assert not {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    path = tmp_path / "test.jsonl"
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments])


def test_the_command_writes_a_result_file(tiny_folder: str, gsm8k: str, tmp_path: Path) -> None:
    plan = OWN_PLAN.save(tmp_path / "plan.json")
    target, answers = tmp_path / "result.json", tmp_path / "answers.jsonl"
    words = ["--model", tiny_folder, "--task", "gsm8k", "--data", gsm8k, "--plan", str(plan), "--limit", "3"]
    budget = [
        "--methods",
        "full,depthdecay,unified",
        "--speedups",
        "1.2,1.5",
        "--over",
        "12",
        "-n",
        "6",
        "--batch",
        "2",
    ]
    result = run(*words, *budget, "--json", str(target), "--answers", str(answers))
    assert result.exit_code == 0, result.output
    assert "unified 1.5x" in result.stdout
    assert "full: batch 2 of 2" in result.stderr
    written = json.loads(target.read_text())
    assert {"command", "machine", "versions", "commit", "model", "task", "settings"} <= written.keys()
    assert [(row["method"], row["asked_speedup"]) for row in written["rows"]] == [
        ("full", None),
        ("depthdecay", 1.2),
        ("unified", 1.2),
        ("depthdecay", 1.5),
        ("unified", 1.5),
    ]
    assert written["settings"]["asked"] == "0-shot chat"
    assert [found["peer"] for found in written["comparisons"]] == ["unified", "unified"]
    assert str(tmp_path) not in target.read_text()
    assert not list(tmp_path.glob("*.partial.jsonl"))
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 5 * 3
    assert [line["correct"] for line in lines[:3]] == [digit == "1" for digit in written["rows"][0]["correct"]]


def test_the_command_shows_how_many_drafts_were_accepted(tiny_folder: str, gsm8k: str, tmp_path: Path) -> None:
    words = ["--model", tiny_folder, "--task", "gsm8k", "--data", gsm8k, "-n", "6", "--json", str(tmp_path / "r.json")]
    result = run(*words, "--methods", "full,lossless")
    assert result.exit_code == 0, result.output
    assert "accepted" in result.stdout
    full, lossless = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert full["acceptance"] is None
    assert f"{lossless['acceptance']:.0%}" in result.stdout
    assert lossless["accuracy"] == full["accuracy"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "chess"], "no task 'chess'"),
        (["--methods", "best"], "no method 'best'"),
        (["--methods", "depthdecay"], "give it with --plan"),
        (["--methods", "unified"], "add --speedups"),
        (["--speedups", "fast"], "--speedups is 'fast'"),
        (["--speedups", "0.5"], "contains 0.5"),
        (["--limit", "0"], "--limit is 0"),
        (["--batch", "0"], "--batch is 0"),
        (["--over", "0"], "--over is 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--data", "/no/such/file"], "cannot be read"),
        (["--data", "~no-such-user/x"], "'~no-such-user/x' begins with the home of a user"),
        (["--json", "~no-such-user/x"], "'~no-such-user/x' begins with the home of a user"),
        (["--answers", "~no-such-user/x"], "'~no-such-user/x' begins with the home of a user"),
        (["--plan", "/no/such/plan"], "plan"),
        (["--json", "/no/such/folder/x.json"], "cannot write"),
        (["--subtasks", "snarks"], "has no option --subtasks"),
        (["--speedups", "40", "--methods", "unified"], "cannot be reached"),
    ],
)
def test_mistakes_are_one_line_and_code_2(tiny_folder: str, gsm8k: str, words: list[str], message: str) -> None:
    given = {"--model": tiny_folder, "--task": "gsm8k", "--data": gsm8k} | dict(
        zip(words[::2], words[1::2], strict=True)
    )
    result = run(*(word for pair in given.items() for word in pair))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    *progress, _mistake = result.stderr.splitlines()
    assert all(line.startswith("loading ") for line in progress)
    assert result.stdout == ""


def test_figures_are_shown_also_where_their_files_cannot_be_written(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may fill up during a long evaluation."""

    def full(path: Path, content: str | bytes) -> Path:
        raise OSError(28, "No space left on device", str(path))

    questions = tmp_path / "gsm.jsonl"
    questions.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 2)
    words = ["eval", "--task", "gsm8k", "--data", str(questions), "-m", tiny_folder, "--device", "cpu", "-n", "3"]
    files = ["--json", str(tmp_path / "result.json"), "--answers", str(tmp_path / "answers.jsonl")]
    for writer in ("result_files", "evaluation.evaluate"):
        with monkeypatch.context() as disk:
            disk.setattr(f"depthdecay.{writer}.write_whole", full)
            result = CliRunner().invoke(app, [*words, *files])
        assert result.exit_code == 2
        assert "decode" in result.stdout
        assert "full" in result.stdout
        assert result.stderr.splitlines()[-1].startswith("depthdecay: cannot write")
        assert "No space left on device" in result.stderr
    assert (tmp_path / "result.json").is_file()  # failing to write the answers did not lose the figures


def test_a_batch_that_takes_long_is_told_of(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    settings = EvaluationSettings(("full",), batch=7, max_new_tokens=5)
    run_evaluation(tiny, Letters(TaskOptions()), settings, progress=said.append)
    assert said == ["full: batch 1 of 1", "full: scoring"]
    monkeypatch.setattr("depthdecay.evaluation.answers.TELL_EVERY_SECONDS", 0.0)
    said.clear()
    run_evaluation(tiny, Letters(TaskOptions()), settings, progress=said.append)
    assert "full: batch 1 of 1, 5 of at most 5 tokens" in said


def test_an_interrupted_evaluation_says_how_to_go_on(
    tiny_folder: str, gsm8k: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_evaluation", interrupted)
    words = ["--model", tiny_folder, "--device", "cpu", "--task", "gsm8k", "--data", gsm8k]
    kept = run(*words, "--json", str(tmp_path / "result.json"))
    assert kept.exit_code == 130
    assert kept.stderr.endswith("interrupted; the same command resumes after the finished batches\n")
    assert run(*words).stderr.endswith("depthdecay: interrupted\n")  # nothing was saved


@pytest.mark.parametrize(("calibrated", "told"), [(None, False), (12, False), (96, True)])
def test_the_table_says_over_how_many_tokens_layers_are_planned(
    tiny_folder: str, gsm8k: str, tmp_path: Path, calibrated: int | None, told: bool
) -> None:
    notes = {} if calibrated is None else {"over_tokens": calibrated}
    plan = str(replace(OWN_PLAN, notes=notes).save(tmp_path / "plan.json"))
    words = ["--model", tiny_folder, "--device", "cpu", "--task", "gsm8k", "--data", gsm8k, "--limit", "2", "-n", "4"]
    result = run(*words, "--plan", plan, "--over", "12")
    assert result.exit_code == 0, result.output
    assert "Layers planned: over 12 tokens (--over)" in result.stdout
    assert ("The plan was calibrated for 96 tokens" in result.stdout) == told
