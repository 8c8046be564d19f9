"""Runs the server on a loaded engine until SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn

from depthdecay.errors import DepthDecayError, one_line
from depthdecay.garbage import freeze_for_good
from depthdecay.serve.connections import BoundedProtocol, ConnectionLimits
from depthdecay.serve.logs import log_to_stderr
from depthdecay.serve.worker import Worker

logger = logging.getLogger("depthdecay.serve")

# The batch's thread releases the GIL at every torch operation, and gets it back from a busy event loop only after this
# time. With Python's default of 5 ms, a step took many times as long during a flood of small requests.
SWITCH_SECONDS = 0.0005
LAST_WORDS_SECONDS = 5  # for telling clients that the server has stopped
# asyncio accepts this many connections at once, before any of them can make room for another. Further ones wait in the
# system's queue.
ACCEPTED_AT_ONCE = 32
QUEUED_BY_SYSTEM = 512
_OWN_FILES = 128  # file descriptors other than connections: model files, libraries, the log


class Server(uvicorn.Server):
    """A server with timeouts for clients. After a signal it refuses new requests and stops once the running ones have
    finished; a second Ctrl-C stops it at once."""

    def __init__(self, app: Any, worker: Worker, limits: ConnectionLimits, grace_seconds: float = 60.0) -> None:
        config = uvicorn.Config(
            app,
            http=functools.partial(BoundedProtocol, limits),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=max(1, round(min(limits.client_seconds, 86_400))),
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            server_header=False,
        )
        super().__init__(config)
        self.worker = worker
        self.limits = limits
        self.grace_seconds = grace_seconds
        self.is_hurried = False  # Ctrl-C was pressed again while the last requests finish
        self._looking_after: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.worker.drain()
        # Not uvicorn's force_exit: it skips the app's shutdown, which then ends in a traceback.
        self.is_hurried = self.is_hurried or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUED_BY_SYSTEM)  # asyncio has set this to ACCEPTED_AT_ONCE
        self._looking_after = asyncio.create_task(self._look_after_connections())

    async def _look_after_connections(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.limits.client_seconds / 4))
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.end_if_overdue(now)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.drain()
        await self._finish_requests()
        # Requests still open get an error: a stream as its last event, the others as a 503.
        await asyncio.to_thread(self.worker.stop)
        await super().shutdown(sockets)
        if self._looking_after is not None:
            self._looking_after.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _finish_requests(self) -> None:
        """Keeps listening, so that /health reports the state; new requests are refused at once."""
        taken = set(self.server_state.tasks)
        end = time.monotonic() + self.grace_seconds
        while not self.is_hurried and time.monotonic() < end and not all(task.done() for task in taken):
            await asyncio.sleep(0.05)
        left = sum(not task.done() for task in taken)
        if left:
            logger.warning("stopped before all requests were finished", extra={"fields": {"requests": left}})


def bind(host: str, port: int) -> list[socket.socket]:
    """Claim the port before the model is loaded, so that a conflict shows early. Clients cannot connect yet."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            if sys.platform != "win32":  # there it would let two servers share a port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise _cannot_listen(host, port, error) from error
    return sockets


def run_server(
    app: Any, worker: Worker, sockets: Sequence[socket.socket], limits: ConnectionLimits, grace_seconds: float
) -> None:
    log_to_stderr()
    # Requests create many objects; garbage collection should not scan everything the libraries hold each time.
    gc.collect()
    freeze_for_good()
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, worker, limits, grace_seconds)
    host, port = sockets[0].getsockname()[:2]
    try:
        for bound in sockets:
            bound.listen(QUEUED_BY_SYSTEM)  # fails if another server has bound the same port and listens by now
        logger.info("listening", extra={"fields": {"host": host, "port": port}})
        server.run(list(sockets))
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    finally:
        worker.stop()
        for bound in sockets:
            bound.close()


def most_connections(wanted: int) -> int:
    """The number asked for, limited by the files that a process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if most == resource.RLIM_INFINITY else max(1, min(wanted, most - _OWN_FILES))


def _cannot_listen(host: str, port: int, error: OSError) -> DepthDecayError:
    if error.errno == errno.EADDRINUSE:
        why = "the port is in use; choose another with --port"
    elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address; use 127.0.0.1 for local clients only, or 0.0.0.0 for any client"
    elif error.errno == errno.EACCES:
        why = "ports below 1024 need administrator rights; choose another with --port"
    else:
        why = one_line(error.strerror or error)
    return DepthDecayError(f"the server cannot listen on {host}:{port}: {why}")
