"""Third-party clients in typical use: whole answers and streams, chats and completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import Running, running

from depthdecay import Engine
from depthdecay.batching.batcher import BatchSettings

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abc"}]
TOKENS = 12


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine, BatchSettings(max_batch=4, cohort_seconds=0)) as server:
        yield server


@pytest.fixture(scope="module")
def chat(engine: Engine) -> str:
    """The answer that every client must get."""
    return str(engine.generate([MESSAGES], TOKENS, temperature=0, mode="decay")[0].text)


@pytest.fixture(scope="module")
def completion(engine: Engine) -> str:
    return str(engine.generate(["abc"], TOKENS, temperature=0, mode="decay", chat=False)[0].text)


# openai.


@pytest.fixture
def openai_client(server: Running) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai(openai_client: Any, chat: str, completion: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0}
    whole = openai_client.chat.completions.create(messages=MESSAGES, **asked)
    assert whole.choices[0].message.content == chat
    chunks = openai_client.chat.completions.create(messages=MESSAGES, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat
    assert openai_client.completions.create(prompt="abc", **asked).choices[0].text == completion
    chunks = openai_client.completions.create(prompt="abc", stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == completion


# litellm.


@pytest.fixture
def litellm(server: Running) -> tuple[Any, dict[str, Any]]:
    found = pytest.importorskip("litellm")
    settings = {"api_base": f"{server.url}/v1", "api_key": "none", "max_tokens": TOKENS, "temperature": 0}
    return found, {**settings, "num_retries": 0}


def test_litellm_chats(litellm: Any, chat: str) -> None:
    client, settings = litellm
    whole = client.completion(model="openai/tiny", messages=MESSAGES, **settings)
    assert whole.choices[0].message.content == chat
    chunks = client.completion(model="openai/tiny", messages=MESSAGES, stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat


def test_litellm_completions(litellm: Any, completion: str) -> None:
    client, settings = litellm
    model = "text-completion-openai/tiny"
    assert client.text_completion(model=model, prompt="abc", **settings).choices[0].text == completion
    chunks = client.text_completion(model=model, prompt="abc", stream=True, **settings)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == completion


# langchain.


@pytest.fixture
def langchain(server: Running) -> tuple[Any, dict[str, Any]]:
    found = pytest.importorskip("langchain_openai")
    settings = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
    return found, {**settings, "max_tokens": TOKENS, "temperature": 0}


def test_langchain_chats(langchain: Any, chat: str) -> None:
    module, settings = langchain
    client = module.ChatOpenAI(**settings)
    pairs = [(message["role"], message["content"]) for message in MESSAGES]
    assert client.invoke(pairs).content == chat
    assert "".join(str(piece.content) for piece in client.stream(pairs)) == chat


def test_langchain_completions(langchain: Any, completion: str) -> None:
    module, settings = langchain
    client = module.OpenAI(**settings)
    assert client.invoke("abc") == completion
    assert "".join(client.stream("abc")) == completion
