"""The analysis measures what its charts show, and bad input is one line, before anything slow runs."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS, PROMPTS, tiny_model
from typer.testing import CliRunner

from depthdecay import Plan
from depthdecay.bench.analysis import Analysis, analyze, charts, depth_curves, fitting_prompts, read_quality
from depthdecay.cli import app
from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError
from depthdecay.model.repairs import REPAIRS_FILE, Repair, Repairs, reached_depths
from depthdecay.plan.ladder import runs_of

NEW_TOKENS = 10
PLAN = Plan.decay(LAYERS, "0.9", drop_order=[5, 2, 3])


def row(method: str, speedup: float, difference: float | None, **changes: Any) -> dict[str, Any]:
    found = None if difference is None else {"value": difference, "low": difference - 0.1, "high": difference + 0.1}
    made = {"method": method, "layer_speedup": speedup, "accuracy": 0.5 + (difference or 0), "n": 40}
    return made | {"difference_to_full": found} | changes


RESULT = {"model": "tiny", "task": "gsm8k", "rows": [row("full", 1.0, None), row("skipdecode", 1.25, -0.2)]}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), plan=PLAN)


@pytest.fixture(scope="module")
def analysis(engine: Engine) -> Analysis:
    return analyze(engine, PROMPTS, NEW_TOKENS)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["analyze", *arguments])


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("depthdecay: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def test_perplexity_and_entropy_are_the_full_models_on_its_own_text(engine: Engine, analysis: Analysis) -> None:
    """Compared with one plain pass over prompt and answer, without a KV cache."""
    surprise, entropy = torch.zeros(NEW_TOKENS - 1), torch.zeros(NEW_TOKENS - 1)
    for prompt in PROMPTS:
        answer = engine.generate([prompt], NEW_TOKENS, mode="full", do_sample=False)[0].token_ids
        with torch.no_grad():
            logits = engine.stack.model(torch.tensor([prompt + answer])).logits[0]
        likely = logits[len(prompt) : len(prompt) + NEW_TOKENS - 1].log_softmax(-1)  # T_0 … predict T_1 …
        surprise -= likely.gather(-1, torch.tensor(answer[1:]).unsqueeze(-1)).squeeze(-1) / len(PROMPTS)
        entropy -= (likely.exp() * likely).sum(-1) / len(PROMPTS)
    assert analysis.perplexity_by_position == pytest.approx(surprise.exp().tolist(), rel=1e-3)
    assert analysis.entropy_by_position == pytest.approx(entropy.tolist(), rel=1e-3)


def test_every_layer_is_measured_at_every_position(analysis: Analysis) -> None:
    assert analysis.prompts == len(PROMPTS)
    assert analysis.tokens == len(PROMPTS) * (NEW_TOKENS - 1)
    assert len(analysis.influence) == len(analysis.influence_by_position) == LAYERS
    for mean, by_position in zip(analysis.influence, analysis.influence_by_position, strict=True):
        assert len(by_position) == NEW_TOKENS - 1
        assert mean == pytest.approx(sum(by_position) / len(by_position))  # all answers have the same length here
        assert mean > 0
    json.dumps(analysis.to_dict(), allow_nan=False)


def test_plan_stands_beside_the_unmeasured_order(analysis: Analysis) -> None:
    assert set(analysis.plan_kl_by_position) == {"plain", "middle-out"}  # this plan has no repairs
    for label, values in analysis.plan_kl_by_position.items():
        assert analysis.plan_kl[label] == pytest.approx(sum(values) / len(values))
    # At the first token below full depth, only layer 5 is dropped.
    assert PLAN.dropped(PLAN.depth(1)) == (5,)
    assert analysis.plan_kl_by_position["plain"][0] == pytest.approx(analysis.influence_by_position[5][0], rel=1e-3)


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_repairs_stand_beside_plain_dropping(bias: float, tmp_path: Path) -> None:
    def nothing_but_bias(start: int, end: int) -> Repair:
        return Repair(start, end, torch.zeros(1, 32), torch.zeros(32, 1), torch.full((32,), bias))

    maps = {d: tuple(nothing_but_bias(*run) for run in runs_of(PLAN.dropped(d))) for d in reached_depths(PLAN)}
    Repairs(maps).save(tmp_path / REPAIRS_FILE)
    replace(PLAN, repairs=REPAIRS_FILE).save(tmp_path)
    made = analyze(Engine(tiny_model(), plan=Plan.load(tmp_path)), PROMPTS[:1], 6)
    assert list(made.plan_kl) == ["repaired", "plain", "middle-out"]
    same = made.plan_kl_by_position["repaired"] == pytest.approx(made.plan_kl_by_position["plain"])
    assert same == (bias == 0)


def test_positions_that_few_texts_reach_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from depthdecay.calibration import continuations
    from depthdecay.calibration.continuations import Continuation

    lengths = [4, 4, 5, 5, 9]
    texts = [Continuation((5, 6, 7), tuple(range(10, 10 + length))) for length in lengths]
    monkeypatch.setattr(continuations, "continue_prompts", lambda *_, **__: texts)
    made = analyze(Engine(tiny_model()), [[5, 6, 7]] * len(lengths), 9)
    assert (
        len(made.perplexity_by_position) == len(made.influence_by_position[0]) == 4
    )  # after that, only one of five texts goes on
    assert made.tokens == sum(lengths) - len(lengths)  # the means still count every token
    assert made.plan_kl == {}


def test_charts_follow_from_the_analysis(analysis: Analysis) -> None:
    names = [chart.name for chart in charts(analysis, PLAN, NEW_TOKENS)]
    assert names == [
        "perplexity_by_position",
        "layer_influence",
        "layer_influence_by_position",
        "depth_by_token",
        "kl_by_position",
    ]


def test_depth_curves_leave_out_what_cannot_be_reached() -> None:
    curves = depth_curves(30, Plan.decay(30, "0.99"), 100)
    assert list(curves) == ["1.1×", "1.25×", "1.5×", "2×", "this plan"]
    assert curves["this plan"] == Plan.decay(30, "0.99").depths(100)
    assert list(depth_curves(6, None, 100)) == ["1.1×", "1.25×"]  # four core layers of six
    assert depth_curves(2, None, 3) == {"full": (2, 2, 2)}


def test_prompts_are_cut_to_the_limit_and_to_the_context() -> None:
    engine = Engine(tiny_model())
    assert fitting_prompts(engine, PROMPTS, 2, 10) == PROMPTS[:2]
    longest = 256 - len(PROMPTS[1])
    assert fitting_prompts(engine, PROMPTS, 3, longest) == [PROMPTS[1]]
    with pytest.raises(DepthDecayError, match=r"no prompt leaves room for 254 new tokens .* context of 256"):
        fitting_prompts(engine, PROMPTS, 3, 254)


def test_quality_is_read_from_result_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps(RESULT))
    files[1].write_text(json.dumps(RESULT | {"task": "bbh", "rows": [row("depthdecay", 1.5, -0.1)]}))
    points = read_quality(list(map(str, files)))
    assert [(point.panel, point.method, point.speedup, point.n) for point in points] == [
        ("tiny, gsm8k", "skipdecode", 1.25, 40),
        ("tiny, bbh", "depthdecay", 1.5, 40),
    ]
    assert (points[0].low, points[0].difference, points[0].high) == pytest.approx((-0.3, -0.2, -0.1))


def test_quality_reads_what_eval_writes(tmp_path: Path) -> None:
    """Uses the evaluation's own report, so that a field renamed there is noticed here."""
    from depthdecay.evaluation.report import EvaluationReport, EvaluationRow, compare

    def answered(method: str, speedup: float, correct: str) -> EvaluationRow:
        share = correct.count("1") / len(correct)
        return EvaluationRow(
            method=method,
            asked_speedup=speedup,
            plan="",
            n=len(correct),
            accuracy=share,
            correct=correct,
            tokens=10,
            layers_executed=10,
            layer_speedup=speedup,
            cost_speedup=speedup,
            planned_layer_speedup=speedup,
            planned_cost_speedup=speedup,
            decode_seconds=1.0,
            prefill_seconds=1.0,
            decode_steps=1,
            ms_per_step=1.0,
            tokens_per_second=1.0,
        )

    report = EvaluationReport("tiny", "gsm8k", {}, [answered("full", 1.0, "1111"), answered("unified", 1.25, "1011")])
    compare(report.rows)
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(report.to_dict()))
    (point,) = read_quality([str(file)])
    assert (point.method, point.speedup, point.accuracy, point.difference) == ("unified", 1.25, 0.75, -0.25)
    assert point.low <= point.difference <= point.high


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("\x00", "is not JSON"),
        ("[]", "has no rows"),
        ("{}", "has no rows"),
        (json.dumps(RESULT | {"rows": []}), "has no rows"),
        (json.dumps(RESULT | {"rows": [7]}), "cannot be drawn"),
        (json.dumps(RESULT | {"rows": [{"method": "unified"}]}), "cannot be drawn"),
        (json.dumps(RESULT | {"rows": [row("unified", 1.5, None)]}), "with full among its methods"),
        (json.dumps(RESULT | {"rows": [row("unified", math.nan, 0.1)]}), "not finite"),
        *(
            (json.dumps(RESULT | {"rows": [row("unified", 1.5, 0.1, **{name: odd})]}), "not finite")
            for name in ("layer_speedup", "accuracy", "n")
            for odd in (math.nan, math.inf, -math.inf, 10**400, 1e308)
        ),
        (json.dumps(RESULT | {"rows": [row("unified", 1.5, 0.1, n=None)]}), "cannot be drawn"),
        (json.dumps(RESULT | {"rows": [row("unified", 1.5, math.inf)]}), "not finite"),
        (json.dumps(RESULT | {"rows": [row("unified", 1.5, 0.1, accuracy="high")]}), "cannot be drawn"),
        (json.dumps(RESULT | {"rows": RESULT["rows"][:1]}), "nothing to compare"),
    ],
)
def test_bad_result_files_are_one_line(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    line = refused("--results", str(file), "--out", str(tmp_path / "out"))
    assert words in line
    assert "bad.json" in line
    assert not (tmp_path / "out").exists()


def test_bad_options_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("\n")
    Path("file").write_text("")
    Path("ok.json").write_text(json.dumps(RESULT))
    assert "nothing to analyze" in refused("--out", "out")
    assert "depthdecay: '~no-such-user/x' begins with" in refused("--out", "out", "--results", "~no-such-user/x")
    assert "depthdecay: '~no-such-user/x' begins with" in refused("--out", "~no-such-user/x", "--results", "ok.json")
    assert "begins with the home" in refused("--out", "out", "--prompts", "~no-such-user/x")
    assert "without --prompts" in refused("--out", "out", "--plan", "x.json", "--results", "ok.json")
    assert "'gone.json' cannot be read" in refused("--out", "out", "--results", "gone.json")
    assert "'gone.jsonl' cannot be read" in refused("--out", "out", "--prompts", "gone.jsonl")
    assert "contains no prompts" in refused("--out", "out", "--prompts", "empty.jsonl")
    assert "there is no plan" in refused("--out", "out", "--prompts", "empty.jsonl", "--plan", "gone.json")
    assert "--limit" in refused("--out", "out", "--prompts", "empty.jsonl", "--limit", "0")
    assert "--max-new-tokens" in refused("--out", "out", "--prompts", "empty.jsonl", "--new-tokens", "1")
    assert "cannot write to the folder 'file'" in refused("--out", "file", "--results", "ok.json")


def test_without_matplotlib_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused("--out", str(tmp_path / "out"), "--prompts", "any.jsonl")
    assert "pip install '.[plot]'" in line


def test_command_draws_results_alone(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "c.json"):
        (tmp_path / name).write_text(json.dumps(RESULT | {"task": name}))
    out = tmp_path / "made" / "figures"  # as a shell expands *.json: one file belongs to the option, the others follow
    result = run("--results", *(str(tmp_path / name) for name in ("a.json", "b.json", "c.json")), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in out.iterdir()) == [f"speed_and_quality.{e}" for e in ("csv", "png", "svg")]
    assert len((out / "speed_and_quality.csv").read_text(encoding="utf-8").splitlines()) == 4


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """Dollar signs are not read as mathematics, and unprintable characters do no harm."""
    named = RESULT | {"model": r"a$\frac$", "task": "\x00\ud800", "rows": [row("$^$", 1.25, -0.2)]}
    (tmp_path / "a.json").write_text(json.dumps(named))
    result = run("--results", str(tmp_path / "a.json"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    svg = (tmp_path / "out" / "speed_and_quality.svg").read_text(encoding="utf-8")
    assert r"a$\frac$, ��" in svg
    assert "$^$" in svg
    assert r"a$\frac$" in (tmp_path / "out" / "speed_and_quality.csv").read_text(encoding="utf-8")


def test_command_measures_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["depthdecay", "analyze"])
    model = save_tiny_chat_model(tmp_path / "model")
    prompts, plan, out = tmp_path / "train.jsonl", tmp_path / "plan.json", tmp_path / "figures"
    prompts.write_text("".join(json.dumps({"question": words}) + "\n" for words in ("one", "two", "three")))
    PLAN.save(plan)
    result = run(
        *("--model", model, "--device", "cpu", "--prompts", str(prompts), "--plan", str(plan), "--out", str(out)),
        *("--limit", "2", "--new-tokens", "8"),
    )
    assert result.exit_code == 0, result.output
    drawn = ["perplexity_by_position", "layer_influence", "layer_influence_by_position"]
    drawn += ["depth_by_token", "kl_by_position"]
    expected = {f"{name}.{ending}" for name in drawn for ending in ("csv", "png", "svg")}
    assert {file.name for file in out.iterdir()} == expected | {"analysis.json"}
    assert {Path(line).name for line in result.stdout.splitlines()} == expected
    written = json.loads((out / "analysis.json").read_text(encoding="utf-8"))
    assert written["prompts"] == 2
    assert written["command"] == "depthdecay analyze"
    assert written["model"] == "model"
    assert str(tmp_path) not in json.dumps({name: value for name, value in written.items() if name != "command"})
