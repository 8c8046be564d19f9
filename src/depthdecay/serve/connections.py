"""Connections whose clients do not keep us waiting: uvicorn's own protocol, with an end to every wait, and a limit."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from depthdecay.errors import DepthDecayError
from depthdecay.serve.api_errors import ApiError

logger = logging.getLogger("depthdecay.serve.connections")


@dataclass(frozen=True)
class ConnectionLimits:
    """What an operator decides about clients."""

    max_connections: int = 512
    # For sending a request, for reading what waits for it, and between two requests.
    client_seconds: float = 30.0
    # For a whole request; nothing holds a connection for longer than this and client_seconds together.
    request_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise DepthDecayError(f"max_connections is {self.max_connections}; expected a whole number of at least 1")
        if not self.client_seconds > 0:
            raise DepthDecayError(f"the client's timeout is {self.client_seconds} seconds; expected more than 0")


class BoundedProtocol(H11Protocol):
    """uvicorn ends quiet connections only behind a first answer, and only while not a byte has come."""

    def __init__(self, limits: ConnectionLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.limits = limits
        self._quiet_since = time.monotonic()  # no request is under way
        self._has_begun_request = False  # a part of the next request, or of the last one's body, has come
        self._asked_at = 0.0
        self._unread_since = 0.0
        self._closing_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Whoever has been quiet longest goes, so that idle connections shut nobody out."""
        quiet = [c for c in self.connections if isinstance(c, BoundedProtocol) and c is not self and c.is_quiet]
        if quiet:
            oldest = min(quiet, key=lambda connection: connection._quiet_since)
            oldest.end("made room for another")
            return
        message = f"{self.limits.max_connections} connections are at work already; try again later"
        self.refuse(ApiError(503, message, code="too_many_connections", retry_after=1))

    @property
    def is_quiet(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self.is_quiet and not self._has_begun_request:
            self._quiet_since, self._has_begun_request = time.monotonic(), True
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._asked_at, self._has_begun_request = time.monotonic(), False

    def on_response_complete(self) -> None:
        self._quiet_since = time.monotonic()
        # A body that nobody wants is still coming; that it comes does not make the client a busy one.
        self._has_begun_request = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    def end_if_overdue(self, now: float) -> None:
        """End what a client has kept waiting for too long. Asked every now and then."""
        patience = self.limits.client_seconds
        if self.transport.is_closing():  # and yet here: it does not read what was written last
            self._closing_since = now if self._closing_since is None else self._closing_since
            if now - self._closing_since > patience:
                self.transport.abort()
        elif self.is_quiet:
            if now - self._quiet_since > patience:
                if self._has_begun_request and self.conn.our_state is h11.IDLE:
                    self.refuse(_too_slow("the request's headers", patience))
                else:
                    self.end("quiet for too long")
        elif self.flow.write_paused and now - self._unread_since > patience:
            self.end("did not read its answer")
        elif self.cycle.more_body and not self.cycle.response_started and now - self._asked_at > patience:
            self.refuse(_too_slow("the request's body", patience))
        elif now - self._asked_at > self.limits.request_seconds + patience:
            self.end("took too long in all")

    def refuse(self, error: ApiError) -> None:
        """An answer of the connection's own, without the app, and the end."""
        logger.info("connection refused", extra={"fields": {"status": error.status, "why": error.message}})
        body = error.response()
        headers = [*body.raw_headers, (b"connection", b"close")]
        start = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        for event in (start, h11.Data(data=bytes(body.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def end(self, why: str) -> None:
        logger.info("connection ended", extra={"fields": {"why": why}})
        self.transport.abort()


def _too_slow(what: str, seconds: float) -> ApiError:
    return ApiError(408, f"{what} did not arrive within {seconds:g} seconds", code="request_timeout")
