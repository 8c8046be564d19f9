"""Bodies that would cause endless work: refused at their first mistake, by name, with a short message."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from depthdecay.serve.api_errors import ApiError
from depthdecay.serve.reading import _require_json, checked
from depthdecay.serve.schema import ChatRequest, CompletionRequest

MANY = 20_000
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (ChatRequest, {"messages": [{}] * MANY}, "messages.0.role"),
        (ChatRequest, {"messages": [USER] * MANY}, "messages"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content.0.type"),
        (CompletionRequest, {"prompt": [[]] * MANY}, "prompt.0"),
        (CompletionRequest, {"prompt": ["a"] * MANY}, "prompt"),
        (CompletionRequest, {"prompt": [1] * MANY + ["a"]}, f"prompt.{MANY}"),
        (CompletionRequest, {"prompt": [-1] * MANY}, "prompt.0"),
        (CompletionRequest, {"prompt": [["a"] * MANY]}, "prompt.0.0"),
        (CompletionRequest, {"prompt": "a", "stop": ["a"] * MANY}, "stop"),
        (CompletionRequest, {"prompt": "a", "stop": [""] * MANY}, "stop.0"),
        (CompletionRequest, {"prompt": "a", "stop": "a" * MANY}, "stop"),
        (CompletionRequest, {"prompt": "a", "model": "a" * MANY}, "model"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(n): 0 for n in range(MANY)}}, "logit_bias"),
        (ChatRequest, {"messages": [USER], "metadata": {str(n): 0 for n in range(MANY)}}, "metadata"),
        (CompletionRequest, {"prompt": "a", **{str(n): n for n in range(MANY)}}, None),
        (CompletionRequest, {"prompt": "a", "depth_decay": {str(n): n for n in range(MANY)}}, "depth_decay"),
    ],
)
def test_a_list_ends_at_its_first_mistake(model: Any, body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    assert found.value.error_count() <= 2  # for one element, not for each of them
    with pytest.raises(ApiError) as told:
        checked(model, json.dumps(body).encode())
    assert (told.value.status, told.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "stop": list("abcde")}, "at most 4 items"),
        ({"prompt": "a", "stop": 5}, "expected a string or a list of strings"),
        ({"prompt": 5}, "expected a string, strings, token ids"),
        ({"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
    ],
)
def test_what_is_said_is_about_the_form_that_was_sent(body: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        checked(CompletionRequest, json.dumps(body).encode())


def test_what_a_client_sent_is_not_told_back_at_length() -> None:
    with pytest.raises(ApiError) as told:
        checked(CompletionRequest, json.dumps({"prompt": "a", "b" * 10**6: 1}).encode())
    assert told.value.code == "unsupported_parameter"
    assert len(json.dumps(told.value.body())) < 500


def test_a_body_that_is_no_json_is_told_where() -> None:
    with pytest.raises(ApiError, match="line 1 column 10"):
        checked(CompletionRequest, b'{"prompt":')
    with pytest.raises(ApiError, match="recursion"):
        checked(CompletionRequest, b"[" * 10**6)


def test_only_json_is_read() -> None:
    for good in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        _require_json(good)
    for bad, words in (("", "is missing"), ("text/plain", "'text/plain'"), ("x" * 10**6, "…")):
        with pytest.raises(ApiError, match=words) as told:
            _require_json(bad)
        assert told.value.status == 415
        assert len(told.value.message) < 300
