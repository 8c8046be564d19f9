"""From a loaded engine to a running server, and to its end on SIGTERM."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import uvicorn

from depthdecay.errors import DepthDecayError
from depthdecay.serve.guards import log_to_stderr
from depthdecay.serve.worker import Worker


class Server(uvicorn.Server):
    """Takes no new requests from the signal on, and ends when those that run have; Ctrl-C twice does not wait."""

    worker: Worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.worker.drain()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def run_server(app: Any, worker: Worker, host: str, port: int, grace_seconds: int) -> None:
    log_to_stderr()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=grace_seconds,
        server_header=False,
    )
    server = Server(config)
    server.worker = worker
    try:
        server.run()
    except SystemExit as error:
        raise DepthDecayError(f"the server cannot listen on {host}:{port}; is the port in use?") from error
    finally:
        worker.stop()
    if not server.started:
        raise DepthDecayError(f"the server cannot listen on {host}:{port}; is the port in use?")
