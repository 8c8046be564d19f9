"""The demo: both answers, the figures, the picture, and the plain words about quality."""

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
from depthdecay.cli.demo import Timing, _warm_up_tokens, caveat, draw_depths
from depthdecay.engine.engine import Engine
from depthdecay.plan.file import EMBEDDED_PLAN
from depthdecay.plan.schedule import PowerSchedule


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def demo(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["demo", "--max-new-tokens", "24", "--warmup-tokens", "4", *words])
    return result.exit_code, result.output


def test_demo_shows_both_and_says_what_protects_quality(tiny: str, tmp_path: Path) -> None:
    code, output = demo("-m", tiny, "--out", str(tmp_path / "new" / "folder"))
    assert code == 0, output
    said = " ".join(output.split())
    for words in ("full depth", "depth decay", "wall-clock", "texts differ", "uncalibrated", "depthdecay calibrate"):
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
    (full, _), (decay, _), *timed = calls
    assert full.plan is None
    assert decay.plan is not None
    assert [engine for engine, _ in timed] == [decay, full, full, decay] * 2
    assert [tokens for _, tokens in calls] == [8] * 2 + [24] * 8
    # A model that takes long is timed once more, no oftener.
    calls.clear()
    monkeypatch.setattr(sys.modules["depthdecay.cli.demo"], "_TIMING_SECONDS", 0.0)
    assert demo("-m", tiny, "--out", str(tmp_path))[0] == 0
    assert [tokens for _, tokens in calls] == [8] * 2 + [24] * 2
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
        (Plan.load(EMBEDDED_PLAN), "some/model · α = 0.998217 · 19 tokens of warm-up · calibrated, repaired"),
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
        ((214.5, 66.0, 68.0), (65.5, 61.0, 60.0), True),  # the others agree
        ((214.5, 215.0), (65.5, 65.0), False),  # 3.3 times as fast by a tenth fewer layers cannot be
        ((0.0, 0.0), (0.0, 0.0), False),  # one token: no decoding step was timed
    ],
)
def test_a_ratio_is_shown_only_where_it_means_something(
    full: tuple[float, ...], decay: tuple[float, ...], steady: bool
) -> None:
    assert Timing(full, decay).is_steady(layer_speedup=1.1) is steady
