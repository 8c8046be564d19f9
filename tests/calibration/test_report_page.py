"""The report gives goal and results, is self-contained, and works with little data too."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from depthdecay import Plan
from depthdecay.calibration.report_page import page, promise_sentence, write_report
from depthdecay.errors import DepthDecayError

PLAN = Plan.for_speedup(8, 1.25, over_tokens=20)
LEAST: dict[str, Any] = {"model": "tiny", "plan": {"summary": PLAN.describe()}}
PROMISE = {"budget": 0.1, "held_out": 0.0712, "bound": 0.0844, "confidence": 0.9, "layer_speedup": 1.253}
WHOLE: dict[str, Any] = {
    "model": "tiny",
    "plan": {
        "summary": PLAN.describe(),
        "num_layers": 8,
        "drop_order": list(PLAN.ladder.drop_order),
        "depths": list(PLAN.depths(20)),
    },
    "promise": PROMISE | {"cost_speedup": 1.2, "prompts": 64, "tokens": 12800},
    "full_perplexity": 1.73,
    "fidelity": [
        {"speedup": 1.1, "plain": {"kl": 0.2, "agreement": 0.9, "perplexity": 2.0}},
        {
            "speedup": 1.25,
            "plain": {"kl": 0.4, "agreement": 0.85, "perplexity": 2.5},
            "repaired": {"kl": 0.07123, "agreement": 0.961, "perplexity": 1.8},
        },
    ],
    "kl_by_position": {"plain": [0.1, 0.2, 0.3], "repaired": [0.05, 0.06, 0.07]},
    "layer_influence": [3.0, 0.2, 0.1, 0.1, 0.1, 0.1, 0.2, 1.0],
    "perplexity_by_position": [2.0, 1.8, 1.7],
    "entropy_by_position": [0.8, 0.7, 0.6],
    "choices": {"rank": 64, "ridge": 0.001, "held_out_prompts": 1234, "repaired": True, "seconds": None},
    "command": "depthdecay calibrate --model tiny --out plan/",
}


class Outline(HTMLParser):
    """Finds unclosed tags, and collects the visible text."""

    EMPTY = frozenset(["meta", "path", "use", "image", "br"])

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_whole_report(tmp_path: Path) -> None:
    file = write_report(tmp_path, json.loads(json.dumps(WHOLE)))
    assert file == tmp_path / "report.html"
    assert list(tmp_path.iterdir()) == [file]
    content = file.read_text(encoding="utf-8")
    outline = Outline(content)
    assert outline.open == []
    for words in (
        "Depth plan for tiny",
        PLAN.describe(),
        "Held out: 64 prompts with 12,800 tokens",
        "speed-up KL agreement perplexity plain repaired plain repaired plain repaired",
        "1.25× 0.400 0.0712 85.0% 96.1% 2.50 1.80",
        "1.1× 0.200 – 90.0% – 2.00 –",
        "Perplexity of the full model: 1.73.",
        "held out prompts 1,234",
        "repaired yes",
        "depthdecay calibrate --model tiny --out plan/",
    ):
        assert words in outline.text
    assert content.count("<svg") == 5
    ids = re.findall(r' id="([^"]+)"', content)
    assert len(ids) == len(set(ids))


def test_the_page_needs_nothing_from_outside() -> None:
    content = page(WHOLE)
    addresses = set(re.findall(r'(?:href|src|url)\s*[=(]\s*"?([^")\s]+)', content))
    assert [address for address in addresses if not address.startswith(("#", "data:image/png"))] == []
    assert "<script" not in content
    assert "@import" not in content
    assert "prefers-color-scheme: dark" in content


def test_the_same_data_give_the_same_page() -> None:
    assert page(WHOLE) == page(WHOLE)


@pytest.mark.parametrize("name", [None, *(name for name in WHOLE if name not in LEAST)])
def test_any_section_can_be_missing(name: str | None) -> None:
    data = LEAST if name is None else {key: value for key, value in WHOLE.items() if key != name}
    outline = Outline(page(data))
    assert outline.open == []
    assert PLAN.describe() in outline.text


@pytest.mark.parametrize("data", [{}, {"model": "tiny"}, {"plan": {"summary": "x"}}, {"model": "tiny", "plan": {}}])
def test_model_and_summary_are_needed(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match=r"model's name and the plan's summary"):
        write_report(tmp_path, data)
    assert not list(tmp_path.iterdir())


def test_promise_is_one_sentence_with_its_bound() -> None:
    assert promise_sentence(PROMISE) == (
        "Asked for at most 0.1 (mean KL to the full model, in nats per token); held-out text measures 0.0712, "
        "and at most 0.0844 with 90% confidence; the layer speed-up is 1.25×."
    )
    assert promise_sentence({"budget": 0.1, "measure": "loss"}) == "Asked for at most 0.1 (loss)."


def test_a_budget_that_is_not_met_is_said() -> None:
    kept = page(LEAST | {"promise": PROMISE})
    missed = page(LEAST | {"promise": PROMISE | {"bound": 0.11}})
    assert "not met" not in kept
    assert "The budget is not met with that confidence." in missed
    assert 'class="promise missed"' in missed


def test_text_is_escaped() -> None:
    nasty = '<script>alert("&")</script>'
    data = {
        "model": nasty,
        "plan": {"summary": nasty},
        "choices": {nasty: nasty},
        "command": nasty,
        "kl_by_position": {nasty: [0.1, 0.2]},
        "promise": {"budget": 1, "measure": nasty},
    }
    content = page(data)
    assert "<script" not in content
    assert Outline(content).text.count(nasty) >= 6


def test_without_matplotlib_there_are_tables_and_a_word_about_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    content = page(WHOLE)
    assert "<svg" not in content
    text = Outline(content).text
    assert "pip install '.[plot]'" in text
    assert "1.25× 0.400 0.0712" in text
    assert f"Dropped in this order: {', '.join(map(str, PLAN.ladder.drop_order))}." in text


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DepthDecayError, match=r"cannot write .*report\.html"):
        write_report(tmp_path / "gone", LEAST)
