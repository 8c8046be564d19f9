"""The load tool against a real server: what it counts, what it refuses, what it notices."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from serving import Running, running, tiny_engine, until
from tiny_models import LAYERS
from typer.testing import CliRunner

from depthdecay import DepthDecayError, Plan
from depthdecay.batching.batcher import BatchSettings
from depthdecay.bench.loadtest import Load, LoadReport, Outcome, percentiles, run_load
from depthdecay.cli import app
from depthdecay.cli.loadtest import depths_of
from depthdecay.serve.responses import ApiAnswer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = tiny_engine(tmp_path_factory.mktemp("model"))
    with running(engine, BatchSettings(max_batch=8, cohort_seconds=0.005)) as server:
        yield server


def test_every_answer_is_counted(server: Running) -> None:
    report = run_load(Load(server.url, requests=12, concurrency=4, max_tokens=20))
    figures = report.figures()
    assert figures["whole"] == 12
    assert figures["errors"] == {}
    assert figures["tokens"] == 12 * 20
    plan = Plan.decay(LAYERS, "0.98")
    assert figures["layer_speedup"] == pytest.approx(plan.layer_speedup(20))
    assert figures["first_token_ms"]["p50"] <= figures["first_token_ms"]["p99"]


def test_random_arrivals_mixed_depths_and_hang_ups(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    command = [
        "loadtest",
        "--url",
        server.url,
        "-r",
        "30",
        "-c",
        "8",
        "-n",
        "24",
        "--arrival",
        "poisson",
        "--rate",
        "200",
    ]
    command += [
        "--mode",
        "full",
        "--alpha",
        "0.95",
        "--speedup",
        "1.2",
        "--over",
        "24",
        "--hang-up",
        "0.3",
        "-o",
        str(file),
    ]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    told = json.loads(file.read_text())
    assert told["whole"] + told["hung_up"] == 30
    assert told["hung_up"] > 0
    assert told["layer_speedup"] > 1
    assert told["left_behind"] == {"rows_running": 0, "requests_waiting": 0, "cache_used_bytes": 0}
    assert told["kind"] == "loadtest"
    assert told["model"] == "tiny"
    assert told["commit"]
    until(server.is_clean)


def test_who_waits_for_a_place_has_been_waiting_since_it_came(server: Running) -> None:
    load = Load(server.url, requests=6, concurrency=1, max_tokens=30, arrival="poisson", rate=10_000)
    report = run_load(load)  # all arrive at once, and are answered one by one
    waited = sorted(outcome.first_token or 0.0 for outcome in report.outcomes)
    spent = [30 * (outcome.per_token or 0.0) for outcome in report.outcomes]
    assert waited[-1] > sum(sorted(spent)[:4])


def test_a_server_that_keeps_something_fails_the_run(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def held(client: Any) -> dict[str, float]:
        return {"rows_running": 1.0}

    monkeypatch.setattr("depthdecay.bench.loadtest._left_behind", held)
    result = CliRunner().invoke(app, ["loadtest", "--url", server.url, "-r", "2", "-c", "2", "-n", "4"])
    assert result.exit_code == 1, result.output
    assert "rows running 1" in result.output


def test_an_answer_that_is_not_whole_is_noticed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiAnswer, "closing", lambda answer: [])
    report = run_load(Load(server.url, requests=2, max_tokens=4))
    assert report.errors == {"broken off": 2}
    ran = CliRunner().invoke(app, ["loadtest", "--url", server.url, "-r", "1", "-n", "2"])
    assert ran.exit_code == 1
    assert "broken off: 1" in ran.output


def test_errors_are_told_by_kind(server: Running) -> None:
    report = run_load(Load(server.url, requests=3, max_tokens=4, depth=({"speedup": 900},)))
    assert report.errors == {"status 400": 3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requests": 0}, "requests"),
        ({"requests": 10**7}, "requests"),
        ({"concurrency": 5000}, "concurrency"),
        ({"arrival": "never"}, "arrival"),
        ({"rate": 0}, "rate"),
        ({"hang_up": 2}, "hang_up"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://example.com"}, "allow_remote"),
    ],
)
def test_loads_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DepthDecayError, match=words):
        Load(**changes)


def test_a_server_that_wants_a_key(tmp_path: Path) -> None:
    with running(tiny_engine(tmp_path), api_key="k") as server:
        with pytest.raises(DepthDecayError, match="API key"):
            run_load(Load(server.url, requests=1))
        assert run_load(Load(server.url, requests=1, max_tokens=2, api_key="k")).whole == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    ran = CliRunner().invoke(app, ["loadtest"])
    assert ran.exit_code == 2
    assert ran.stderr == (
        "depthdecay: a load test needs httpx, which is not installed; "
        "in depthdecay's source folder, pip install '.[serve]'\n"
    )


def test_nobody_there() -> None:
    with pytest.raises(DepthDecayError, match="no server answers"):
        run_load(Load("http://127.0.0.1:9", requests=1))


def test_depths_of_requests() -> None:
    assert depths_of([], [], [], None) == ({},)
    assert depths_of(["full"], ["0.9"], ["1.5"], 64) == (
        {"mode": "full"},
        {"alpha": 0.9},
        {"speedup": 1.5, "over_tokens": 64},
    )
    with pytest.raises(DepthDecayError, match="--over"):
        depths_of([], [], [], 64)


def test_percentiles_occurred() -> None:
    assert percentiles([None]) is None
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50_000, "p95": 95_000, "p99": 99_000}
    assert LoadReport("tiny", 1.0, [Outcome("whole"), Outcome("status 429")]).errors == {"status 429": 1}
