"""Clients that keep a server waiting: every wait has a timeout, and no client blocks the others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from saved_model import save_tiny_chat_model  # noqa: E402
from serving import PATIENCE, Running, long_ask, post, running, served, slowed, until  # noqa: E402

from depthdecay import DepthDecayError, Engine  # noqa: E402
from depthdecay.batching.batcher import BatchSettings  # noqa: E402
from depthdecay.serve.connections import ConnectionLimits  # noqa: E402
from depthdecay.serve.logs import JsonLines, RateLimit  # noqa: E402
from depthdecay.serve.server import bind, most_connections  # noqa: E402

BATCH = BatchSettings(max_batch=8, cohort_seconds=0)
IMPATIENT = ConnectionLimits(client_seconds=0.3)


@pytest.fixture(scope="module")
def impatient(engine: Engine) -> Iterator[Running]:
    with running(engine, BATCH, limits=IMPATIENT) as server:
        yield server


@contextlib.contextmanager
def connected(server: Running, sent: bytes = b"", receive_buffer: int | None = None) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(PATIENCE)
        client.connect((host, int(port)))
        client.sendall(sent)
        yield client


def all_of(client: socket.socket) -> bytes:
    """Everything received until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            received += piece
    return received


def asked(body: dict[str, Any], said: int = -1) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content) if said < 0 else said}\r\n\r\n".encode() + content


def test_a_connection_that_says_nothing_ends(impatient: Running) -> None:
    with connected(impatient) as client:
        assert all_of(client) == b""


def test_headers_that_do_not_come_to_an_end_are_refused(impatient: Running) -> None:
    with connected(impatient, b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n") as client:
        head, _, body = all_of(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_headers_that_come_byte_by_byte_do_not_win_time(impatient: Running) -> None:
    with connected(impatient) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:  # until the server closes the connection
            client.sendall(b"x")


def test_a_body_that_does_not_come_is_refused(impatient: Running) -> None:
    with connected(impatient, asked({"prompt": "a"}, said=1000)) as client:
        head, _, body = all_of(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert "body" in json.loads(body)["error"]["message"]
    counted = 'depthdecay_requests_total{path="/v1/completions",status="499"}'
    until(lambda: counted in httpx.get(f"{impatient.url}/metrics").text)


def test_a_refused_body_that_goes_on_and_on_ends(engine: Engine) -> None:
    with (
        running(engine, BATCH, limits=IMPATIENT, max_body_bytes=100) as server,
        connected(server, asked({"prompt": "a"}, said=10**9)) as client,
    ):
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                client.sendall(b"x")


def test_a_kept_connection_ends_when_no_further_request_comes(impatient: Running) -> None:
    with connected(impatient, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n") as client:
        assert b'"ready"' in all_of(client)


def test_who_does_not_read_its_stream_frees_its_row(engine: Engine) -> None:
    with running(engine, BATCH, limits=IMPATIENT) as server:
        seen = slowed(server)
        with connected(server, asked(long_ask(n=8, logprobs=20)), receive_buffer=4096):
            until(lambda: server.worker.batcher.rows)
            (connection,) = server.server.server_state.connections
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection.transport.set_write_buffer_limits(high=4096)
            until(lambda: not server.server.server_state.connections, "the end of the connection")
            until(server.is_clean)
        seen.set()
        assert server.worker.batcher.counters.tokens < 8 * 250


def test_a_request_ends_with_its_time_even_if_its_client_always_reads_a_little(engine: Engine) -> None:
    limits = ConnectionLimits(client_seconds=0.2, request_seconds=0.2)
    with running(engine, BATCH, limits=limits) as server:
        seen = slowed(server)  # the batch's own timeout is 60 seconds
        with connected(server, asked(long_ask())) as client:
            assert b"[DONE]" not in all_of(client)
        until(server.is_clean)
        seen.set()


def test_idle_connections_make_room(engine: Engine) -> None:
    limits = ConnectionLimits(max_connections=3, client_seconds=PATIENCE)
    with running(engine, BATCH, limits=limits) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(3)]
        until(lambda: len(server.server.server_state.connections) == 3)
        for oldest in idle[:2]:
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
            assert all_of(oldest) == b""
            # The connection that httpx opened is closed again.
            until(lambda: len(server.server.server_state.connections) < 3)
            idle.append(stack.enter_context(connected(server)))
            until(lambda: len(server.server.server_state.connections) == 3)


def test_connections_at_work_are_not_ended_for_others(engine: Engine) -> None:
    limits = ConnectionLimits(max_connections=2, client_seconds=PATIENCE)
    with running(engine, BATCH, limits=limits) as server, ThreadPoolExecutor(2) as pool:
        seen = slowed(server)
        busy = [pool.submit(post, server, long_ask(seed=seed)) for seed in range(2)]
        until(lambda: len(server.worker.batcher.rows) == 2)
        with connected(server) as client:
            head, _, body = all_of(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in head.lower()
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        seen.set()
        assert [future.result().text.rstrip()[-6:] for future in busy] == ["[DONE]"] * 2


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(DepthDecayError, match="max_connections"):
        ConnectionLimits(max_connections=0)
    with pytest.raises(DepthDecayError, match="more than 0"):
        ConnectionLimits(client_seconds=0)
    assert 1 <= most_connections(10**9) < 10**9
    assert most_connections(1) == 1


def test_a_port_is_taken_but_not_yet_listened_to() -> None:
    (bound,) = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with bound, socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(DepthDecayError, match="port is in use"):
            bind("127.0.0.1", port)


# The log.


def test_a_log_lets_so_much_through_and_tells_what_it_left_out() -> None:
    now = [0.0]
    limit = RateLimit(most=2, seconds=10, clock=lambda: now[0])

    def let_through() -> logging.LogRecord | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "socket.accept() failed", (), None)
        return record if limit.filter(record) else None

    assert [let_through() is not None for _ in range(5)] == [True, True, False, False, False]
    now[0] = 10.0
    told = let_through()
    assert told is not None
    assert json.loads(JsonLines().format(told))["left_out"] == 3
    assert let_through() is not None
    assert let_through() is None


def test_what_libraries_say_is_json_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from depthdecay.serve import logs

    told = io.StringIO()
    monkeypatch.setattr(logs.sys, "stderr", told)
    loggers = [logging.getLogger(name) for name in ("depthdecay.serve", "depthdecay.batching", "uvicorn", "asyncio")]
    limited = [logging.getLogger(name) for name in logs._RATE_LIMITED]
    before = [(each, each.handlers, each.propagate, each.level) for each in loggers]
    try:
        logs.log_to_stderr()
        for _ in range(100):
            logging.getLogger("asyncio").error("socket.accept() out of system resource")
    finally:
        for each, handlers, propagate, level in before:
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)
        for each in limited:
            each.filters = []
    lines = told.getvalue().splitlines()
    assert len(lines) == 10
    assert all(json.loads(line)["level"] == "error" for line in lines)


@pytest.mark.skipif(os.name == "nt", reason="there is no such limit")
def test_more_connections_than_descriptors_neither_shut_others_out_nor_fill_the_log(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "model")
    with served(folder, most_files=192) as (url, process), contextlib.ExitStack() as idle:
        port = int(url.rpartition(":")[2])
        for _ in range(400):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        process.send_signal(signal.SIGTERM)
        idle.close()
        _, log = process.communicate(timeout=PATIENCE)
    assert "Too many open files" not in log
    told = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert told
    assert "Traceback" not in log
    assert len(log) < 2**17
