"""Texts of every length: too long ones are refused without tokenizing, and long ones do not hold up short ones."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from saved_model import save_tiny_chat_model
from serving import PATIENCE
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from depthdecay.errors import ContextError
from depthdecay.serve import tokenizing as module
from depthdecay.serve.api_errors import ApiError
from depthdecay.serve.tokenizing import Tokenizing, most_characters_per_token

SETTINGS = {"chat": False}
POSITIONS = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def tokenizing(tokenizer: Any) -> Iterator[Tokenizing]:
    made = Tokenizing(tokenizer, len(tokenizer), POSITIONS)
    yield made
    made.close()


def in_words(**parts: Any) -> Any:
    """One token per known word, and a single token for unknown words."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "abc": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **parts)


def test_a_bound_is_read_off_the_vocabulary_where_there_is_one(tokenizer: Any) -> None:
    assert most_characters_per_token(tokenizer) == len("<pad>")
    assert most_characters_per_token(in_words()) is None  # a word of any length is one unknown token


def test_a_tokenizer_that_drops_spaces_has_no_bound(tokenizer: Any) -> None:
    stripping = copy.deepcopy(tokenizer)
    stripping.backend_tokenizer.normalizer = normalizers.Strip()
    assert most_characters_per_token(stripping) is None


def test_a_special_token_that_takes_the_spaces_beside_it_has_no_bound(tokenizer: Any) -> None:
    taking = copy.deepcopy(tokenizer)
    taking.add_special_tokens({"additional_special_tokens": [AddedToken("<end>", rstrip=True, special=True)]})
    assert most_characters_per_token(taking) is None


def test_a_tokenizer_that_does_not_tell_or_cannot_be_copied_is_used_as_it_is(tokenizer: Any) -> None:
    class Odd:
        """A custom tokenizer."""

        def get_vocab(self) -> dict[str, int]:
            raise NotImplementedError

        def encode(self, text: str) -> list[int]:
            return list(tokenizer.encode(text))

        def __deepcopy__(self, memo: Any) -> Odd:
            raise TypeError("cannot be copied")

    made = Tokenizing(Odd(), len(tokenizer), POSITIONS)
    assert made.most_characters is None
    with pytest.raises(ContextError, match="20000 tokens"):
        asyncio.run(made.ids(["a" * 20_000], SETTINGS))
    assert len(asyncio.run(made.ids(["abc"], SETTINGS))[0]) == 3
    made.close()


def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    tokenizing: Tokenizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(module, "token_ids", lambda tokenizer, prompt, *rest: read.append(prompt) or [1])
    most = POSITIONS * len("<pad>")
    chat = [{"role": "user", "content": "a" * (most + 1)}]
    for prompt in ("a" * (most + 1), chat, [1] * POSITIONS):
        with pytest.raises(ContextError):
            asyncio.run(tokenizing.ids([prompt], SETTINGS))
    assert not read
    assert asyncio.run(tokenizing.ids(["a" * most], SETTINGS)) == [[1]]  # it might fit, so it is tokenized


def test_what_a_template_leaves_out_does_not_count(tokenizer: Any) -> None:
    trimming = copy.deepcopy(tokenizer)
    trimming.chat_template = "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}"
    made = Tokenizing(trimming, len(tokenizer), POSITIONS)
    chat = [{"role": "user", "content": " " * 10_000 + "abc"}]
    assert len(asyncio.run(made.ids([chat], SETTINGS))[0]) == 3
    made.close()


def test_a_text_that_fills_the_context_but_for_one_is_taken(tokenizing: Tokenizing) -> None:
    assert len(asyncio.run(tokenizing.ids(["é" * 31 + "a"], SETTINGS))[0]) == POSITIONS - 1
    with pytest.raises(ContextError, match="64 tokens"):
        asyncio.run(tokenizing.ids(["é" * 32], SETTINGS))


def test_a_long_text_keeps_no_short_one_waiting(tokenizing: Tokenizing, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def read(tokenizer: Any, prompt: str, *rest: Any) -> list[int]:
        assert len(prompt) == 1 or go.wait(PATIENCE)
        return [len(prompt)]

    monkeypatch.setattr(module, "token_ids", read)
    monkeypatch.setattr(module, "LONG_TEXT", 5)

    async def ask() -> None:
        long = [asyncio.ensure_future(tokenizing.ids(["abcdefg"], SETTINGS)) for _ in range(3)]
        assert await tokenizing.ids(["a"], SETTINGS) == [[1]]
        assert not any(future.done() for future in long)
        go.set()
        assert await asyncio.gather(*long) == [[[7]]] * 3

    asyncio.run(ask())


def test_texts_that_wait_when_the_server_ends_are_told_so(
    tokenizing: Tokenizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Event()

    def read(*given: Any) -> list[int]:
        begun.set()
        go.wait(PATIENCE)
        return [1]

    monkeypatch.setattr(module, "token_ids", read)

    async def ask() -> None:
        first, second = (asyncio.ensure_future(tokenizing.ids(["a"], SETTINGS)) for _ in range(2))
        await asyncio.to_thread(begun.wait, PATIENCE)
        tokenizing.close()
        with pytest.raises(ApiError) as told:
            await second
        assert (told.value.status, told.value.code) == (503, "stopped")
        go.set()
        assert await first == [[1]]

    asyncio.run(ask())
