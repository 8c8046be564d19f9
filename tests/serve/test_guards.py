"""Checks in front of the routes: hosts, keys, methods, policies; and the limits checked before texts are tokenized."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from serving import (  # noqa: E402
    PATIENCE,
    Running,
    assert_problem,
    long_ask,
    post,
    running,
    slowed,
    until,
)

from depthdecay import DepthDecayError, Engine  # noqa: E402
from depthdecay.batching.batcher import BatchSettings  # noqa: E402
from depthdecay.serve import tokenizing  # noqa: E402
from depthdecay.serve.hosts import allowed_hosts, host_name  # noqa: E402

BATCH = BatchSettings(max_batch=8, cohort_seconds=0)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine, BATCH, allowed_hosts=allowed_hosts("127.0.0.1", ["Friend.Example"])) as server:
        yield server
        until(server.is_clean)


# Hosts.


def test_a_server_on_loopback_answers_to_names_of_this_machine_and_to_those_it_was_given(server: Running) -> None:
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "127.0.0.1:8000", "[::1]:1", "localhost.", "friend.example"):
        assert httpx.get(f"{server.url}/health", headers={"host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "", "x" * 5000):
        for path in ("/health", "/", "/v1/models", "/metrics"):
            response = httpx.get(f"{server.url}{path}", headers={"host": host})
            assert "--allowed-host" in assert_problem(response, 403, code="host_not_allowed")
            assert len(response.text) < 500


def test_which_names_a_server_has() -> None:
    assert allowed_hosts("127.0.0.1", []) == {"localhost", "127.0.0.1", "::1"}
    assert allowed_hosts("127.0.0.2", ["a"]) == {"localhost", "127.0.0.1", "::1", "127.0.0.2", "a"}
    assert allowed_hosts("::1", []) == allowed_hosts("localhost", []) == {"localhost", "127.0.0.1", "::1"}
    assert allowed_hosts("0.0.0.0", []) is None
    assert allowed_hosts("0.0.0.0", ["a.example:80"]) == {"a.example"}
    assert allowed_hosts("127.0.0.1", ["*"]) is None
    assert host_name("[::1]:80") == host_name("::1") == "::1"
    for wrong in ("", "http://a.example/"):
        with pytest.raises(DepthDecayError, match="allowed_host"):
            allowed_hosts("127.0.0.1", [wrong])


# Keys, methods, policies.


def test_a_key_that_is_sent_twice_is_none(engine: Engine) -> None:
    with running(engine, BATCH, api_key="k") as server:
        for pair in (("Bearer k", "Bearer k"), ("Bearer wrong", "Bearer k"), ("Bearer k", "Bearer wrong")):
            headers = [("Authorization", value) for value in pair]
            assert "once" in assert_problem(httpx.get(f"{server.url}/v1/models", headers=headers), 401)
        post(server, {"prompt": "a" * 2**20}, headers={"Authorization": "Bearer k"})
        told = httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer k"}).text
        assert 'depthdecay_requests_total{path="/v1/models",status="401"} 3.0' in told
        assert 'depthdecay_requests_total{path="/v1/completions",status="413"} 1.0' in told


def test_a_wrong_method_is_told_the_right_ones(server: Running) -> None:
    assert httpx.get(f"{server.url}/v1/completions").headers["allow"] == "POST"
    assert httpx.post(f"{server.url}/health").headers["allow"] == "GET, HEAD"


def test_head_is_get_without_a_body(server: Running) -> None:
    for path in ("/", "/health", "/metrics", "/docs"):
        head, got = httpx.head(f"{server.url}{path}"), httpx.get(f"{server.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert httpx.head(f"{server.url}/nowhere").status_code == 404
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def test_every_answer_has_a_policy(server: Running) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/nowhere", "/openapi.json"):
        headers = httpx.get(f"{server.url}{path}").headers
        assert headers.get_list("content-security-policy") == ["default-src 'none'; frame-ancestors 'none'"]
    docs = httpx.get(f"{server.url}/docs")
    (policy,) = docs.headers.get_list("content-security-policy")
    assert "frame-ancestors 'none'" in policy
    assert "'sha256-" in policy  # its own script, by hash
    sources = re.findall(r'(?:src|href)="(https://[^/"]+)', docs.text)
    assert sources
    assert all(source in policy for source in sources)


def test_a_wrong_content_type_is_named(server: Running) -> None:
    for kind, words in (("text/plain", "text/plain"), ("application/x-www-form-urlencoded", "urlencoded")):
        response = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind})
        assert words in assert_problem(response, 415, code="unsupported_media_type")


def test_names_are_not_told_back_at_length(server: Running) -> None:
    for body in ({"prompt": "a", "model": "m" * 1000}, {"prompt": "a", "p" * 10**5: 1}):
        response = post(server, body)
        assert response.status_code in (400, 404)
        assert len(response.text) < 500


def test_the_least_top_p_takes_the_likeliest_token(server: Running) -> None:
    asks = ({"top_p": 1e-12, "temperature": 1.0}, {"temperature": 0})
    texts = {post(server, {"prompt": "ab", "max_tokens": 8, **ask}).json()["choices"][0]["text"] for ask in asks}
    assert len(texts) == 1


def test_metrics_tell_of_the_process_and_have_their_unit_last(engine: Engine) -> None:
    with running(engine, BATCH, timeout_seconds=900) as server:
        told = httpx.get(f"{server.url}/metrics").text
    names = {line.split()[2] for line in told.splitlines() if line.startswith("# TYPE")}
    assert {"process_resident_memory_bytes", "process_open_fds", "depthdecay_cache_used_bytes"} <= names
    assert not [name for name in names if re.search(r"_(bytes|seconds)_(?!(total|created)$)", name)]
    buckets = re.findall(r'time_to_first_token_seconds_bucket\{le="([^"]+)"', told)
    assert buckets[-2:] == ["900.0", "+Inf"]


def test_who_hangs_up_in_the_middle_of_a_body_is_no_bad_request(server: Running) -> None:
    import socket

    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b'content-length: 100\r\n\r\n{"mess'
        )
    counted = 'depthdecay_requests_total{path="/v1/chat/completions",status="499"} 1.0'
    until(lambda: counted in httpx.get(f"{server.url}/metrics").text)
    assert 'path="/v1/chat/completions",status="400"' not in httpx.get(f"{server.url}/metrics").text


# Before texts are tokenized.


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that were tokenized."""
    seen: list[Any] = []
    token_ids = tokenizing.token_ids

    def noted(tokenizer: Any, prompt: Any, *rest: Any) -> list[int]:
        seen.append(prompt)
        return token_ids(tokenizer, prompt, *rest)

    monkeypatch.setattr(tokenizing, "token_ids", noted)
    return seen


def test_a_prompt_is_read_once_for_all_its_choices(server: Running, read: list[Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "n": 16, "max_tokens": 1}
    assert len(post(server, body, "/v1/chat/completions").json()["choices"]) == 16
    assert len(read) == 1


def test_too_many_sequences_are_refused_unread(engine: Engine, read: list[Any]) -> None:
    with running(engine, BatchSettings(max_batch=1, cohort_seconds=0), max_waiting=2) as server:
        assert "fewer" in assert_problem(post(server, {"prompt": "a", "n": 3}), 400)
        seen = slowed(server)
        with ThreadPoolExecutor(3) as pool:
            taken = [pool.submit(post, server, long_ask())]
            until(lambda: server.worker.batcher.rows)
            taken += [pool.submit(post, server, long_ask(seed=seed, max_tokens=3)) for seed in range(2)]
            until(lambda: server.worker.waiting == 2)
            assert_problem(post(server, {"prompt": "a"}), 429, code="queue_full")
            assert_problem(post(server, {"prompt": "a", "model": "other"}), 404)
            seen.set()
            assert [future.result().status_code for future in taken] == [200] * 3
        assert read == ["abc"] * 3
        until(server.is_clean)
        assert server.worker.waiting == 0


def test_a_place_is_held_while_a_text_is_read_and_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(*given: Any) -> list[int]:
        begun.set()
        go.wait(PATIENCE)
        raise DepthDecayError("cannot be read")

    monkeypatch.setattr(tokenizing, "token_ids", slow)
    with running(engine, BATCH, max_waiting=1) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server, {"prompt": "a"})
        assert begun.wait(PATIENCE)
        assert_problem(post(server, {"prompt": "a"}), 429)
        go.set()
        assert_problem(first.result(), 400)
        until(lambda: server.worker.waiting == 0)


def test_reading_a_text_counts_into_the_time_of_a_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(tokenizing, "token_ids", lambda *given: [1] if go.wait(PATIENCE) else [])
    with running(engine, BATCH, timeout_seconds=0.1) as server:
        assert_problem(post(server, {"prompt": "a"}), 504, code="timeout")
        go.set()
        until(lambda: server.worker.waiting == 0)
