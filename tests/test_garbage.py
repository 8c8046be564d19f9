"""Frozen objects stay out of collections while a process runs, and are collected at exit if triton is loaded."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from depthdecay.garbage import collection_paused

CODE = """
import gc, os, sys, types
from depthdecay.garbage import freeze_for_good

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self, write=os.write):
        write(1, b"collected ")

if {with_triton}:
    sys.modules["triton"] = types.ModuleType("triton")
Cycle()
freeze_for_good()
freeze_for_good()
gc.collect()
os.write(1, b"working ")
"""


@pytest.mark.parametrize(("with_triton", "said"), [(True, "working collected "), (False, "working ")])
def test_frozen_objects_are_collected_at_exit_where_triton_reports_leaks(with_triton: bool, said: str) -> None:
    code = CODE.format(with_triton=with_triton)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_leaves_collection_as_it_was(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
