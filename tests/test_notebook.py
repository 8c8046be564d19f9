"""The guide's notebook runs from first cell to last on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "guides" / "faster.ipynb"


def test_the_notebook_runs_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells are plain Python, so they need no Jupyter kernel, and contain their own asserts."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
    said = capsys.readouterr().out
    assert "the same tokens: True" in said
    assert "'prompt lookup'" in said
