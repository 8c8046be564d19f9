"""Connections with limits: uvicorn's protocol plus a timeout for every wait and a maximum number of connections."""

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
    """The operator's limits for clients."""

    max_connections: int = 512
    # For sending a request, for reading the response, and between two requests.
    client_seconds: float = 30.0
    # For a whole request; no connection lasts longer than this plus client_seconds.
    request_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise DepthDecayError(f"max_connections is {self.max_connections}; expected a whole number of at least 1")
        if not self.client_seconds > 0:
            raise DepthDecayError(f"the client timeout is {self.client_seconds} seconds; expected more than 0")


class BoundedProtocol(H11Protocol):
    """uvicorn itself closes idle connections only after a first response, and only if no byte has arrived since."""

    def __init__(self, limits: ConnectionLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.limits = limits
        self._quiet_since = time.monotonic()  # no request in progress
        self._has_begun_request = False  # part of the next request, or of the last one's body, has arrived
        self._asked_at = 0.0
        self._unread_since = 0.0
        self._closing_since: float | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has been idle longest, so that idle ones do not block new clients."""
        quiet = [c for c in self.connections if isinstance(c, BoundedProtocol) and c is not self and c.is_quiet]
        if quiet:
            oldest = min(quiet, key=lambda connection: connection._quiet_since)
            oldest.end("closed to make room for another")
            return
        message = f"all {self.limits.max_connections} connections are busy; try again later"
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
        # The rest of a refused body may still be arriving; that does not make the client busy.
        self._has_begun_request = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    def end_if_overdue(self, now: float) -> None:
        """Close the connection if its client has kept us waiting too long. Called periodically."""
        patience = self.limits.client_seconds
        if self.transport.is_closing():  # still open, since the client does not read what was written last
            self._closing_since = now if self._closing_since is None else self._closing_since
            if now - self._closing_since > patience:
                self.transport.abort()
        elif self.is_quiet:
            if now - self._quiet_since > patience:
                if self._has_begun_request and self.conn.our_state is h11.IDLE:
                    self.refuse(_too_slow("the request's headers", patience))
                else:
                    self.end("idle for too long")
        elif self.flow.write_paused and now - self._unread_since > patience:
            self.end("did not read its response")
        elif self.cycle.more_body and not self.cycle.response_started and now - self._asked_at > patience:
            self.refuse(_too_slow("the request's body", patience))
        elif now - self._asked_at > self.limits.request_seconds + patience:
            self.end("request took too long")

    def refuse(self, error: ApiError) -> None:
        """Send an error without involving the app, and close the connection."""
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
