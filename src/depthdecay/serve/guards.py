"""Middleware in front of the routes: request ids, logs, hosts, the API key, body size and security headers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from depthdecay.serve.api_errors import ApiError, shortened
from depthdecay.serve.hosts import host_name

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("depthdecay.serve")
OPEN_PATHS = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
HUNG_UP = 499  # as proxies log it: the client disconnected before the response
# For responses without a policy of their own: they are data, which a browser should show and never run.
_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


class Guard:
    """Plain ASGI: a wrapper around responses would hide a client's disconnect from streams."""

    def __init__(
        self,
        app: App,
        *,
        api_key: str | None,
        max_body_bytes: int,
        allowed_hosts: frozenset[str] | None,
        path_of: Callable[[Scope], str],
        seen: Callable[[str, int], None],
    ) -> None:
        self.app = app
        self.key = None if api_key is None else _digest(api_key.encode())
        self.max_body_bytes = max_body_bytes
        self.allowed_hosts = allowed_hosts
        self.path_of = path_of
        self.seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        log: dict[str, Any] = {}
        method = scope["method"]
        # A HEAD is a GET without the body, which the HTTP protocol leaves out itself.
        scope = {**scope, "method": "GET" if method == "HEAD" else method}
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "log": log}
        started = time.monotonic()
        status = 0

        async def labelled(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
                given = list(message.get("headers", []))
                own += [] if any(name == _POLICY[0] for name, _ in given) else [_POLICY]
                message = {**message, "headers": [*given, *own]}
            await send(message)

        try:
            refusal = self._refused(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, labelled)
            else:
                await self.app(scope, self._counted(receive), labelled)
        except asyncio.CancelledError:  # the server is shutting down and no longer waits for this request
            if status == 0:
                stopped = ApiError(503, "the server was stopped", code="stopped")
                await stopped.response()(scope, receive, labelled)
        finally:
            path = self.path_of(scope)
            self.seen(path, status or HUNG_UP)
            seconds = round(time.monotonic() - started, 4)
            record = {"id": request_id, "method": method, "path": path, "status": status or HUNG_UP, "seconds": seconds}
            logger.info("request", extra={"fields": {**record, **log}})

    def _refused(self, scope: Scope) -> ApiError | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]

        def values(name: bytes) -> list[bytes]:
            return [value for given, value in headers if given == name]

        return (
            self._host_refused(values(b"host"))
            or (None if scope["path"] in OPEN_PATHS else self._key_refused(values(b"authorization")))
            or self._length_refused(values(b"content-length"))
        )

    def _host_refused(self, given: list[bytes]) -> ApiError | None:
        if self.allowed_hosts is None or not given:  # browsers always send it
            return None
        name = host_name(given[0].decode("latin-1"))
        if name in self.allowed_hosts:
            return None
        message = f"the host '{shortened(name)}' is not served here; start the server with --allowed-host to allow it"
        return ApiError(403, message, code="host_not_allowed")

    def _key_refused(self, given: list[bytes]) -> ApiError | None:
        if self.key is None:
            return None
        if len(given) > 1:  # a proxy might have checked the other one
            return ApiError(401, "the Authorization header was sent more than once", code="invalid_api_key")
        said = given[0] if given else b""
        key = said[7:] if said[:7].lower() == b"bearer " else b""
        # Digests are compared, so that timing reveals nothing about the key, not even its length.
        if hmac.compare_digest(_digest(key), self.key):
            return None
        return ApiError(401, "the API key is missing or wrong; send it as a bearer token", code="invalid_api_key")

    def _length_refused(self, given: list[bytes]) -> ApiError | None:
        length = given[0] if given else b"0"
        return self._too_large() if length.isdigit() and int(length[:18]) > self.max_body_bytes else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a declared length are counted as they arrive."""
        read = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_body_bytes:
                raise self._too_large()
            return message

        return counted


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
