"""Tokenizing prompts: what cannot fit is refused without tokenizing, and long texts do not hold up short ones."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from depthdecay.errors import ContextError
from depthdecay.model.prompts import token_ids
from depthdecay.serve.api_errors import ApiError

LONG_TEXT = 2**14  # characters, about ten milliseconds of work
# Runs of these show whether a tokenizer drops or merges input: spaces, combining marks, and unknown characters.
_PROBES = (" ", "\n", "\t", "a", "字", "\u0301", "\u00ad", "\u200b", "\x00", "\ue000", "\U0010ffff")


class Tokenizing:
    """One thread for short texts and one for long ones, each with its own tokenizer, since fast tokenizers are not
    thread-safe. A single thread where the tokenizer cannot be copied."""

    def __init__(self, tokenizer: Any, vocabulary: int, max_positions: int) -> None:
        self.vocabulary = vocabulary
        self.max_positions = max_positions
        per_token = most_characters_per_token(tokenizer)
        self.most_characters = None if per_token is None else per_token * max_positions
        self._short = self._long = _Lane("short", tokenizer)
        with contextlib.suppress(Exception):  # a custom tokenizer may have parts that cannot be copied
            self._long = _Lane("long", copy.deepcopy(tokenizer))

    async def ids(self, prompts: Sequence[Any], settings: dict[str, Any]) -> list[list[int]]:
        """The token ids of each prompt; raises as soon as one cannot fit."""
        for prompt in prompts:
            if isinstance(prompt, list) and isinstance(prompt[0], int):
                self._require_fit(len(prompt))
        lane = self._long if sum(map(_size, prompts)) > LONG_TEXT else self._short
        working = asyncio.get_running_loop().run_in_executor(lane.thread, self._all_ids, lane, prompts, settings)
        try:
            return await working
        except asyncio.CancelledError:
            if not lane.is_closed:
                raise
            raise ApiError(503, "the server was stopped", code="stopped") from None

    def _all_ids(self, lane: _Lane, prompts: Sequence[Any], settings: dict[str, Any]) -> list[list[int]]:
        found = []
        for prompt in prompts:
            self._refuse_unread(lane.tokenizer, prompt)
            found.append(token_ids(lane.tokenizer, prompt, settings, self.vocabulary))
            self._require_fit(len(found[-1]))
        return found

    def _require_fit(self, tokens: int) -> None:
        if tokens >= self.max_positions:
            raise ContextError(
                f"the prompt has {tokens} tokens, but the limit is {self.max_positions}, including the answer"
            )

    def _refuse_unread(self, tokenizer: Any, prompt: Any) -> None:
        if self.most_characters is None or _size(prompt) <= self.most_characters or _is_ids(prompt):
            return
        characters = _size(prompt)
        if not isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
            # A chat template may leave text out, such as surrounding spaces and earlier reasoning.
            try:
                rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            except Exception:  # tokenizing the messages will report the error
                return
            characters = len(str(rendered))
        if characters > self.most_characters:
            raise ContextError(
                f"the prompt has {characters} characters, but the limit is {self.max_positions} tokens, "
                f"which hold at most {self.most_characters}"
            )

    def close(self) -> None:
        self._short.close()
        self._long.close()


class _Lane:
    def __init__(self, name: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"depthdecay-{name}-texts")
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)


def most_characters_per_token(tokenizer: Any) -> int | None:
    """The most characters of text that one token can represent; None where that is unbounded.

    Vocabularies write each byte or character as at least one character. So no token represents more than the length of
    its entry, unless the tokenizer drops text, or maps many characters to one unknown token.
    """
    special = getattr(tokenizer, "added_tokens_decoder", {}).values()
    if any(token.lstrip or token.rstrip for token in special):  # they absorb all adjacent spaces
        return None
    try:
        longest = max(map(len, tokenizer.get_vocab()))
        probes = [character * (8 * longest) for character in _PROBES]
        counts = [len(tokenizer.encode(probe, add_special_tokens=False)) for probe in probes]
    except Exception:  # a custom tokenizer may not expose its vocabulary, or may fail on such texts
        return None
    return longest if min(counts) >= 8 else None


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], int)


def _size(prompt: Any) -> int:
    """The number of characters of a text or conversation, or the number of token ids."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt if isinstance(message, Mapping))
