"""Errors in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

LONGEST_MESSAGE = 1000  # characters; a client's own input is echoed only in part
LONGEST_NAME = 100


class ApiError(Exception):
    """An error that is returned as the response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shortened(message, LONGEST_MESSAGE)
        self.param = None if param is None else shortened(param, LONGEST_NAME)
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": kind_of(self.status), "param": self.param, "code": self.code}
        }

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        headers = dict(headers or {})
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def kind_of(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")


def shortened(text: str, most: int = LONGEST_NAME) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def dumps(content: Any) -> str:
    """JSON in plain ASCII, so that a lone surrogate in a request can be echoed safely."""
    return json.dumps(content, separators=(",", ":"))


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(content), status, headers, media_type="application/json")
