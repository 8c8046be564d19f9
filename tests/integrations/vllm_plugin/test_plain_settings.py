"""Depth settings of servers and requests, and which rows run which layer: only numbers, without vLLM."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from depthdecay import Plan
from depthdecay.cli import app
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import check_version, register
from depthdecay.integrations.vllm.layer_rows import Rows, Scheduled, Step
from depthdecay.integrations.vllm.settings import server_depth, server_settings
from depthdecay.plan.file import EMBEDDED_PLAN
from depthdecay.plan.identity import ModelIdentity

CPU = torch.device("cpu")


def test_a_server_without_settings_runs_all_layers_and_lets_requests_decay() -> None:
    depth = server_depth(None, 12)
    assert depth.plan_of(None).depths(100) == (12,) * 100
    assert depth.plan_of({"other": 1}) is depth.plan
    asked = depth.plan_of({"depth_decay": {"alpha": 0.9}})
    assert asked.depths(40) == Plan.decay(12, "0.9").depths(40)
    assert asked.ladder == Plan.decay(12, "0.9").ladder
    assert depth.plan_of({"depth_decay": '{"alpha": 0.9}'}) is asked


def test_a_servers_plan_is_a_file_or_numbers(tmp_path: Path) -> None:
    made = Plan.decay(12, "0.95", drop_order=[5, 4, 7], horizon=30)
    saved = server_depth({"plan": str(made.save(tmp_path / "plan.json"))}, 12).plan
    said = server_depth(server_settings(made), 12).plan
    assert saved == said == made


def test_requests_stay_on_the_servers_ladder_and_where_it_has_maps() -> None:
    depth = server_depth({"plan": str(EMBEDDED_PLAN)}, 30)
    deepest = min(depth.plan.depths(1000))
    fast = depth.plan_of({"depth_decay": {"alpha": 0.5}})
    assert min(fast.depths(1000)) == deepest
    assert fast.repairs == depth.plan.repairs
    assert depth.plan_of({"depth_decay": {"alpha": 1}}).depths(99) == (30,) * 99


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"plan": str(EMBEDDED_PLAN), "alpha": 0.9}, "and also alpha"),
        ({"plan": 7}, "plan is 7"),
        ({"plan": "nowhere/at/all"}, "there is no plan"),
        ({"plan": str(EMBEDDED_PLAN)}, "for 30 layers, but the model has 12"),
        ({"alpha": 0}, "alpha is 0"),
        ({"alpah": 0.9}, "has alpah"),
        ({"horizon": 9}, "without alpha known are"),
        ({"allow_other_weights": "yes"}, "expected true or false"),
        ([], "expected an object"),
    ],
)
def test_a_server_with_bad_settings_is_refused(server: Any, message: str) -> None:
    with pytest.raises(DepthDecayError, match=message) as refused:
        server_depth(server, 12)
    assert "\n" not in str(refused.value)


def test_a_plan_for_another_model_is_refused_by_its_shape() -> None:
    depth = server_depth({"plan": str(EMBEDDED_PLAN)}, 30)
    same = ModelIdentity("LlamaForCausalLM", 30, 576, 9, 49152)
    depth.check_shape(same)
    with pytest.raises(DepthDecayError, match="hidden size 576 against 512"):
        depth.check_shape(ModelIdentity("LlamaForCausalLM", 30, 512, 8, 49152))


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import sys
    import types

    other = types.ModuleType("vllm")
    other.__version__ = "0.33.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    monkeypatch.setattr("depthdecay.integrations.vllm.is_installed", lambda: True)
    with pytest.raises(DepthDecayError, match=r"is for vLLM 0\.32\.0 or 0\.26\.0, but this is 0\.33\.1"):
        check_version()
    with caplog.at_level("WARNING", logger="vllm.depthdecay"):
        register()  # also in somebody else's server: a warning, and nothing changes
    assert "depthdecay is not registered: depth decay inside vLLM is for vLLM 0.32.0 or 0.26.0" in caplog.text
    for words in (["vllm", "serve", "any", "--alpha", "0.9"], ["bench-vllm"]):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("depthdecay: depth decay inside vLLM is for vLLM 0.32.0 or 0.26.0, but this")
    for known in ("0.32.0+cpu", "0.26.0"):
        other.__version__ = known  # type: ignore[attr-defined]
        check_version()


def test_without_vllm_its_commands_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthdecay.integrations.vllm.is_installed", lambda: False)
    refused = CliRunner().invoke(app, ["vllm", "serve", "any", "--alpha", "0.9"])
    assert refused.exit_code == 2
    assert refused.stderr == (
        "depthdecay: vLLM is not installed; in depthdecay's source folder, pip install '.[vllm]'\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hf-overrides", "{}"], "--hf-overrides is set by this command"),
        (["--plan", str(EMBEDDED_PLAN), "--speedup", "1.2"], "--plan and --speedup were given together"),
        (["--mode", "full"], "--mode is 'full'; expected decay or lossless"),
        (["--window", "3"], "--window is the number of drafts in lossless mode; add --mode lossless"),
        (["--mode", "lossless"], "--mode lossless drafts with a plan's learned drafter; give --plan"),
        (
            ["--mode", "lossless", "--plan", str(EMBEDDED_PLAN), "--speculative-config", "{}"],
            "--speculative-config is set by --mode lossless",
        ),
        (["--mode", "lossless", "--plan", str(EMBEDDED_PLAN), "--window", "0"], "--window is 0"),
        (
            ["--mode", "lossless", "--plan", str(EMBEDDED_PLAN), "--graphs"],
            "--graphs and --group-wait-ms are for depth",
        ),
        (["--mode", "lossless", "--plan", str(EMBEDDED_PLAN), "-pp", "2"], "leave --pipeline-parallel-size out"),
    ],
)
def test_flags_that_would_undo_each_other_are_refused(words: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, ["vllm", "serve", "any", *words])
    assert refused.exit_code == 2
    assert message in refused.stderr


# A request: how much is computed, how much is scheduled now, how long its prompt is, and how fast it decays.
REQUESTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 40), st.sampled_from(["1", "0.99", "0.9", "0.5"])),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(REQUESTS)
def test_a_layers_rows_are_those_whose_plan_keeps_it(requests: list[tuple[int, int, int, str]]) -> None:
    depth = server_depth({"drop_order": [3, 6, 1, 4]}, 8)
    parts = [Scheduled(c, n, p, depth.plan_of({"depth_decay": {"alpha": a}})) for c, n, p, a in requests]
    step = Step(parts, depth.plan.ladder, CPU)
    for layer in range(8):
        expected = [
            layer in part.plan.layers(part.plan.depth(max(0, position - part.prompt + 1)))
            for part in parts
            for position in range(part.computed, part.computed + part.tokens)
        ]
        runs = step.runs(layer)
        if isinstance(runs, bool):
            assert set(expected) == {runs}
            continue
        assert isinstance(runs, Rows)
        assert runs.index.tolist() == np.flatnonzero(expected).tolist()
        # Attention takes the rows of a request as its next positions, so they must be the first ones.
        cuts = np.cumsum([0, *(part.tokens for part in parts)])
        kept = [expected[a:b] for a, b in pairwise(cuts)]
        assert all(row == sorted(row, reverse=True) for row in kept)
        assert runs.tokens.tolist() == [sum(row) for row in kept if any(row)]
        assert runs.computed.tolist() == [part.computed for part, row in zip(parts, kept, strict=True) if any(row)]
    assert step.is_full == all(depth == 8 for part in parts for depth in part.depths())
