"""A server of a tiny model in a thread, for tests that talk to it as clients do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from saved_model import save_tiny_chat_model
from tiny_models import LAYERS

from depthdecay import Engine, Plan
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.model.load import load
from depthdecay.serve.app import ServeSettings, make_app
from depthdecay.serve.worker import Worker

PATIENCE = 240.0  # a busy machine may take its time; nothing here waits in vain


@dataclass
class Running:
    url: str
    worker: Worker
    engine: Engine

    def is_clean(self) -> bool:
        """No row, block or ticket is left behind."""
        batcher = self.worker.batcher
        return batcher.is_idle and batcher.usage().used == 0 and self.worker.open_tickets == 0


def until(condition: Any, what: str = "the condition") -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(0.005)


def tiny_engine(folder: Path, plan: Plan | None = None) -> Engine:
    """By the model's own forward: compiled passes of so small a model end before a test has looked."""
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
    **settings: Any,
) -> Iterator[Running]:
    worker = Worker(Batcher(engine, batch), max_waiting=max_waiting, timeout_seconds=timeout_seconds)
    app = make_app(worker, ServeSettings(**{"model_name": "tiny", **settings}))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the server")
        port = server.servers[0].sockets[0].getsockname()[1]
        if ready:
            until(lambda: worker.state == "ready", "readiness")
        yield Running(f"http://127.0.0.1:{port}", worker, engine)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def events_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]
