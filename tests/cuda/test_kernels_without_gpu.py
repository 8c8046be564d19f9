"""Our kernels without a GPU: what they compute in Triton's interpreter, and that they compile for an H200."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def last_line(script: str, **environment: str) -> str:
    """What a script says at its end, in a process of its own: Triton reads its settings when kernels are defined."""
    found = subprocess.run(
        [sys.executable, SUPPORT / script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("script", ["interpreted_products.py", "interpreted_attention.py"])
def test_rows_do_not_depend_on_their_number(script: str) -> None:
    """What tensor cores round, the interpreter does not know."""
    assert last_line(script, TRITON_INTERPRET="1") == "alike"


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    assert last_line("compiled_kernels.py") == "compiled"
