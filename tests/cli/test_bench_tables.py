"""The output of bench fits into 80 columns, and says how its ratios are computed."""

from __future__ import annotations

from typing import Any

import pytest

from depthdecay.bench.cpu import CpuReport, CpuRow
from depthdecay.bench.decoding import DecodingReport, DecodingRow
from depthdecay.cli.bench_tables import print_decoding, print_precisions

SETTINGS: dict[str, Any] = {
    **{"threads": 2, "prompt_tokens": 32, "new_tokens": 128, "rounds": 3, "plan": "decay", "batch": 1},
    **{"dtype": "float32", "device": "cpu"},
}


def test_ranges_are_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    spread = [12.34, 11.11, 13.57]
    row = CpuRow("generate bfloat16", 123.45, 101.1, 234.5, 8.1, 1.0, 0.55, times_generate=spread, times_llama=spread)
    decay = CpuRow("decay bfloat16", 123.45, 101.1, 234.5, 8.1, 1.0, 0.55, realised=1.0, times_llama=spread)
    print_precisions(CpuReport("smollm2-135m", SETTINGS, 20.0, [row, decay]))
    shown = capsys.readouterr().out
    assert shown.count("101.1–234.5") == 2
    assert shown.count("11.11–13.57") == 3
    assert "…" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("rounds", [1, 3])
def test_ratios_say_that_they_are_of_rounds(rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    report = DecodingReport("tiny", SETTINGS | {"rounds": rounds}, 10.0, 1.0, [DecodingRow("full", "full depth")])
    report.ratios = {"full against generate": 1.02}
    print_decoding(report)
    assert ("medians of the per-round values" in capsys.readouterr().out) == (rounds > 1)
