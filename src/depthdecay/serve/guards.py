"""What stands before the routes: request ids and logs, the key, the size of bodies, headers that browsers obey."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from depthdecay.serve.api_errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("depthdecay.serve")
OPEN_PATHS = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")


class Guard:
    """Plain ASGI, since a wrapper around responses would keep streams from seeing that their client has gone."""

    def __init__(self, app: App, *, api_key: str | None, max_body_bytes: int, seen: Callable[[str, int], None]) -> None:
        self.app = app
        self.key = None if api_key is None else _digest(api_key.encode())
        self.max_body_bytes = max_body_bytes
        self.seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        log: dict[str, Any] = {}
        scope["state"]["log"] = log
        started = time.monotonic()
        status = 0

        async def labelled(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        try:
            refusal = self._refused(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, labelled)
            else:
                await self.app(scope, self._counted(receive), labelled)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # not whatever a client makes up
            self.seen(path, status)
            seconds = round(time.monotonic() - started, 4)
            record = {"id": request_id, "method": scope["method"], "path": path, "status": status, "seconds": seconds}
            logger.info("request", extra={"fields": {**record, **log}})

    def _refused(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self.key is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            given = given[7:] if given[:7].lower() == b"bearer " else b""
            # Digests are compared, so that the time says nothing about the key, its length included.
            if not hmac.compare_digest(_digest(given), self.key):
                return ApiError(
                    401, "the API key is missing or wrong; send it as a bearer token", code="invalid_api_key"
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:18]) > self.max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a length are counted as they come."""
        read = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class JsonLines(logging.Formatter):
    """One JSON object a line. Requests are logged by id and figures; prompts, answers and keys never are."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        line["event"] = record.getMessage()
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            # The kind and the place, not the message: libraries put what they were given into it.
            line["error"] = record.exc_info[0].__name__ if record.exc_info[0] else ""
            line["at"] = _places(record.exc_info[2])
        return json.dumps(line)


def _places(traceback: Any) -> list[str]:
    import traceback as tracebacks

    return [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in tracebacks.extract_tb(traceback)[-8:]]


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("depthdecay.serve", "depthdecay.batching", "uvicorn"):
        named = logging.getLogger(name)
        named.handlers = [handler]
        named.propagate = False
        named.setLevel(logging.INFO)
