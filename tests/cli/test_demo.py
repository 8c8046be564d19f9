"""The demo: the answers of each mode, which tokens were drafted, the figures, and the caveat about quality."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_model import save_tiny_chat_model
from typer.testing import CliRunner

from depthdecay import Plan
from depthdecay.cli import app
from depthdecay.cli.demo import TASK, Timing, _warm_up_tokens, caveat, marked_drafts, results_table, same_answer
from depthdecay.cli.depth_picture import draw_depths
from depthdecay.engine.engine import Engine
from depthdecay.engine.result import Result
from depthdecay.plan.file import EMBEDDED_PLAN
from depthdecay.plan.schedule import PowerSchedule


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def demo(*words: str) -> tuple[int, str]:
    # The built-in task is longer than the tiny model's context.
    short = ["--max-new-tokens", "24", "--warmup-tokens", "4", "--question", "Why is the sky blue?"]
    result = CliRunner().invoke(app, ["demo", *short, *words])
    return result.exit_code, result.output


def test_demo_shows_both_and_says_what_protects_quality(tiny: str, tmp_path: Path) -> None:
    code, output = demo("-m", tiny, "--out", str(tmp_path / "new" / "folder"))
    assert code == 0, output
    said = " ".join(output.split())
    assert said.index("The same answer, token by token.") < said.index("depth decay")
    for words in (
        "full depth",
        "lossless",
        "depth decay",
        "wall-clock",
        "texts differ",
        "uncalibrated",
        "depthdecay calibrate",
    ):
        assert words in said
    assert (tmp_path / "new" / "folder" / "depth.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output = demo("-m", tiny, "--out", str(tmp_path))
    assert code == 0, output
    assert "pip install '.[plot]'" in output
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for words in (("--speedup", "90"), ("--speedup", "0"), ("-n", "-1"), ("--question", " "), ("--out", str(file))):
        code, output = demo("-m", tiny, *words)
        assert code == 2, output
        assert output.splitlines()[-1].startswith("depthdecay: ")
        assert "Traceback" not in output


def test_each_kind_of_run_has_a_warm_engine_of_its_own(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Engine, int]] = []
    generate = Engine.generate

    def recorded(engine: Engine, prompts: Any, max_new_tokens: int, **settings: Any) -> Any:
        calls.append((engine, max_new_tokens))
        return generate(engine, prompts, max_new_tokens, **settings)

    monkeypatch.setattr(Engine, "generate", recorded)
    monkeypatch.setattr(sys.modules["depthdecay.cli.demo"], "_TIMING_SECONDS", math.inf)
    assert demo("-m", tiny, "--out", str(tmp_path))[0] == 0
    (full, _), (lossless, _), (decay, _), *answers = calls
    assert [(engine.mode, engine.plan is None) for engine in (full, lossless, decay)] == [
        ("full", True),
        ("lossless", True),
        ("decay", False),
    ]
    # The first one is the lossless answer that is shown; the other shown answers are streamed.
    turns = [lossless, *[lossless, full, full, lossless] * 2, *[decay, full, full, decay] * 2]
    assert [engine for engine, _ in answers] == turns
    assert [tokens for _, tokens in calls] == [8] * 3 + [24] * len(turns)
    # A slow model is timed only once more.
    calls.clear()
    monkeypatch.setattr(sys.modules["depthdecay.cli.demo"], "_TIMING_SECONDS", 0.0)
    assert demo("-m", tiny, "--out", str(tmp_path))[0] == 0
    assert [tokens for _, tokens in calls] == [8] * 3 + [24] * 5
    # Graphs are captured for the length of the run.
    full.uses_graphs = True
    assert _warm_up_tokens(full, 24) == 24


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_picture_draws_any_length(tokens: int, tmp_path: Path) -> None:
    plan = Plan.decay(80, 0.99)
    draw_depths(plan.depths(tokens), 80, plan, "some/model").savefig(tmp_path / "p.png", dpi=40)
    assert (tmp_path / "p.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan.decay(30, "0.99"), "some/model · α = 0.99 · uncalibrated, middle-out"),
        (Plan.load(EMBEDDED_PLAN), "some/model · α = 0.998217 · 19 warm-up tokens · calibrated, repaired"),
        (
            replace(Plan.load(EMBEDDED_PLAN), repairs=None, schedule=PowerSchedule(30, "0.99", min_layers=22)),
            "some/model · α = 0.99 · calibrated",
        ),
    ],
)
def test_the_picture_says_how_its_layers_were_chosen(plan: Plan, said: str) -> None:
    figure = draw_depths(plan.depths(20), 30, plan, "some/model")
    assert [text.get_text() for text in figure.axes[0].texts if "some/model" in text.get_text()] == [said]


def test_quality_is_told_in_figures_only_where_this_schedule_was_measured() -> None:
    stored = Plan.load(EMBEDDED_PLAN)
    other = replace(stored, schedule=PowerSchedule(30, "0.99", min_layers=22))
    assert "87% of the time" in caveat(stored, stored)
    for plan, known in ((other, stored), (other, None)):
        assert "was measured" in caveat(plan, known)
        assert "at this speed was not measured" in caveat(plan, known)
    assert "uncalibrated" in caveat(Plan.decay(30, "0.99"), None)


@pytest.mark.parametrize(
    ("full", "decay", "steady"),
    [
        ((66.0, 68.0), (60.0, 61.0), True),
        ((60.0, 61.0), (66.0, 68.0), True),  # slower is a result too
        ((214.5, 66.0), (65.5, 65.0), False),  # another process took a core during one run
        ((214.5, 66.0, 68.0), (65.5, 61.0, 60.0), True),  # the other runs agree
        ((214.5, 215.0), (65.5, 65.0), False),  # a tenth fewer layers cannot give a speed-up of 3.3
        ((0.0, 0.0), (0.0, 0.0), False),  # one token: no decode step was timed
    ],
)
def test_a_ratio_is_shown_only_where_it_means_something(
    full: tuple[float, ...], decay: tuple[float, ...], steady: bool
) -> None:
    assert Timing(full, decay).is_steady(layer_speedup=1.1) is steady


def test_drafted_tokens_are_marked_and_add_up_to_the_answer() -> None:
    engine = Engine.from_pretrained(mode="lossless")
    (result,) = engine.generate([TASK], 32, do_sample=False)
    assert any(depth == 0 for depth in result.draft_depths)
    assert marked_drafts(result, engine, marks=False).plain == result.text
    marked = marked_drafts(result, engine, marks=True).plain
    assert "[" in marked
    assert marked.replace("[", "").replace("]", "") == result.text
    # A character cut at the end of a run goes to the next run.
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("é 🙂!")
    broken = Result(token_ids=ids, draft_depths=[0 if index % 2 else None for index in range(len(ids))])
    assert marked_drafts(broken, engine, marks=False).plain == "é 🙂!"


def test_it_says_whether_both_answers_are_the_same() -> None:
    full = Result(token_ids=[1, 2, 3])
    drafted = Result(token_ids=[1, 2, 3], draft_depths=[None, 0, 7], verifications=2)
    assert "2 of its 3 tokens were drafted, 1 of them by prompt lookup, and verified" in same_answer(full, drafted)
    other = Result(token_ids=[1, 5, 3], draft_depths=[None] * 3)
    assert "diverge at token 1, at a near-tie" in same_answer(full, other)
    other = Result(token_ids=[1, 2], draft_depths=[None] * 2, inexact_because="no kernel fits")
    assert same_answer(full, other) == "The answers diverge at token 2, at a near-tie: no kernel fits."


@pytest.mark.parametrize(
    ("other", "headings", "cells"),
    [
        (
            Result(mode="lossless", verifications=1, layer_passes=80),
            ["full\npasses", "tokens\nper pass"],
            ["2", "2.00"],
        ),
        (Result(mode="decay"), ["layers\nexecuted", "layer\nspeed-up"], ["90", "1.33x"]),
    ],
)
def test_costs_are_full_passes_for_lossless_and_layers_for_decay(
    other: Result, headings: list[str], cells: list[str]
) -> None:
    full = Result(token_ids=[1, 2, 3, 4], depths=[30] * 4, num_layers=30)
    depths = [30] * 4 if other.mode == "lossless" else [30, 20, 20, 20]
    other = replace(other, token_ids=[1, 2, 3, 4], depths=depths, num_layers=30)
    table = results_table(full, other, Timing((2.0, 2.0), (1.5, 1.5)), "some model")
    assert [column.header for column in table.columns[4:6]] == headings
    of_full = ["4", "1.00"] if other.mode == "lossless" else ["120", "1.00x"]
    assert [list(column.cells) for column in table.columns[4:6]] == [
        list(pair) for pair in zip(of_full, cells, strict=True)
    ]
