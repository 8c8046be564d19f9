"""The server as clients see it: OpenAI's API, errors in its format, and nothing left behind by any request."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from saved_model import save_tiny_chat_model  # noqa: E402
from serving import (  # noqa: E402
    PATIENCE,
    Running,
    assert_problem,
    events_of,
    long_ask,
    post,
    running,
    served,
    slowed,
    until,
)
from tiny_models import LAYERS  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from depthdecay import DepthDecayError, Engine, Plan  # noqa: E402
from depthdecay.batching.batcher import BatchSettings, Update  # noqa: E402
from depthdecay.batching.drafting import BatchDrafting, BatchPace, CPUPace, RowDrafts  # noqa: E402
from depthdecay.cli import app  # noqa: E402
from depthdecay.cli.serve import KEY_VARIABLE, read_key  # noqa: E402
from depthdecay.plan.schedule import PowerSchedule  # noqa: E402
from depthdecay.runners.block_runner import BlockRunner  # noqa: E402
from depthdecay.serve.logs import JsonLines  # noqa: E402
from depthdecay.serve.responses import Account, ApiAnswer  # noqa: E402
from depthdecay.serve.token_bytes import token_bytes, token_name  # noqa: E402
from depthdecay.speculative.expected_gain import TrackRecord  # noqa: E402

BATCH = BatchSettings(max_batch=8, prefill_tokens=16, cohort_seconds=0.005)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine, BATCH) as server:
        yield server
        until(server.is_clean, "an empty batch")


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


# The official client.


def test_chat_is_the_engines_own_answer(client: Any, engine: Engine) -> None:
    messages = [{"role": "user", "content": "héllo"}]
    alone = engine.generate([messages], 20, mode="decay", temperature=0)[0]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=20, temperature=0, extra_body={"depth_decay": {"depths": True}}
    )
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == alone.prompt_tokens
    told = answer.model_extra["depth_decay"]
    assert told["depths"] == [alone.depths]
    assert told["layers_executed"] == alone.layers_executed
    assert told["layer_speedup"] == pytest.approx(alone.layer_speedup)


def test_a_stream_joins_to_the_whole_answer(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "abc"}]},
        ],
        "max_completion_tokens": 30,
        "seed": 5,
        "temperature": 1.0,
        "n": 3,
        "extra_body": {"depth_decay": {"mode": "decay", "alpha": 0.95, "depths": True}},
    }
    whole = client.chat.completions.create(**asked)
    texts, depths = ["", "", ""], [[], [], []]
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            depths[choice.index] += chunk.model_extra.get("depth_decay", {}).get("depths", [])
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3  # samples differ
    assert depths == [list(Plan.decay(LAYERS, "0.95").depths(30))] * 3
    assert usage == whole.usage


def test_completions_with_several_prompts_choices_and_log_probabilities(client: Any, engine: Engine) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["ab", "cde"], n=2, seed=3, temperature=0.9, top_p=0.9, max_tokens=6, logprobs=2
    )
    alone = engine.generate(["ab", "ab", "cde", "cde"], 6, seed=3, temperature=0.9, top_p=0.9, chat=False, mode="decay")
    assert [choice.text for choice in answer.choices] == [result.text for result in alone]
    assert answer.usage.prompt_tokens == 5
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 6
    assert all(len(top) <= 2 for top in logprobs.top_logprobs)
    ids = client.completions.create(model="tiny", prompt=[10, 11, 12], max_tokens=3, temperature=0)
    assert ids.usage.prompt_tokens == 3


def test_a_stream_tells_the_whole_answers_log_probabilities(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "ab", "seed": 4, "temperature": 1.2, "max_tokens": 12, "logprobs": 3}
    whole = client.completions.create(**asked).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True) if chunk.choices]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces if piece is not None for value in getattr(piece, name)] == getattr(
            whole, name
        )


class Bytes:
    """A minimal tokenizer: "é" over two tokens, a byte as its number, a space as its marker."""

    written = ("Ã", "©", "<0xE2>", "▁sky", "<s>", "ab")
    texts = ("\ufffd", "\ufffd", "\ufffd", "sky", "<s>", "ab")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.written[token]

    def decode(self, tokens: list[int]) -> str:
        return self.texts[tokens[0]]


def test_tokens_have_their_own_bytes() -> None:
    found = [token_bytes(Bytes(), token) for token in range(6)]
    assert found == [b"\xc3", b"\xa9", b"\xe2", b" sky", b"<s>", b"ab"]
    assert b"".join(found[:2]).decode() == "é"
    assert [token_name(said) for said in found[:4]] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe2", " sky"]


def test_half_a_character_starts_where_the_character_does() -> None:
    account = Account()
    ticket = SimpleNamespace(ids=[0])
    settings: dict[str, Any] = {"model": "m", "mode": "full", "num_layers": 8, "tell_depths": False}
    answer = ApiAnswer("text", "id", **settings, tokenizer=Bytes(), ticket=ticket, prompt_tokens=1, account=account)  # type: ignore[arg-type]
    for token in (5, 0, 1, 3):
        logprobs = SimpleNamespace(chosen=-1.0, top=[(0, -1.0), (1, -2.0)])
        answer.take(Update(0, token, 8, logprobs=logprobs))  # type: ignore[arg-type]
    told = answer.whole()["choices"][0]["logprobs"]
    assert told["text_offset"] == [0, 2, 2, 3]
    assert all(len(top) == 2 for top in told["top_logprobs"])  # two halves of characters are two tokens


def test_time_per_token_is_of_each_answer() -> None:
    account = Account()
    for _ in range(3):
        account.saw(0)
        account.saw(1)
    assert account.tokens == 6
    assert [count for _, _, count in account.spans.values()] == [3, 3]


def test_a_long_prompt_shortens_no_other_answer(server: Running) -> None:
    answer = post(server, {"prompt": [[10, 11], [12] * 250], "max_tokens": 20, "temperature": 0}).json()
    alone = post(server, {"prompt": [10, 11], "max_tokens": 20, "temperature": 0}).json()
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 20 + 6


def test_what_is_null_was_not_said(client: Any, server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    plain = post(server, body).json()["choices"]
    nulls = {"n": None, "stream": None, "stop": None, "logprobs": None, "tools": None, "depth_decay": {"mode": None}}
    assert post(server, {**body, **nulls}).json()["choices"] == plain
    messages = [{"role": "user", "content": "a"}]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, logprobs=None, n=None)
    assert_problem(post(server, {"prompt": None}), 400, param="prompt")


def test_the_least_temperatures_take_the_likeliest_token(server: Running) -> None:
    texts = {
        post(server, {"prompt": "ab", "max_tokens": 8, "temperature": t, "seed": 1}).json()["choices"][0]["text"]
        for t in (0, 1e-38, 1e-30, 1e-6)
    }
    assert len(texts) == 1


def test_a_message_is_text_unless_the_server_was_told_otherwise(server: Running, engine: Engine) -> None:
    """`</s>` is one token as a control token, and four characters as text."""

    def prompt_tokens(asked: Running, content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return int(post(asked, body, "/v1/chat/completions").json()["usage"]["prompt_tokens"])

    assert prompt_tokens(server, "a</s>b") == prompt_tokens(server, "a1234b")
    with running(engine, BATCH, control_tokens_in_content=True) as other:
        assert prompt_tokens(other, "a</s>b") == prompt_tokens(other, "a1b")


def test_a_line_break_is_a_prompt(server: Running) -> None:
    assert post(server, {"prompt": "\n", "max_tokens": 2}).status_code == 200


def test_chat_log_probabilities(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    for token in answer.choices[0].logprobs.content:
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs))  # greedy: most likely


def test_stop_strings_end_the_text(client: Any) -> None:
    free = client.completions.create(model="tiny", prompt="abc", max_tokens=30, temperature=0).choices[0].text
    stop = free[8:10]
    cut = client.completions.create(model="tiny", prompt="abc", max_tokens=30, temperature=0, stop=[stop]).choices[0]
    assert cut.text == free[: free.index(stop)]
    assert cut.finish_reason == "stop"


def test_modes(server: Running, engine: Engine) -> None:
    full = engine.generate(["abc"], 12, mode="full", chat=False, temperature=0)[0]
    for mode in ("full", "lossless"):
        answer = post(
            server, {"prompt": "abc", "max_tokens": 12, "temperature": 0, "depth_decay": {"mode": mode}}
        ).json()
        assert answer["choices"][0]["text"] == full.text
        assert answer["depth_decay"]["mode"] == mode
        assert mode == "lossless" or answer["depth_decay"]["layer_speedup"] == 1.0
    asked = {"prompt": "abc", "max_tokens": 40, "depth_decay": {"speedup": 1.25, "over_tokens": 40}}
    assert post(server, asked).json()["depth_decay"]["layer_speedup"] >= 1.25


def test_a_lossless_answer_tells_its_drafts_and_metrics_count_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = engine.generate(["abcabc"], 24, mode="full", chat=False, temperature=0)[0]
    text = engine.tokenizer("abcabc", add_special_tokens=False).input_ids + full.token_ids

    def found(self: RowDrafts, longest: int) -> list[int]:
        if self.text is None:
            return []
        return text[len(self.text.text) : len(self.text.text) + longest]

    monkeypatch.setattr(RowDrafts, "found", found)
    monkeypatch.setattr(TrackRecord, "best_rate", property(lambda drafter: 1.0 if drafter.depth else 2.0))
    monkeypatch.setattr(BatchDrafting, "_worth_it", lambda _, found, rows: [(row, tokens[:4]) for row, tokens in found])
    monkeypatch.setattr(CPUPace, "has_begun", True)
    monkeypatch.setattr(CPUPace, "longest_after", BatchPace.longest_after)
    ask = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0, "depth_decay": {"mode": "lossless"}}
    with running(engine, BATCH) as server:
        whole = post(server, ask).json()
        streamed = {**ask, "stream": True, "depth_decay": {"mode": "lossless", "depths": True}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=streamed, timeout=PATIENCE) as response:
            chunks = [json.loads(event)["depth_decay"] for event in events_of(response)[:-1]]
            last = chunks[-1]
        sources = [source for chunk in chunks for source in chunk["draft_depths"]]
        assert (sources.count(0), sources.count(None)) == (last["accepted"], 24 - last["accepted"])
        assert LAYERS <= chunks[0]["layer_passes"] <= chunks[-1]["layer_passes"] == last["layers_executed"]
        assert post(server, {**streamed, "stream": False}).json()["depth_decay"]["draft_depths"] == [sources]
        told = httpx.get(f"{server.url}/metrics").text
        plain = post(server, {**ask, "logprobs": 0}).json()["depth_decay"]
    assert whole["choices"][0]["text"] == full.text
    for account in (whole["depth_decay"], last):
        assert account["drafted"] == account["accepted"] > 0
        assert account["acceptance"] == 1.0
        assert 1 + account["verifications"] + account["accepted"] == 24
        assert account["layer_speedup"] > 1.0
        assert "ran_as" not in account
    drafted = float(whole["depth_decay"]["drafted"] + 2 * last["drafted"])
    assert f"depthdecay_drafted_tokens_total {drafted}" in told
    assert f"depthdecay_accepted_tokens_total {drafted}" in told
    assert (plain["ran_as"], plain["drafted"], plain["acceptance"]) == ("full", 0, None)


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    about = model.model_extra["depth_decay"]
    assert not about["exact"]
    assert "rows of a batch" in about["inexact_because"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_answers_models_and_metrics_tell_whether_answers_are_exact(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "a b", "max_tokens": 3}
    with running(engine, BATCH) as server:

        def told() -> tuple[Any, Any, str]:
            card = httpx.get(f"{server.url}/v1/models").json()["data"][0]["depth_decay"]
            (gauge,) = re.findall(r"^depthdecay_exact (.*)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
            return post(server, body).json()["depth_decay"].get("exact"), card["exact"], gauge

        assert told() == (None, False, "0.0")  # unknown for answers on a CPU
        monkeypatch.setattr(engine, "uses_graphs", True)  # from here on only results use it
        assert told() == (False, False, "0.0")
        monkeypatch.setattr(BlockRunner, "inexact", None)
        assert told() == (True, True, "1.0")


# What is refused.


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "echo": 0}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, None),
        ({"prompt": "a", "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"prompt": "a", "presence_penalty": "0"}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, None),
        ({"prompt": "a", "user": 5}, "user"),
        ({"prompt": "a", "depth_decay": {"ladder": [1]}}, "depth_decay.ladder"),
        ({"prompt": "a", "depth_decay": {"alpha": 0}}, "depth_decay.alpha"),
        ({"prompt": "a", "depth_decay": {"alpha": 0.9, "speedup": 1.1}}, "depth_decay"),
        ({"prompt": "a", "depth_decay": {"mode": "full", "speedup": 1.1}}, "depth_decay"),
        ({"prompt": "a", "depth_decay": {"over_tokens": 8}}, "depth_decay"),
        ({"prompt": "a", "depth_decay": {"mode": "fast"}}, "depth_decay.mode"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": 1e300}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 10**6}, "n"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "logprobs": 99}, "logprobs"),
        ({"prompt": "a", "stream_options": {}}, None),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, None),
        ({}, "prompt"),
        ([], None),
        ("a", None),
    ],
)
def test_bad_requests_say_what_is_wrong(server: Running, body: Any, param: str | None) -> None:
    message = assert_problem(post(server, body), 400)
    found = post(server, body).json()["error"]["param"]
    assert param is None or found == param or str(found).startswith(f"{param}.")
    assert message
    assert "\n" not in message


def test_chat_parameters_that_are_not_supported(server: Running) -> None:
    messages = [{"role": "user", "content": "a"}]
    asks: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"audio": {}},
        {"modalities": ["text", "audio"]},
        {"store": True},
        {"store": 0},
        {"service_tier": "flex"},
        {"reasoning_effort": "low"},
    ]
    for extra in asks:
        body = {"messages": messages, **extra}
        assert_problem(post(server, body, "/v1/chat/completions"), 400, next(iter(extra)), "unsupported_parameter")
    for wrong in ([], [{"role": "tool", "content": "a"}], [{"role": "user"}], [{"role": "user", "content": None}]):
        assert_problem(post(server, {"messages": wrong}, "/v1/chat/completions"), 400)
    both = {"messages": messages, "max_tokens": 1, "max_completion_tokens": 1}
    assert "are the same setting" in assert_problem(post(server, both, "/v1/chat/completions"), 400)


def test_values_that_ask_for_nothing_are_taken(server: Running) -> None:
    """Parameters that clients send by default: OpenAI's defaults, and labels for what is not stored here."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    plain = post(server, body, "/v1/chat/completions").json()["choices"]
    nothing = {
        **{"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1, "seed": None, "user": "me"},
        **{"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": [], "function_call": "auto"},
        **{"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium", "service_tier": "auto"},
        **{"store": False, "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "audio": None},
    }
    for name, value in nothing.items():
        answer = post(server, {**body, name: value}, "/v1/chat/completions")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain
    assert post(server, {**body, **nothing}, "/v1/chat/completions").json()["choices"] == plain
    # An answer that a client sends back.
    turn = {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "tool_calls": [], "audio": None}
    again = {**body, "messages": [*body["messages"], turn, {"role": "user", "content": "c"}]}  # type: ignore[misc]
    assert post(server, again, "/v1/chat/completions").status_code == 200
    streamed = {**body, "stream": True, "stream_options": {"include_obfuscation": False}}
    assert post(server, streamed, "/v1/chat/completions").status_code == 200


def test_a_completion_as_langchain_asks_for_it(server: Running) -> None:
    """`langchain_openai.OpenAI` sends all its defaults with every prompt."""
    body = {"model": "tiny", "prompt": ["abc"], "max_tokens": 8, "temperature": 0.7, "top_p": 1, "seed": 3}
    extra = {"frequency_penalty": 0, "presence_penalty": 0, "n": 1, "logprobs": None, "best_of": 1}
    answer = post(server, {**body, **extra, "echo": False, "suffix": ""})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == post(server, body).json()["choices"]


@pytest.mark.parametrize("mode", ["full", "decay", "lossless"])
@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_penalties_and_biases_are_the_engines_own(
    client: Any, engine: Engine, mode: str, drawn: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"frequency_penalty": 1.2, "presence_penalty": 0.6}
    biases = {100: 5.0, 101: -100.0}
    alone = engine.generate(["abc"], 20, mode=mode, chat=False, logit_bias=biases, **asked, **drawn)[0]
    assert alone.token_ids != engine.generate(["abc"], 20, mode=mode, chat=False, **drawn)[0].token_ids
    answer = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=20,
        logit_bias={str(token): bias for token, bias in biases.items()},
        extra_body={"depth_decay": {"mode": mode}},
        **asked,
        **drawn,
    )
    assert answer.choices[0].text == alone.text


def test_an_unknown_model_path_or_method(server: Running) -> None:
    assert_problem(post(server, {"prompt": "a", "model": "gpt-5"}), 404, "model", "model_not_found")
    assert_problem(post(server, {}, "/v1/embeddings"), 404)
    assert_problem(httpx.get(f"{server.url}/v1/completions"), 405)


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":',
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\\ud800"}',
        b"\xff",
        b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":1e999}',
        b"[" * 100_000,
        b"",
    ],
)
def test_bodies_that_are_no_proper_json(server: Running, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=PATIENCE)
    assert_problem(response, 400)


def test_a_text_that_is_too_long(server: Running) -> None:
    assert "256" in assert_problem(post(server, {"prompt": "a" * 300}), 400, code="context_length_exceeded")


@pytest.mark.parametrize("numbers", [{"over_tokens": 2**20}, {}])
def test_huge_numbers_of_tokens_are_counted_by_depth_and_not_one_by_one(
    engine: Engine, numbers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    table = PowerSchedule.table

    def seen(self: PowerSchedule, n: int) -> tuple[int, ...]:
        lengths.append(n)
        return table(self, n)

    with running(engine, BATCH) as server:
        monkeypatch.setattr(PowerSchedule, "table", seen)
        body = {"prompt": "a", "max_tokens": 2**31 - 1, "stop": ["b"], "depth_decay": {"speedup": 1.07, **numbers}}
        assert post(server, body).status_code == 200
    assert max(lengths) <= 256  # the context limit


def test_a_part_of_a_message_that_is_no_text_is_named(server: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://x"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    message = assert_problem(post(server, body, "/v1/chat/completions"), 400)
    assert "type" in message or "image_url" in message


def test_answers_are_shortened_to_what_fits(engine: Engine) -> None:
    with running(engine, BatchSettings(max_batch=2, max_positions=32)) as server:
        answer = post(server, {"prompt": "a" * 20}).json()
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["choices"][0]["finish_reason"] == "length"
        assert_problem(post(server, {"prompt": "a" * 32}), 400, code="context_length_exceeded")


def test_a_huge_body_is_refused_with_and_without_its_length(engine: Engine) -> None:
    with running(engine, BATCH, max_body_bytes=2000) as server:
        assert_problem(post(server, {"prompt": "a" * 3000}), 413, code="body_too_large")

        def chunks() -> Iterator[bytes]:
            yield b'{"prompt":"'
            for _ in range(100):
                yield b"a" * 100

        headers = {"content-type": "application/json"}
        response = httpx.post(f"{server.url}/v1/completions", content=chunks(), headers=headers)
        assert_problem(response, 413, code="body_too_large")
        assert post(server, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_the_key(engine: Engine) -> None:
    with running(engine, BATCH, api_key="secret-ключ") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer"},
        ):
            assert_problem(post(server, {"prompt": "a"}, headers=headers), 401, code="invalid_api_key")
            assert_problem(httpx.get(f"{server.url}/metrics", headers=headers), 401)
        right = {"Authorization": "Bearer secret-ключ".encode()}
        assert post(server, {"prompt": "a", "max_tokens": 1}, headers=right).status_code == 200
        for path in ("/health", "/", "/docs", "/openapi.json"):
            assert httpx.get(f"{server.url}{path}").status_code == 200


def test_pages_of_other_sites_may_ask_only_where_told(server: Running, engine: Engine) -> None:
    headers = {"Origin": "https://friend.example", "Access-Control-Request-Method": "POST"}

    def allowed(running_server: Running) -> str | None:
        response = httpx.options(f"{running_server.url}/v1/completions", headers=headers)
        return response.headers.get("access-control-allow-origin")

    assert allowed(server) is None
    with running(engine, BATCH, cors_origins=("https://friend.example",), api_key="k") as friendly:
        assert allowed(friendly) == "https://friend.example"
        headers["Origin"] = "https://other.example"
        assert allowed(friendly) is None


# Operation.


def test_health_is_ready_only_when_warmed_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from depthdecay.batching.batcher import Batcher

    warm, go = Batcher.warm_up, threading.Event()

    def slow(batcher: Any) -> None:
        go.wait(PATIENCE)
        warm(batcher)

    monkeypatch.setattr(Batcher, "warm_up", slow)
    with running(engine, BATCH, ready=False) as server:
        response = httpx.get(f"{server.url}/health")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
        assert_problem(post(server, {"prompt": "a"}), 503)
        go.set()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def test_metrics_count_what_ran(engine: Engine) -> None:
    def values(server: Running) -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    with running(engine, BATCH) as server:
        answer = post(server, {"prompt": "abc", "max_tokens": 40}).json()
        until(server.is_clean)
        told = values(server)
        assert told["depthdecay_tokens_total"] == 40
        assert told["depthdecay_prompt_tokens_total"] == 3
        decoded = answer["depth_decay"]["layers_executed"] - LAYERS  # token 0 comes from prefill
        assert told["depthdecay_layers_executed_total"] == decoded
        assert told["depthdecay_layers_saved_total"] == 39 * LAYERS - decoded
        assert told["depthdecay_time_to_first_token_seconds_count"] == 1
        assert told["depthdecay_rows_running"] == 0
        assert told["depthdecay_cache_used_bytes"] == 0
        assert told['depthdecay_requests_total{path="/v1/completions",status="200"}'] == 1
        for name in ("made-up", "made/up", "/v9"):
            httpx.get(f"{server.url}/v1/models/{name}")
        labels = [name for name in values(server) if "made" in name or "v9" in name]
        assert not labels  # clients cannot create arbitrary labels


def test_the_log_tells_when_requests_are_accepted(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="depthdecay.serve")
    with running(engine):
        until(lambda: "ready" in [record.getMessage() for record in caplog.records])


def test_logs_have_ids_and_figures_and_no_text(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="depthdecay.serve")
    response = post(server, {"prompt": "unmistakable words", "max_tokens": 3, "stream": True})
    until(
        lambda: any(
            getattr(record, "fields", {}).get("id") == response.headers["x-request-id"] for record in caplog.records
        )
    )
    lines = [JsonLines().format(record) for record in caplog.records]
    line = json.loads(next(line for line in lines if response.headers["x-request-id"] in line))
    assert line["tokens"] == 3
    assert line["status"] == 200
    assert line["mode"] == "decay"
    assert line["whole"] is True
    assert "unmistakable" not in "".join(lines)


def test_the_queue_at_its_limit(engine: Engine) -> None:
    with running(engine, BatchSettings(max_batch=1, cohort_seconds=0), max_waiting=2) as server:
        seen = slowed(server)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long_ask(), timeout=PATIENCE) as first:
            lines = first.iter_lines()
            next(lines)  # it is in the batch
            with ThreadPoolExecutor(2) as pool:
                waiting = [pool.submit(post, server, {"prompt": "a", "max_tokens": 2}) for _ in range(2)]
                until(lambda: server.worker.waiting == 2)
                refused = post(server, {"prompt": "a"})
                assert_problem(refused, 429, code="queue_full")
                assert int(refused.headers["retry-after"]) >= 1
                assert "fewer" in assert_problem(post(server, {"prompt": "a", "n": 3}), 400)  # would never fit
                seen.set()
                rest = list(lines)
                assert [future.result().status_code for future in waiting] == [200, 200]
        assert rest[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in rest
        until(server.is_clean)


def test_a_client_that_hangs_up_frees_its_row(engine: Engine) -> None:
    with running(engine, BATCH) as server:
        seen = slowed(server)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long_ask(), timeout=PATIENCE) as response:
            next(response.iter_lines())
            assert server.worker.batcher.rows
        until(server.is_clean)
        seen.set()
        assert server.worker.batcher.counters.tokens < 250
        assert "depthdecay_answers_broken_off_total 1.0" in httpx.get(f"{server.url}/metrics").text
        impatient = httpx.Timeout(PATIENCE, read=0.05)  # only for reading: a busy machine is slow to accept
        with pytest.raises(httpx.ReadTimeout):  # without streaming too
            httpx.post(f"{server.url}/v1/completions", json=long_ask(stream=False, n=8), timeout=impatient)
        until(server.is_clean)


def test_a_request_that_takes_too_long(engine: Engine) -> None:
    with running(engine, BATCH, timeout_seconds=0.05) as server:
        assert_problem(post(server, long_ask(stream=False, n=8)), 504, code="timeout")
        streamed = events_of(post(server, long_ask(n=8)))
        assert json.loads(streamed[-1])["error"]["code"] == "timeout"
        until(server.is_clean)


def test_a_long_step_makes_nobody_wait_for_longer_than_the_time_of_a_request(engine: Engine) -> None:
    with running(engine, BATCH, timeout_seconds=0.2) as server:
        step, go = server.worker.batcher.step, threading.Event()

        def stuck() -> Any:
            go.wait(PATIENCE)
            return step()

        server.worker.batcher.step = stuck  # type: ignore[method-assign]
        assert_problem(post(server, long_ask(stream=False)), 504, code="timeout")
        assert json.loads(events_of(post(server, long_ask()))[-1])["error"]["code"] == "timeout"
        go.set()
        until(server.is_clean)


def test_a_failing_pass_ends_only_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    poison = engine.tokenizer.encode("~")[0]
    embedding = engine.stack.model.get_input_embeddings()
    forward = embedding.forward

    def failing(ids: Any) -> Any:
        if (ids == poison).any():
            raise RuntimeError("a secret of ours")
        return forward(ids)

    good = {"prompt": "abc", "max_tokens": 60, "temperature": 0}
    with running(engine, BATCH) as server:
        expected = post(server, good).json()["choices"]
        assert "~" not in expected[0]["text"]
        monkeypatch.setattr(embedding, "forward", failing)
        with ThreadPoolExecutor(6) as pool:
            fine = [pool.submit(post, server, good) for _ in range(4)]
            bad = pool.submit(post, server, {"prompt": "~", "max_tokens": 60})
            streamed = pool.submit(post, server, {"prompt": "~", "max_tokens": 60, "stream": True})
            message = assert_problem(bad.result(), 500, code="internal_error")
            assert "secret" not in message
            assert json.loads(events_of(streamed.result())[-1])["error"]["type"] == "server_error"
            assert [future.result().json()["choices"] for future in fine] == [expected] * 4
        monkeypatch.undo()
        assert post(server, good).json()["choices"] == expected
        until(server.is_clean)


def test_a_step_that_fails_as_a_whole_leaves_a_server_that_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(engine, BATCH) as server:
        step = server.worker.batcher.step

        def failing() -> Any:
            monkeypatch.setattr(server.worker.batcher, "step", step)
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(server.worker.batcher, "step", failing)
        assert_problem(post(server, {"prompt": "a"}), 500, code="internal_error")
        assert post(server, {"prompt": "a", "max_tokens": 2}).status_code == 200
        until(server.is_clean)


def test_clients_that_hang_up_under_load_leave_nothing_behind(engine: Engine) -> None:
    """A fifth of the clients disconnect midway; the others get the same answers as alone."""
    generator = random.Random(4)
    asks = [
        long_ask(
            prompt="".join(generator.choice("abcdef ") for _ in range(generator.randrange(1, 40))).strip() or "a",
            max_tokens=generator.randrange(1, 60),
            seed=number,
            temperature=generator.choice([0, 0.7, 1.2]),
            depth_decay=generator.choice([{"mode": "full"}, {"alpha": 0.95}, {"mode": "decay"}, {"mode": "lossless"}]),
        )
        for number in range(60)
    ]
    hang_up = set(generator.sample(range(60), 12))

    def go(number: int) -> list[str] | None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asks[number], timeout=PATIENCE) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            if number in hang_up:
                next(lines)
                return None
            return [line.removeprefix("data: ") for line in lines if line]

    with running(engine, BATCH) as server, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(go, range(60)))
        until(server.is_clean)
        for number, events in enumerate(answers):
            if events is None:
                continue
            assert events[-1] == "[DONE]"
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            ask = asks[number]
            depth = ask["depth_decay"]
            plan = Plan.decay(LAYERS, "0.95") if "alpha" in depth else engine.plan
            alone = Engine(engine.stack.model, engine.tokenizer, plan).generate(
                [ask["prompt"]],
                ask["max_tokens"],
                mode="full" if depth.get("mode") in ("full", "lossless") else "decay",
                chat=False,
                seed=ask["seed"],
                temperature=ask["temperature"],
            )
            assert text == alone[0].text


def test_sigterm_under_load_truncates_no_accepted_answer(tmp_path: Path) -> None:
    begun = [threading.Event() for _ in range(8)]
    folder = save_tiny_chat_model(tmp_path / "model")
    with served(folder, "--alpha", "0.99", "--max-batch", "4") as (url, process), ThreadPoolExecutor(8) as pool:

        def go(number: int) -> list[str]:
            ask = long_ask(seed=number)
            with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=PATIENCE) as response:
                assert response.status_code == 200
                begun[number].set()
                return [line for line in response.iter_lines() if line]

        answers = [pool.submit(go, number) for number in range(8)]
        for event in begun:
            assert event.wait(PATIENCE)
        process.send_signal(signal.SIGTERM)
        for answer in answers:
            assert answer.result()[-1] == "data: [DONE]"
        _, log = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, log
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")


# The command.


def test_the_key_comes_from_an_option_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert read_key(None, None) is None
    assert read_key("given", None) == "given"
    assert read_key(None, str(file)) == "from-file"
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    assert read_key(None, None) == "from-environment"
    assert read_key("given", None) == "given"
    for option, name, words in (
        ("a", "b", "together"),
        (" ", None, "empty"),
        (None, str(tmp_path / "no"), "cannot be read"),
    ):
        with pytest.raises(DepthDecayError, match=words):
            read_key(option, name)
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(DepthDecayError, match="empty"):
        read_key(None, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "99999"], "--port"),
        (["--max-batch", "0", "--alpha", "0.9"], "max_batch"),
        (["--max-waiting", "0"], "max_waiting"),
        (["--timeout", "0"], "timeout"),
        (["--cache-gb", "-1"], "--cache-gb"),
        (["--cache-gb", "0.0000001"], "less than one block"),
        (["--cohort-ms", "-1"], "cohort_seconds"),
        (["--exact"], "answers cannot be exact here"),
    ],
)
def test_options_that_make_no_sense_end_with_one_line(tiny_folder: str, options: list[str], words: str) -> None:
    ran = CliRunner().invoke(app, ["serve", "--model", tiny_folder, "--device", "cpu", *options])
    assert ran.exit_code == 2
    assert words in ran.output
    assert "Traceback" not in ran.output


def test_a_port_in_use_ends_with_one_line_before_a_model_is_loaded(
    tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthdecay.cli.options.open_engine", lambda *given, **more: pytest.fail("it was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ran = CliRunner().invoke(app, ["serve", "--model", tiny_folder, "--device", "cpu", "--port", port])
    assert ran.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in ran.output


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_wrong_host_is_told_apart_from_a_port_in_use(tiny_folder: str, host: str) -> None:
    ran = CliRunner().invoke(app, ["serve", "--model", tiny_folder, "--device", "cpu", "--host", host, "--port", "0"])
    assert ran.exit_code == 2
    assert f"cannot listen on {host}:0: this machine has no such address" in ran.output


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = CliRunner().invoke(app, ["serve"])
    assert ran.exit_code == 2
    assert "pip install '.[serve]'" in ran.output


# The schema.


@pytest.fixture(scope="module")
def small(engine: Engine) -> Iterator[Running]:
    """Short texts, so that even the fuzzer's largest requests finish quickly."""
    with running(engine, BatchSettings(max_batch=32, max_positions=8, cohort_seconds=0), max_waiting=64) as server:
        yield server
        until(server.is_clean)


@pytest.mark.parametrize("sense", list(schemathesis.GenerationMode), ids=lambda sense: sense.value)
def test_no_request_that_the_schema_allows_or_forbids_fails_the_server(small: Running, sense: Any) -> None:
    tried = set()
    for found in schemathesis.openapi.from_url(f"{small.url}/openapi.json").get_all_operations():
        operation = found.ok()

        @settings(max_examples=40, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=sense))
        def check(case: Any) -> None:
            response = case.call(timeout=PATIENCE)
            assert response.status_code < 500
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        with contextlib.suppress(Unsatisfiable):  # a GET without parameters has no invalid form
            check()
            tried.add(operation.path)
    assert {"/v1/completions", "/v1/chat/completions"} <= tried
