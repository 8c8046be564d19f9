"""An answer with its statistics, finished or in progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from depthdecay.engine.text_stream import TextStream

if TYPE_CHECKING:
    from depthdecay.engine.request import Request


@dataclass
class Result:
    """One answer, with its statistics."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # depths[i]: layers of the pass that produced token i
    finish_reason: str = "length"  # "stop": an end-of-text token, a stop string or a criterion; "length": the limit
    num_layers: int = 0
    prompt_tokens: int = 0
    overrun_layers: int = 0  # layers run for this row after its last token, due to host lag and longer rows
    seconds: float = 0.0  # for the whole batch
    prefill_seconds: float = 0.0
    mode: str = "full"
    seed: int | None = None
    # In lossless mode: what drafted each token (a depth; 0: prompt lookup; -1: a learned head; None: the full pass
    # itself), and the counts. `depths` are those of the verifying passes, all of them full.
    draft_depths: list[int | None] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0  # full-depth passes over one token or several
    layer_passes: int = 0  # layers of all passes with this row, drafts included
    cache_bytes: int = 0  # KV cache of the whole batch
    cache_bytes_saved: int = 0  # compared with equally large caches in every layer
    # Whether results are batch-invariant, that is, bitwise independent of drafts or other texts in the pass. Then
    # lossless and full answers are the same, whatever else is in the batch. None if unknown. And, if not, why.
    exact: bool | None = None
    inexact_because: str | None = None

    @classmethod
    def of(cls, num_layers: int, prompt: Sequence[int], request: Request, mode: str) -> Result:
        """An empty result for a prompt."""
        return cls(num_layers=num_layers, prompt_tokens=len(prompt), mode=mode, seed=request.seed)

    @property
    def layers_executed(self) -> int:
        """For a lossless answer the layer passes: one verification of several tokens reads each layer once."""
        return self.layer_passes if self.mode == "lossless" else sum(self.depths)

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def passes_per_token(self) -> float:
        """Full-depth passes per token, counted by layers; below 1 if drafting saves work."""
        return self.layers_executed / self.layers_full if self.token_ids else 0.0

    @property
    def full_passes(self) -> int:
        """Full-depth passes that gave tokens. That over the prompt is one: it gives the first token."""
        if self.mode == "lossless":
            return self.verifications + 1 if self.token_ids else 0
        return self.depths.count(self.num_layers)

    @property
    def tokens_per_full_pass(self) -> float:
        """Above 1 if drafts were accepted, or if decay ran tokens at less than full depth."""
        return len(self.token_ids) / self.full_passes if self.full_passes else 0.0

    @property
    def layers_full(self) -> int:
        return self.num_layers * len(self.token_ids)

    @property
    def layer_speedup(self) -> float:
        return self.layers_full / self.layers_executed if self.depths else 1.0

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds

    @property
    def ms_per_token(self) -> float:
        """Decoding only: the first token comes from prefill."""
        steps = len(self.token_ids) - 1
        return 1000 * self.decode_seconds / steps if steps > 0 else 0.0


class Piece(str):
    """A piece of streamed text, with the depth of the token that completed it."""

    depth: int

    def __new__(cls, text: str, depth: int) -> Piece:
        piece = super().__new__(cls, text)
        piece.depth = depth
        return piece


class Stream(Iterator[Piece]):
    """Iterates over pieces of text; `result` is complete once the iteration has ended."""

    def __init__(self, pieces: Iterator[Piece], result: Result) -> None:
        self._pieces = pieces
        self.result = result

    def __next__(self) -> Piece:
        return next(self._pieces)


class AnswerInProgress:
    """One answer in progress, on the host: its tokens as text, and where it ends."""

    def __init__(self, result: Result, tokenizer: Any, request: Request) -> None:
        self.result = result
        self.text = TextStream(tokenizer, request.stop) if tokenizer is not None else None
        self.eos = request.eos_token_ids
        self.finished = False

    def take(self, token: int, depth: int) -> str:
        """Add a token, or count its layers as overrun if the row has ended; returns the text that is now certain."""
        if self.finished:
            self.result.overrun_layers += depth
            return ""
        self.result.token_ids.append(token)
        self.result.depths.append(depth)
        piece = self.text.push(token) if self.text is not None else ""
        if token in self.eos or (self.text is not None and self.text.stopped):
            self.end("stop")
        return piece

    def end(self, reason: str) -> None:
        self.finished = True
        self.result.finish_reason = reason

    def finish_text(self) -> str:
        if self.text is None:
            return ""
        rest = self.text.finish(cut_short=self.result.finish_reason == "length")
        self.result.text = self.text.text
        return rest
