"""An answer and the account of what it took, also while it is in the making."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from depthdecay.engine.text_stream import TextStream

if TYPE_CHECKING:
    from depthdecay.engine.request import Request


@dataclass
class Result:
    """One answer, with the account of what it took."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # depths[i]: layers of the pass that produced token i
    finish_reason: str = "length"  # "stop": an end-of-text token, a stop string or a criterion; "length": the limit
    num_layers: int = 0
    prompt_tokens: int = 0
    overrun_layers: int = 0  # layers run for this row after its last token: host lag, and rows of a batch that go on
    seconds: float = 0.0  # of the whole batch that this answer was part of
    prefill_seconds: float = 0.0
    mode: str = "full"
    seed: int | None = None
    # In lossless mode: what proposed each token (a depth; 0: found in the text before; -1: a learned head; None: the
    # full pass itself), and what it took. `depths` are those of the passes that decided, all of them full.
    draft_depths: list[int | None] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0  # full-depth passes over one token or several
    layer_passes: int = 0  # layers of all passes that this row took part in, drafts included
    cache_bytes: int = 0  # keys and values of the whole batch
    cache_bytes_saved: int = 0  # against the same room in every layer
    # On CUDA: whether a token has the same bits whatever runs with it in a pass, drafts or other texts: so lossless and
    # full answers are the same, and none depends on those beside it. None where nothing is known of it. And a sentence
    # that says why not.
    exact: bool | None = None
    inexact_because: str | None = None

    @classmethod
    def of(cls, num_layers: int, prompt: Sequence[int], request: Request, mode: str) -> Result:
        """Of a prompt that has not been answered yet."""
        return cls(num_layers=num_layers, prompt_tokens=len(prompt), mode=mode, seed=request.seed)

    @property
    def layers_executed(self) -> int:
        """Of a lossless answer the layer passes: one verification of several tokens reads each layer once."""
        return self.layer_passes if self.mode == "lossless" else sum(self.depths)

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def passes_per_token(self) -> float:
        """Layer passes in full-depth steps, per token; below 1 where drafting saves work."""
        return self.layers_executed / self.layers_full if self.token_ids else 0.0

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
        """Decoding only: the first token comes with the prompt."""
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
    """Iterates over pieces of text; `result` is whole once the iteration has ended."""

    def __init__(self, pieces: Iterator[Piece], result: Result) -> None:
        self._pieces = pieces
        self.result = result

    def __next__(self) -> Piece:
        return next(self._pieces)


class AnswerInProgress:
    """One answer in the making, on the host's side: its tokens as text, and where it ends."""

    def __init__(self, result: Result, tokenizer: Any, request: Request) -> None:
        self.result = result
        self.text = TextStream(tokenizer, request.stop) if tokenizer is not None else None
        self.eos = request.eos_token_ids
        self.finished = False

    def take(self, token: int, depth: int) -> str:
        """Add a token, or count its layers as overrun when the row has ended; the text that is now certain."""
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
