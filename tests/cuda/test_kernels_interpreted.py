"""Our kernels in Triton's interpreter, which needs no GPU: tests what they compute, not how tensor cores round."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("script", ["interpreted_products.py", "interpreted_attention.py"])
def test_rows_do_not_depend_on_their_number(script: str) -> None:
    """In a separate process: Triton reads the setting when kernels are defined."""
    found = subprocess.run(
        [sys.executable, SUPPORT / script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.strip() == "alike"
