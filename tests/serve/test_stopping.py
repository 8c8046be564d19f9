"""Shutdown: the server reports that it is draining, finishes running requests, and sends an error to the rest."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from serving import (  # noqa: E402
    PATIENCE,
    Running,
    assert_problem,
    events_of,
    long_ask,
    post,
    running,
    slowed,
    until,
)

from depthdecay import Engine  # noqa: E402
from depthdecay.batching.batcher import BatchSettings  # noqa: E402
from depthdecay.serve import tokenizing  # noqa: E402

BATCH = BatchSettings(max_batch=8, cohort_seconds=0)


def end(server: Running) -> None:
    server.server.handle_exit(signal.SIGTERM, None)


def test_health_and_new_requests_are_answered_while_the_last_ones_finish(engine: Engine) -> None:
    with running(engine, BATCH) as server, ThreadPoolExecutor(1) as pool:
        seen = slowed(server)
        taken = pool.submit(post, server, long_ask())
        until(lambda: server.worker.batcher.rows)
        end(server)
        health = httpx.get(f"{server.url}/health", timeout=PATIENCE)
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        refused = post(server, {"prompt": "a"})
        assert_problem(refused, 503, code="draining")
        assert refused.headers["retry-after"] == "5"
        seen.set()
        assert events_of(taken.result())[-1] == "[DONE]"


def test_at_the_end_of_grace_every_client_is_told(engine: Engine) -> None:
    with running(engine, BATCH, grace_seconds=0.1) as server, ThreadPoolExecutor(2) as pool:
        slowed(server)
        streamed, whole = (pool.submit(post, server, long_ask(stream=stream)) for stream in (True, False))
        until(lambda: len(server.worker.batcher.rows) == 2)
        end(server)
        last = json.loads(events_of(streamed.result())[-1])
        assert last["error"]["code"] == "stopped"
        assert last["error"]["type"] == "server_error"
        assert_problem(whole.result(), 503, code="stopped")


def test_a_request_that_is_still_being_read_is_told_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    read = tokenizing.token_ids

    def slow(*given: object) -> list[int]:
        begun.set()
        go.wait(PATIENCE)
        return read(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizing, "token_ids", slow)
    with running(engine, BATCH, grace_seconds=0.1) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, long_ask(stream=False))
        assert begun.wait(PATIENCE)
        end(server)
        until(lambda: server.worker.state == "stopped")
        go.set()
        assert_problem(asked.result(), 503, code="stopped")


def test_ctrl_c_twice_does_not_wait_and_leaves_no_traceback(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with running(engine, BATCH) as server, ThreadPoolExecutor(1) as pool:
        slowed(server)
        streamed = pool.submit(post, server, long_ask())
        until(lambda: server.worker.batcher.rows)
        for _ in range(2):
            server.server.handle_exit(signal.SIGINT, None)
        until(lambda: server.worker.state == "stopped")
        assert "[DONE]" not in streamed.result().text
    assert "Traceback" not in caplog.text
