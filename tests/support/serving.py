"""A server with a tiny model in a thread, for tests that act as clients."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS

from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.model.load import load
from depthdecay.serve.app import ServeSettings, make_app
from depthdecay.serve.connections import ConnectionLimits
from depthdecay.serve.server import Server, bind
from depthdecay.serve.worker import Worker

PATIENCE = 240.0  # generous for a busy machine; a passing test never waits this long


@dataclass
class Running:
    url: str
    worker: Worker
    engine: Engine
    server: Server

    def is_clean(self) -> bool:
        """No row, block or ticket is left."""
        batcher = self.worker.batcher
        return batcher.is_idle and batcher.usage().used == 0 and self.worker.open_tickets == 0


def until(condition: Any, what: str = "the condition") -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.005)


def tiny_engine(folder: Path, plan: Plan | None = None) -> Engine:
    """Runs the model's own forward: compiled passes of such a small model finish before a test can look."""
    loaded = load(save_tiny_chat_model(folder), device="cpu")
    return Engine(loaded.model, loaded.tokenizer, plan or Plan.decay(LAYERS, "0.98"), fast=False)


@contextlib.contextmanager
def running(
    engine: Engine,
    batch: BatchSettings | None = None,
    *,
    max_waiting: int = 256,
    timeout_seconds: float = 60.0,
    ready: bool = True,
    grace_seconds: float = PATIENCE,
    limits: ConnectionLimits | None = None,
    **settings: Any,
) -> Iterator[Running]:
    worker = Worker(Batcher(engine, batch), max_waiting=max_waiting, timeout_seconds=timeout_seconds)
    app = make_app(worker, ServeSettings(**{"model_name": "tiny", **settings}))
    server = Server(app, worker, limits or ConnectionLimits(client_seconds=PATIENCE), grace_seconds)
    sockets = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the server")
        if ready:
            until(lambda: worker.state == "ready", "readiness")
        yield Running(f"http://127.0.0.1:{sockets[0].getsockname()[1]}", worker, engine, server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def events_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def post(server: Running, body: Any, path: str = "/v1/completions", **options: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE, **options)


def assert_problem(response: Any, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code
    return str(error["message"])


def slowed(server: Running) -> threading.Event:
    """Slow each step to a tenth of a second until the event is set, so that a test can observe a running answer."""
    seen = threading.Event()
    step = server.worker.batcher.step

    def slow_step() -> Any:
        seen.wait(0.1)
        return step()

    server.worker.batcher.step = slow_step  # type: ignore[method-assign]
    return seen


def long_ask(**changes: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 250, "stream": True, "temperature": 1, "seed": 1, **changes}


@contextlib.contextmanager
def served(folder: str, *options: str, most_files: int | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`depthdecay serve` in its own process, ready for requests: its address, and the process with its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "depthdecay", "serve", "--model", folder, "--device", "cpu", "--port", str(port)]
    if most_files is not None:
        command = ["sh", "-c", f'ulimit -n {most_files}; exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return bool(httpx.get(f"{url}/health").status_code == 200)
        except httpx.TransportError:
            assert process.poll() is None
            return False

    try:
        until(is_ready, "the server")
        yield url, process
    finally:
        process.kill()
        process.wait()
