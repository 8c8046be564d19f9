"""Parsing request bodies: bounded work, off the event loop for long bodies, and an error that names one mistake."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from depthdecay.serve.api_errors import ApiError, shortened
from depthdecay.serve.schema import FORM

Asked = TypeVar("Asked", bound=BaseModel)

SMALL_BODY = 2**14  # bytes; a longer body takes milliseconds to check, which would hold up running streams


class BodyReader:
    """Long bodies are checked one at a time: parsing holds the GIL, and several at once would hold up everything
    else."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="depthdecay-long-bodies")

    async def read(self, request: Request, model: type[Asked]) -> Asked:
        _require_json(request.headers.get("content-type", ""))
        try:
            body = await request.body()
        except ClientDisconnect:
            raise hung_up() from None
        if len(body) <= SMALL_BODY:
            return checked(model, body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, checked, model, body)

    def close(self) -> None:
        self._thread.shutdown(wait=False)  # bodies still queued are checked as usual, which is quick


def checked(model: type[Asked], body: bytes) -> Asked:
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _told(error) from None


def hung_up() -> ApiError:
    return ApiError(499, "the client disconnected", code="hung_up")


def _require_json(content_type: str) -> None:
    """This also keeps other sites' pages out: a browser lets them send plain text without a preflight, but not JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        said = f"is '{shortened(kind)}'" if kind else "is missing"
        raise ApiError(
            415, f"the content type {said}; send content-type: application/json", code="unsupported_media_type"
        )


def _told(error: ValidationError) -> ApiError:
    found: Any = error.errors(include_url=False, include_input=False)[0]
    places = [shortened(str(place)) for place in found["loc"] if not str(place).startswith(FORM)]
    param = ".".join(places) or None
    if found["type"] == "extra_forbidden":
        return ApiError(400, f"the parameter '{param}' is not supported", param=param, code="unsupported_parameter")
    if found["type"] == "not_supported":
        return ApiError(400, f"the parameter '{param}' {found['msg']}", param=param, code="unsupported_parameter")
    said = str(found["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {said}" if param else said, param=param, code="invalid_value")
