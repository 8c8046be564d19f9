"""Charts give the same bytes for the same data, are labelled, and survive odd data."""

from __future__ import annotations

import csv
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest

from depthdecay.bench import drawing, figures
from depthdecay.bench.drawing import Chart, inline_svg, write_chart
from depthdecay.bench.figures import QualityPoint, method_style
from depthdecay.errors import DepthDecayError
from depthdecay.plan.baselines import PEER_RULES

POINTS = [
    QualityPoint("tiny, gsm8k", "depthdecay", 1.25, 0.5, -0.01, -0.03, 0.01, 100),
    QualityPoint("tiny, gsm8k", "skipdecode", 1.25, 0.3, -0.21, -0.3, -0.1, 100),
    QualityPoint("tiny, bbh", "skipdecode", 1.5, 0.2, -0.31, -0.4, -0.2, 100),
]
CHARTS: dict[str, Callable[[], Chart]] = {
    "perplexity_by_position": lambda: figures.perplexity_chart([2.0, 1.5, 1.25], [0.7, 0.4, 0.2]),
    "layer_influence": lambda: figures.influence_chart([9.0, 0.02, 0.01, 0.5], dropped=[2]),
    "layer_influence_by_position": lambda: figures.influence_map_chart([[1.0, 0.5, 0.1], [0.01, 0.02, 0.0]]),
    "depth_by_token": lambda: figures.depth_chart({"1.5×": [4, 3, 2], "this plan": [4, 4, 3]}, 4),
    "kl_by_position": lambda: figures.kl_chart({"plain": [0.1, 0.2], "repaired": [0.05, 0.1]}),
    "ladder": lambda: figures.ladder_chart(6, [2, 3], 4),
    "speed_and_quality": lambda: figures.quality_chart(POINTS),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_becomes_three_files_that_never_differ(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        files = write_chart(folder, CHARTS[name]())
        assert {file.name for file in files} == {f"{name}.{ending}" for ending in ("csv", "png", "svg")}
        assert set(files) == set(folder.iterdir())  # no temporary file is left
    for file in folders[0].iterdir():
        assert file.read_bytes() == (folders[1] / file.name).read_bytes()
    svg = (folders[0] / f"{name}.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    assert "dc:date" not in svg
    assert (folders[0] / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_tables_hold_the_numbers_that_are_drawn(tmp_path: Path) -> None:
    write_chart(tmp_path, CHARTS["perplexity_by_position"]())
    rows = list(csv.reader((tmp_path / "perplexity_by_position.csv").open(encoding="utf-8")))
    assert rows[0] == ["position", "perplexity", "entropy_nats"]
    assert rows[1:] == [["1", "2.0", "0.7"], ["2", "1.5", "0.4"], ["3", "1.25", "0.2"]]
    ladder = CHARTS["ladder"]()
    assert ladder.rows == [(6, 1, 1, 1, 1, 1, 1), (5, 1, 1, 0, 1, 1, 1), (4, 1, 1, 0, 0, 1, 1)]
    shorter = figures.depth_chart({"a": [4, 3], "b": [4, 4, 3]}, 4)
    assert shorter.rows[-1] == (2, "", 3)


def test_axes_say_what_they_show_and_in_which_unit() -> None:
    needed = {
        "perplexity_by_position": ["perplexity", "entropy (nats)", "position in the answer (tokens)"],
        "layer_influence": ["KL to full model (nats/token, log scale)", "layer dropped", "dropped by the plan"],
        "layer_influence_by_position": ["KL to full model (nats, log scale)", "layer dropped"],
        "depth_by_token": ["layers run, of 4", "token of the answer", "1.5×", "this plan"],
        "kl_by_position": ["KL to full model (nats)", "plain", "repaired"],
        "ladder": ["depth (layers that run)", "layer"],
        "speed_and_quality": ["layer speed-up as executed (×)", "depthdecay", "skipdecode", "tiny, bbh", "full depth"],
    }
    for name, make in CHARTS.items():
        svg = inline_svg(make())
        assert [words for words in needed[name] if words not in svg] == []


def test_a_method_has_one_colour_and_no_two_rules_look_the_same() -> None:
    looks = {method_style(rule) for rule in {*PEER_RULES, "depthdecay"} - {"middle-out"}}
    assert len(looks) == len(PEER_RULES)  # all of them, and depthdecay instead of middle-out
    assert len({marker for _, marker in looks - {method_style("full")}}) == len(looks) - 1
    assert method_style("middle-out") == method_style("decay")  # two names for one rule
    assert method_style("someone's own") == method_style("someone's own")


@pytest.mark.parametrize(
    "make",
    [
        lambda: figures.influence_chart([0.0, 0.0]),
        lambda: figures.influence_chart([0.3]),
        lambda: figures.influence_map_chart([[0.0], [0.0]]),
        lambda: figures.influence_map_chart([[0.1] * 137] * 2),
        lambda: figures.perplexity_chart([1.0], [0.0]),
        lambda: figures.depth_chart({"a": [1], "b": [1]}, 1),
        lambda: figures.ladder_chart(1, [], 1),
        lambda: figures.quality_chart(POINTS[:1]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_odd_data_are_drawn_without_complaint(make: Callable[[], Chart]) -> None:
    assert inline_svg(make()).endswith("</svg>")


@pytest.mark.parametrize("name", ["$x$", r"$\frac$", r"\$5 and $6", "50$"])
def test_dollar_signs_in_names_are_no_mathematics(name: str) -> None:
    point = QualityPoint(name, name, 1.25, 0.5, -0.01, -0.03, 0.01, 100)
    drawn = [
        figures.quality_chart([point]),
        figures.kl_chart({name: [0.1, 0.2]}),
        figures.depth_chart({name: [4, 3]}, 4),
    ]
    for chart in drawn:
        assert name in inline_svg(chart)


def test_the_users_own_style_neither_changes_a_figure_nor_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inline_svg(CHARTS["depth_by_token"]())
    monkeypatch.setitem(matplotlib.rcParams, "axes.linewidth", 5.0)
    assert inline_svg(CHARTS["depth_by_token"]()) == plain
    assert matplotlib.rcParams["axes.linewidth"] == 5
    assert matplotlib.rcParams["svg.hashsalt"] is None


def test_inlined_charts_do_not_share_ids_and_take_the_pages_colours() -> None:
    ids = [
        {element.get("id") for element in ElementTree.fromstring(inline_svg(make())).iter() if element.get("id")}
        for make in CHARTS.values()
    ]
    assert sum(map(len, ids)) == len(set.union(*ids))
    svg = inline_svg(CHARTS["kl_by_position"]())
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert drawing.INK not in svg
    root = ElementTree.fromstring(svg)
    assert root.get("width") is None
    assert root.get("viewBox")


def test_labels_are_moved_apart_and_stay_in_order() -> None:
    moved = figures._spread([3, 3, 10, 3.5], gap=1)
    assert moved == [3, 4, 10, 5]


def test_without_matplotlib_the_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DepthDecayError, match=r"pip install '\.\[plot\]'"):
        drawing.require_drawing()


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match="cannot write"):
        write_chart(tmp_path / "gone", CHARTS["ladder"]())
