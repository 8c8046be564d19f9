"""From a step's updates to OpenAI's response objects, whole or as a stream."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from depthdecay.batching.batcher import Update
from depthdecay.engine.result import Result
from depthdecay.errors import ContextError, DepthDecayError
from depthdecay.serve.api_errors import ApiError, dumps
from depthdecay.serve.token_bytes import token_bytes, token_name
from depthdecay.serve.worker import Ticket

_UTF8 = codecs.getincrementaldecoder("utf-8")
DONE = "data: [DONE]\n\n"


@dataclass
class Account:
    """One request's figures for the log and the metrics, never its text."""

    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    spans: dict[int, tuple[float, float, int]] = field(default_factory=dict)  # by sequence: first, last, count

    def saw(self, sequence: int) -> None:
        now = time.monotonic()
        first, _, count = self.spans.get(sequence, (now, now, 0))
        self.spans[sequence] = first, now, count + 1
        self.tokens += 1

    @property
    def first_token(self) -> float | None:
        return min((first for first, _, _ in self.spans.values()), default=None)


@dataclass
class Choice:
    """One answer of a request, so far."""

    index: int
    text: str = ""
    depths: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    # For text offsets of log-probabilities: characters so far, and a partly decoded one.
    characters: int = 0
    unfinished: codecs.IncrementalDecoder = field(default_factory=lambda: _UTF8(errors="ignore"))
    result: Result | None = None
    # Sent with the next piece of text: a token may end mid-character, or in what could become a stop string.
    new_depths: list[int] = field(default_factory=list)
    new_draft_depths: list[int | None] = field(default_factory=list)
    layer_passes: int = 0  # so far, of a lossless answer
    new_logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class ApiAnswer:
    """The response to a whole request: a choice for each sequence of its ticket."""

    kind: str  # "chat" or "text"
    id: str
    model: str
    mode: str
    num_layers: int
    tell_depths: bool
    tokenizer: Any
    ticket: Ticket
    prompt_tokens: int
    account: Account
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.choices = {number: Choice(index) for index, number in enumerate(self.ticket.ids)}

    def take(self, update: Update) -> Choice:
        choice = self.choices[update.id]
        if update.error is not None:
            raise update.error
        assert update.token is not None
        self.account.saw(update.id)
        choice.text += update.text
        choice.depths.append(update.depth)
        choice.new_depths.append(update.depth)
        choice.new_draft_depths.append(update.draft_depth)
        choice.layer_passes = update.layer_passes
        if update.logprobs is not None:
            choice.new_logprobs.append(self._token_logprob(choice, update))
            choice.logprobs.append(choice.new_logprobs[-1])
        choice.result = update.result
        return choice

    def _token_logprob(self, choice: Choice, update: Update) -> dict[str, Any]:
        assert update.token is not None
        assert update.logprobs is not None
        named = self._named(update.token, update.logprobs.chosen)
        named["offset"] = choice.characters
        choice.characters += len(choice.unfinished.decode(bytes(named["bytes"])))
        named["top_logprobs"] = [self._named(token, log) for token, log in update.logprobs.top]
        return named

    def _named(self, token: int, log: float) -> dict[str, Any]:
        said = token_bytes(self.tokenizer, token)
        return {"token": token_name(said), "logprob": max(log, -9999.0), "bytes": list(said)}

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices.values():
            body = {"message": {"role": "assistant", "content": choice.text}} if self.is_chat else {"text": choice.text}
            choices.append(self._choice(choice, body, choice.logprobs))
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": choices,
            "usage": self.usage(),
            "depth_decay": self.depth_account(),
        }

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, choice: Choice, body: dict[str, Any], logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        reason = choice.result.finish_reason if choice.result is not None else None
        told = (_chat_logprobs(logprobs) if self.is_chat else _text_logprobs(logprobs)) if logprobs else None
        return {"index": choice.index, **body, "logprobs": told, "finish_reason": reason}

    def usage(self) -> dict[str, int]:
        told = sum(len(choice.depths) for choice in self.choices.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": told,
            "total_tokens": self.prompt_tokens + told,
        }

    def depth_account(self, *, with_depths: bool = True) -> dict[str, Any]:
        results = [choice.result for choice in self.choices.values() if choice.result is not None]
        if self.mode == "lossless" and len(results) == len(self.choices):
            executed = sum(result.layers_executed for result in results)  # by pass: one may yield several tokens
        else:
            executed = sum(sum(choice.depths) for choice in self.choices.values())
        full = self.num_layers * sum(len(choice.depths) for choice in self.choices.values())
        account: dict[str, Any] = {
            "mode": self.mode,
            "num_layers": self.num_layers,
            "layers_executed": executed,
            "layers_full": full,
            "layer_speedup": full / executed if executed else 1.0,
        }
        if results and all(result.exact is not None for result in results):  # None: unknown
            account["exact"] = all(result.exact for result in results)
        if self.mode == "lossless":
            drafted, accepted = sum(r.drafted for r in results), sum(r.accepted for r in results)
            account |= {"drafted": drafted, "accepted": accepted, "acceptance": accepted / drafted if drafted else None}
            account["verifications"] = sum(result.verifications for result in results)
            if not drafted:
                account["ran_as"] = "full"  # the same answer, token by token
        if self.tell_depths and with_depths:
            account["depths"] = [choice.depths for choice in self.choices.values()]
            if self.mode == "lossless":
                account["draft_depths"] = [result.draft_depths for result in results]
        return account

    def opening(self) -> list[dict[str, Any]]:
        """Chat streams start with the role."""
        if not self.is_chat:
            return []
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(choice, role) for choice in self.choices.values()]

    def piece(self, choice: Choice, text: str) -> dict[str, Any] | None:
        """The chunk that an update adds to a stream; None where its text is held back."""
        is_last = choice.result is not None
        if not text and not is_last:
            return None
        body: dict[str, Any] = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
        chunk = self._chunk(choice, body)
        choice.new_depths, choice.new_draft_depths, choice.new_logprobs = [], [], []
        return chunk

    def _chunk(self, choice: Choice, body: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        chunk["choices"] = [self._choice(choice, body, choice.new_logprobs)]
        told: dict[str, Any] = {}
        if self.tell_depths:
            told["depths"] = choice.new_depths
            if self.mode == "lossless":
                told |= {"draft_depths": choice.new_draft_depths, "layer_passes": choice.layer_passes}
        if all(other.result is not None for other in self.choices.values()):
            told = {**self.depth_account(with_depths=False), **told}
        if told:
            chunk["depth_decay"] = told
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def closing(self) -> list[dict[str, Any]]:
        if not self.include_usage:
            return []
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return [{**head, "choices": [], "usage": self.usage()}]

    async def updates(self) -> AsyncIterator[Update]:
        """Until every choice has ended."""
        left = len(self.choices)
        while left:
            # The batch checks deadlines only between steps, and a step may be long.
            async with asyncio.timeout(self.ticket.place.deadline - time.monotonic()):
                news = await self.ticket.updates.get()
            if isinstance(news, Exception):
                raise news
            for update in news:
                left -= update.finished
                yield update

    async def collect(self) -> dict[str, Any]:
        async for update in self.updates():
            self.take(update)
        return self.whole()

    async def events(self, on_error: Callable[[Exception], ApiError]) -> AsyncIterator[str]:
        """Server-sent events. An error is sent as the last one, without [DONE]."""
        try:
            for chunk in self.opening():
                yield _event(chunk)
            async for update in self.updates():
                chunk_or_none = self.piece(self.take(update), update.text)
                if chunk_or_none is not None:
                    yield _event(chunk_or_none)
            for chunk in self.closing():
                yield _event(chunk)
            yield DONE
        except Exception as error:
            yield _event(on_error(error).body())


def as_api_error(error: Exception) -> ApiError:
    """Bad input is the client's error; anything else is ours, and its message reveals no internals."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DepthDecayError):
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return ApiError(400, " ".join(str(error).split()), code=code)
    return ApiError(500, "the server failed on this request; see its log for the reason", code="internal_error")


def _event(content: dict[str, Any]) -> str:
    return f"data: {dumps(content)}\n\n"


def _chat_logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": [{key: value for key, value in token.items() if key != "offset"} for token in tokens]}


def _text_logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens],
        "text_offset": [token["offset"] for token in tokens],
    }
