"""Lossless decoding on CUDA: a graph for every depth, number of tokens and bucket of positions that a pass may have."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cache import bucket_for, room_for
from .decoding import Prompt
from .errors import one_line
from .graphs import Capturer, CompiledLayers, OnDevice
from .lossless import LosslessDecoder, RowSampler
from .plan import Plan
from .repairs import Repairs
from .short_head import PIECES, ShortHead, product
from .stack import Stack, replaced
from .windows import Pace

# Numbers of tokens that passes are captured for; a shorter one is padded behind, where nobody looks. On an H200 a pass
# over 8 costs 3% more than one over 4, so more sizes would save less than capturing them takes.
SIZES = (1, 2, 4, 8, 16)
TURNS = 4  # verifications whose answers are kept: more than are ever under way


@dataclass
class Slot:
    """What a graph over so many tokens reads and writes; it must stay where it is."""

    ids: torch.Tensor  # (batch, size)
    positions: torch.Tensor  # (batch, size)
    steps: torch.Tensor  # (size)
    logits: torch.Tensor | None = None  # (batch, size, vocabulary)


class Window:
    """A window of one row on the device: the last certain token, the drafts behind it, and where they stand.

    Drafts and verifications read and advance it, so that passes follow each other without the host.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        longest = SIZES[-1]
        self.ids = torch.zeros((1, longest + 1), dtype=torch.long, device=device)
        self.drafted = torch.zeros(1, dtype=torch.long, device=device)
        self.base = torch.zeros(1, dtype=torch.long, device=device)  # the column of the last certain token
        self.offset = torch.zeros((1, 1), dtype=torch.long, device=device)  # from columns to positions
        self.steps = torch.arange(longest, device=device)
        # Of the last windows in turn: how sure the drafts are; how many tokens stay, and all of them.
        self.confidences = torch.zeros((TURNS, longest + 1), device=device)
        self.answers = torch.zeros((TURNS, longest + 1), dtype=torch.long, device=device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)
        self.given = torch.zeros(longest, dtype=torch.long, pin_memory=on_cuda)  # by the host
        # What the host reads. Copies to it are part of the graphs.
        self.confidences_host = torch.zeros((TURNS, longest + 1), pin_memory=on_cuda)
        self.answers_host = torch.zeros((TURNS, longest + 1), dtype=torch.long, pin_memory=on_cuda)
        # The same memory: reading a number from it takes a tenth of the time, and the device waits meanwhile.
        self.confidences_read, self.answers_read = self.confidences_host.numpy(), self.answers_host.numpy()

    @contextlib.contextmanager
    def unchanged(self) -> Any:
        """Passes inside leave no trace; keys and values that they write will be written again."""
        parts = (self.ids, self.drafted, self.base, self.confidences, self.turn)
        before = [part.clone() for part in parts]
        try:
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)


def take_draft(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    ids: torch.Tensor,
    drafted: torch.Tensor,
    confidences: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Put the likeliest token behind the drafts so far, and its probability; `rows` are the tokens of short logits."""
    # In pieces first, for one program each: a single one would take longer than half a layer.
    pieces = logits.float().view(PIECES if logits.shape[1] % PIECES == 0 else 1, -1)
    highest, place = pieces.max(1)
    shares = (pieces - highest.unsqueeze(1)).exp().sum(1)
    piece = highest.argmax(0, keepdim=True)
    token = piece * pieces.shape[1] + place[piece]
    confidences.index_put_((turn, drafted), 1 / (shares * (highest - highest[piece]).exp()).sum(0, keepdim=True))
    drafted += 1
    ids.scatter_(1, drafted.unsqueeze(0), (token if rows is None else rows[token]).unsqueeze(0))


def take_verified(
    said: torch.Tensor,
    ids: torch.Tensor,
    window: torch.Tensor,
    drafted: torch.Tensor,
    base: torch.Tensor,
    answers: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Keep the drafts that the full model would have said, and a token of its own; the next window starts there."""
    right = (said[:, :-1] == ids[:, 1:]).long().cumprod(1).sum(1)
    right = torch.minimum(right, drafted)  # behind the drafts lie older ones
    window[:, :1] = said.gather(1, right.unsqueeze(0))
    answer = torch.cat([right + 1, said[0], said.new_zeros(SIZES[-1] - said.shape[1])])
    answers.index_copy_(0, turn, answer.unsqueeze(0))
    turn.copy_((turn + 1) % TURNS)
    base += right + 1
    drafted.zero_()


class LosslessGraphDecoder(OnDevice, LosslessDecoder):
    """The same windows as graphs. Where a model cannot be captured, passes run eagerly, and a warning says so."""

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        prompt: Prompt,
        new_tokens: int,
        repairs: Repairs,
        longest: int,
        short_head: ShortHead | None,
        compiled: CompiledLayers | None,
        pace: Pace,
    ) -> None:
        super().__init__(stack, plan, prompt, new_tokens, repairs, longest, short_head)
        self.compiled = compiled
        self.pace = pace
        self.capturer = Capturer()
        self.can_capture = True
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.slots: dict[int, Slot] = {}
        self.start = torch.zeros(1, dtype=torch.long, device=prompt.ids.device)
        self.position = self.start
        self.window = Window(prompt.ids.device)
        self._arrivals: list[torch.cuda.Event | None] = []  # of this window's drafts
        self._underway: deque[tuple[int, torch.cuda.Event | None]] = deque()  # verifications: tokens, and their end
        self._turn = 0
        self._gone = 0  # places that windows went on since `next_position` was true, which is on the device

    def prefill(self, prompt: Prompt) -> int:
        self._gone = 0
        return super().prefill(prompt)

    @property
    def chains(self) -> bool:  # type: ignore[override]
        return self.can_capture and self.batch == 1

    def _room(self, columns: int) -> int:
        return room_for(columns + SIZES[-1], self.batch)

    def _short_head(self, sampler: RowSampler) -> None:
        return None  # the slots' logits are of the whole vocabulary

    def _pass(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        depth: int,
        keep: int = 1,
        short: ShortHead | None = None,
    ) -> torch.Tensor:
        width = ids.shape[1]
        size = next((size for size in SIZES if size >= width), None)
        if size is None or not self.can_capture:
            return super()._pass(ids, positions, depth, keep)
        slot = self._slot(size)
        slot.ids[:, :width].copy_(ids)
        slot.positions[:, :width].copy_(positions)
        self.start.fill_(self.filled)
        bucket = bucket_for(self.filled + size)
        few = 1 < size * self.batch <= SIZES[-1]
        graph = self._graph(("pass", depth, size, bucket), depth, bucket, lambda: self._columns(size, bucket), few)
        if graph is None:
            return super()._pass(ids, positions, depth, keep)
        graph.replay()
        self.cache.clock.filled += width
        assert slot.logits is not None
        return slot.logits[:, width - keep : width]

    def _slot(self, size: int) -> Slot:
        if size not in self.slots:
            device = self.mask.device
            zeros = torch.zeros((2, self.batch, size), dtype=torch.long, device=device)
            self.slots[size] = Slot(zeros[0], zeros[1], torch.arange(size, device=device))
        return self.slots[size]

    def _graph(self, key: tuple[Any, ...], depth: int, bucket: int, body: Callable[[], None], few: bool) -> Any:
        """The graph of a pass, captured when it is first needed; None where the model cannot be captured."""
        if key not in self.graphs and self.can_capture:

            def run() -> None:
                self.go_to(depth)
                with self._decoding_layout(bucket), self._shared_layers(few):
                    body()

            with self.stack.exclusive():
                try:
                    self.graphs[key] = self._capture(run)
                except Exception as error:
                    reason = one_line(error)
                    if self.compiled is not None:
                        warnings.warn(f"layers could not be compiled and run as they are: {reason}", stacklevel=2)
                        self.compiled = None
                        return self._graph(key, depth, bucket, body, few)
                    warnings.warn(f"this model cannot run as CUDA graphs and runs eagerly: {reason}", stacklevel=2)
                    self.can_capture = False
                    self.next_position = self.next_position + self._gone
                    self._gone = 0
        return self.graphs.get(key)

    def _capture(self, run: Callable[[], None]) -> Any:
        def warm_up() -> None:
            with self.window.unchanged():  # else the next pass would start behind this one's, and leave the bucket
                run()

        return self.capturer.capture(warm_up, run)

    def _columns(self, size: int, bucket: int) -> None:
        """A pass over the slot's tokens, written from the device's position on."""
        slot = self.slots[size]
        columns = self.start + slot.steps
        self.cache.on_device(self.start, bucket, columns)
        mask = self._mask(self.mask[:, :bucket], columns)
        logits = self.stack.run(self.layer_pass, slot.ids, mask, self.cache, slot.positions, keep=size)
        if slot.logits is None:
            slot.logits = torch.empty_like(logits)
        slot.logits.copy_(logits)

    # As a Chain.

    def begin(self, first: torch.Tensor) -> None:
        window = self.window
        window.ids[:, 0] = first
        window.drafted.zero_()
        window.base.fill_(self.filled)
        window.offset.copy_(self.next_position - self.filled)
        window.turn.zero_()
        self._arrivals = []
        self._underway.clear()
        self._turn = 0

    def offer(self, drafts: list[int]) -> None:
        window, count = self.window, len(drafts)
        window.given[:count] = torch.tensor(drafts)
        window.ids[0, 1 : count + 1].copy_(window.given[:count], non_blocking=True)  # the last ones have been read
        window.drafted.fill_(count)

    def draft_one(self, depth: int, step: int) -> None:
        bucket = bucket_for(self._at_most + step + 1)
        graph = self._chained(("draft", depth, bucket), depth, bucket, lambda: self._draft(bucket))
        if graph is not None:
            graph.replay()
            self._arrivals[step:] = [self._now()]

    def confidence(self, step: int) -> float:
        arrival = self._arrivals[step]
        if arrival is not None:
            arrival.synchronize()
        return float(self.window.confidences_read[self._turn, step])

    def launch(self, width: int) -> None:
        size = next(size for size in SIZES if size > width)
        bucket = bucket_for(self._at_most + size)
        layers = self.stack.num_layers
        graph = self._chained(("verify", size, bucket), layers, bucket, lambda: self._verify(size, bucket), size > 1)
        if graph is not None:
            graph.replay()
            self._underway.append((size, self._now()))

    @property
    def _at_most(self) -> int:
        """Columns that may be filled once all verifications that are under way have ended."""
        return self.filled + sum(size for size, _ in self._underway)

    def collect(self) -> tuple[list[int], list[float]]:
        _, end = self._underway.popleft()
        if end is not None:
            end.synchronize()
        kept, *said = self.window.answers_read[self._turn].tolist()
        confidences = self.window.confidences_read[self._turn].tolist()
        self._turn = (self._turn + 1) % TURNS
        self.cache.clock.filled += kept
        self._gone += kept
        return said[:kept], confidences

    def _now(self) -> torch.cuda.Event | None:
        if self.mask.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _chained(
        self, key: tuple[Any, ...], depth: int, bucket: int, body: Callable[[], None], few: bool = False
    ) -> Any:
        if key not in self.graphs:
            graph = self._graph(key, depth, bucket, body, few)
            if graph is not None:
                self._time(f"{key[0]} {key[1]}", graph)
        return self.graphs.get(key)

    def _time(self, kind: str, graph: Any) -> None:
        """How long a pass takes on this machine: windows are chosen by that."""
        if self.mask.device.type != "cuda":
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        seconds = []
        for _ in range(4):
            with self.window.unchanged():
                begin.record()
                graph.replay()
                end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        self.pace.takes(kind, min(seconds))

    def _draft(self, bucket: int) -> None:
        """One draft behind the last one, and how sure it is."""
        window, short = self.window, self.short_head
        column = window.base + window.drafted
        self.cache.on_device(column, bucket)
        ids = window.ids.gather(1, window.drafted.unsqueeze(0))
        positions = column.unsqueeze(0) + window.offset
        mask = self._mask(self.mask[:, :bucket], column)
        with contextlib.ExitStack() as undo:
            if short is not None:
                undo.enter_context(replaced(short, "product", self._as_few_kernels(product)))
            logits = self.stack.run(self.layer_pass, ids, mask, self.cache, positions, short=short)[:, -1]
        rows = None if short is None else short.ids
        self._as_few_kernels(take_draft)(logits, rows, window.ids, window.drafted, window.confidences, window.turn)
        window.confidences_host.copy_(window.confidences, non_blocking=True)

    def _verify(self, size: int, bucket: int) -> None:
        """The full model on the window; what it keeps moves the window on."""
        window = self.window
        columns = window.base + window.steps[:size]
        self.cache.on_device(window.base, bucket, columns)
        ids = window.ids[:, :size].clone()
        positions = columns.unsqueeze(0) + window.offset
        mask = self._mask(self.mask[:, :bucket], columns)
        logits = self.stack.run(self.layer_pass, ids, mask, self.cache, positions, keep=size)
        take_over = self._as_few_kernels(take_verified)
        said = logits.argmax(-1)  # torch's own kernel has many programs for a row, a generated one has one
        take_over(said, ids, window.ids, window.drafted, window.base, window.answers, window.turn)
        window.answers_host.copy_(window.answers, non_blocking=True)
