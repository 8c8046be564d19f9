"""Windows of one text as CUDA graphs that draft, verify and feed each other on the device.

The host launches graphs and reads results. It waits once per window, and may launch the next window before that.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from depthdecay.cuda.kernels.host_copy import copy_to_host
from depthdecay.cuda.likeliest import PIECES, likeliest
from depthdecay.cuda.pass_graphs import Captured, PassGraphs, apart
from depthdecay.engine.sampling import Sampler
from depthdecay.model.kv_cache import bucket_for, room_for
from depthdecay.patches import replaced
from depthdecay.runners.contract import PLAIN, Ask, Part
from depthdecay.speculative.accept import count_right_on_device
from depthdecay.speculative.chain_head import ChainHead
from depthdecay.speculative.chain_pick import ChainPick
from depthdecay.speculative.drafters import Done
from depthdecay.speculative.expected_gain import LEARNED, LONGEST, Pace, TrackRecord
from depthdecay.speculative.head_text import PlacedHead
from depthdecay.speculative.short_head import ShortHead, product

# Token counts that verifications are captured for. A shorter one is padded at the end, where no token attends. On an
# H200 a pass over 8 tokens costs 3% more than one over 4, so more sizes would save less than their capture costs.
SIZES = (1, 2, 4, 8, 16)
TURNS = 4  # verifications whose results are kept: more than are ever in flight


class DeviceWindow:
    """A window on the device: the last verified token, the drafts after it, and their positions.

    Drafts and verifications read and advance it, so passes follow each other without the host.
    """

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        longest = SIZES[-1]
        self.ids = torch.zeros((1, longest + 1), dtype=torch.long, device=device)
        self.drafted = torch.zeros(1, dtype=torch.long, device=device)
        self.base = torch.zeros(1, dtype=torch.long, device=device)  # the position of the last verified token
        self.steps = torch.arange(longest, device=device)
        # Ring buffers over the last windows: the drafts' confidences; and the number of tokens kept, then the tokens.
        self.confidences = torch.zeros((TURNS, longest + 1), device=device)
        self.answers = torch.zeros((TURNS, longest + 1), dtype=torch.long, device=device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)
        self.given = torch.zeros(longest, dtype=torch.long, pin_memory=on_cuda)  # drafts from the host
        # What the host reads. The copies are part of the graphs.
        self.confidences_host = torch.zeros((TURNS, longest + 1), pin_memory=on_cuda)
        self.answers_host = torch.zeros((TURNS, longest + 1), dtype=torch.long, pin_memory=on_cuda)
        # The same memory as numpy: reading an element takes a tenth of the time, while the device waits.
        self.confidences_read, self.answers_read = self.confidences_host.numpy(), self.answers_host.numpy()


def take_draft(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    ids: torch.Tensor,
    drafted: torch.Tensor,
    confidences: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Append the most likely token to the drafts, with its probability. `rows`: the tokens of a shortened LM head."""
    pieces = _in_pieces(logits)
    highest, place = pieces.max(1)
    piece = highest.argmax(0, keepdim=True)
    token = piece * pieces.shape[1] + place[piece]
    confidences.index_put_((turn, drafted), 1 / _whole(pieces, highest, highest[piece]))
    drafted += 1
    ids.scatter_(1, drafted.unsqueeze(0), (token if rows is None else rows[token]).unsqueeze(0))


def _in_pieces(logits: torch.Tensor) -> torch.Tensor:
    """To be reduced by one program each: a single program would take longer than half a layer."""
    return logits.float().view(PIECES if logits.shape[1] % PIECES == 0 else 1, -1)


def _whole(pieces: torch.Tensor, highest: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The sum of all probabilities (1), relative to that of the most likely token, whose logit is `first`."""
    shares = (pieces - highest.unsqueeze(1)).exp().sum(1)
    return (shares * (highest - first).exp()).sum(0, keepdim=True)


def take_picked(
    picked: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    ids: torch.Tensor,
    drafted: torch.Tensor,
    confidences: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """The same for a draft that was already picked, given as an index into the logits."""
    pieces = _in_pieces(logits)
    highest = pieces.max(1).values
    first = highest.max()
    share = (logits[0, picked].float() - first).exp() / _whole(pieces, highest, first)
    confidences.index_put_((turn, drafted), share)
    drafted += 1
    ids.scatter_(1, drafted.unsqueeze(0), (picked if rows is None else rows[picked]).unsqueeze(0))


def take_verified(
    said: torch.Tensor,
    ids: torch.Tensor,
    window: torch.Tensor,
    drafted: torch.Tensor,
    base: torch.Tensor,
    answers: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Keep the accepted drafts and one token of the full model; the next window starts there."""
    right = count_right_on_device(ids[:, 1:], said[:, :-1], drafted)
    window[:, :1] = said.gather(1, right.unsqueeze(0))
    answer = torch.cat([right + 1, said[0], said.new_zeros(SIZES[-1] - said.shape[1])])
    answers.index_copy_(0, turn, answer.unsqueeze(0))
    turn.copy_((turn + 1) % TURNS)
    base += right + 1
    drafted.zero_()


class Chain:
    """A `Lane` of CUDA graphs. Every method may raise `NotCapturable`; another lane must then prefill the text."""

    at_once = 2  # drafts started before waiting for anything
    lag = 1  # a draft's confidence is read while the next one runs
    runs_ahead = True

    def __init__(
        self, passes: PassGraphs, short_head: ShortHead | None, draft_head: PlacedHead | None, pace: Pace
    ) -> None:
        """`passes`: for one text, with `room_for` positions in every layer."""
        self.passes = passes
        self.short_head = short_head
        self.pace = pace
        self.window = window = DeviceWindow(passes.tokens.device)
        passes.changing += [window.ids, window.drafted, window.base, window.confidences, window.turn]
        self.head = None if draft_head is None else ChainHead(draft_head, passes.room)
        if self.head is not None:
            passes.changing += self.head.changing
        vocabulary = passes.stack.model.get_output_embeddings().weight.shape[0]
        self.pick = ChainPick(vocabulary, passes.room, window.ids.device)
        passes.changing += self.pick.changing
        self._arrivals: list[torch.cuda.Event | None] = []  # of this window's drafts
        self._underway: deque[tuple[int, torch.cuda.Event | None]] = deque()  # verifications in flight: tokens, end
        self._turn = 0

    @staticmethod
    def room_for(positions: int) -> int:
        return room_for(positions + LONGEST + 1 + SIZES[-1], 1)

    def fits(self, positions: int) -> bool:
        """Whether a text of so many positions fits into the same cache, with the same graphs."""
        return self.room_for(positions) <= self.passes.room

    @property
    def cache_bytes(self) -> int:
        return self.passes.cache_bytes + (0 if self.head is None else self.head.nbytes)

    @property
    def inexact(self) -> str | None:
        return self.passes.inexact

    def read(self, text: Sequence[int]) -> torch.Tensor:
        passes = self.passes
        self._arrivals, self._turn = [], 0
        self._underway.clear()
        self._text = text
        said = passes.run([Part(0, 0, text, passes.plan.num_layers, passes.plan)], self._with_states)
        if self.head is not None:
            self.head.begin(text, said.states)
        return said.logits

    @property
    def _with_states(self) -> Ask:
        return PLAIN if self.head is None else Ask(states=self.head.placed.states)

    def begin(self, token: int) -> None:
        window = self.window
        window.ids[:, 0] = token
        window.drafted.zero_()
        window.base.fill_(self.passes.filled)
        window.turn.zero_()
        self.pick.begin(torch.tensor(self._text, device=window.ids.device), token)

    def prepare(self, sampler: Sampler) -> None:
        """Set the next text's sampler. Graphs for other settings are freed, except greedy ones."""
        self.pick.prepare(sampler)
        if self.pick.is_greedy:
            return
        by_key = self.passes.graphs.by_key
        for key in [key for key in by_key if key[-1] not in ((), self.pick.settings)]:
            del by_key[key]

    def offer(self, drafts: Sequence[int]) -> None:
        window, count = self.window, len(drafts)
        window.given[:count] = torch.tensor(drafts)
        window.ids[0, 1 : count + 1].copy_(window.given[:count], non_blocking=True)  # earlier copies have completed
        window.drafted.fill_(count)

    def draft(self, depth: int, step: int) -> None:
        bucket = bucket_for(self._at_most + step + 1)
        key = ("draft", depth, bucket, self.pick.settings)
        if depth == LEARNED and self.head is not None:
            self.head.unused = 0
        if key not in self.passes.graphs.by_key:
            if depth == LEARNED:
                captured = self.passes.graph(key, self.passes.plan.num_layers, bucket, lambda: self._by_head(bucket))
            else:
                captured = self.passes.graph(key, depth, bucket, lambda: self._draft(bucket))
            if seconds := self._time(captured):
                self.pace.takes_to_draft(depth, seconds)
        self.passes.graphs.by_key[key].graph.replay()
        self._arrivals[step:] = [self._now()]

    def whole_window(self, record: TrackRecord, limit: int) -> Done | None:
        return None

    def confidence(self, step: int) -> float:
        arrival = self._arrivals[step]
        if arrival is not None:
            arrival.synchronize()
        return float(self.window.confidences_read[self._turn, step])

    def verify(self, width: int) -> None:
        size = next(size for size in SIZES if size > width)
        bucket = bucket_for(self._at_most + size)
        reads = self.head is not None and self.head.reads_along
        key = ("verify", size, bucket, reads, self.pick.settings)
        if key not in self.passes.graphs.by_key:
            layers = self.passes.stack.num_layers
            captured = self.passes.graph(key, layers, bucket, lambda: self._verify(size, bucket, reads), tokens=size)
            if seconds := self._time(captured):
                self.pace.takes_to_verify(size, seconds)
        self.passes.graphs.by_key[key].graph.replay()
        if self.head is not None:
            self.head.unused += 1
        self._underway.append((size, self._now()))

    @property
    def _at_most(self) -> int:
        """Upper bound on the filled positions once all verifications in flight have ended."""
        return self.passes.filled + sum(size for size, _ in self._underway)

    def collect(self) -> tuple[list[int], list[float]]:
        _, end = self._underway.popleft()
        if end is not None:
            end.synchronize()
        kept, *said = self.window.answers_read[self._turn].tolist()
        confidences = self.window.confidences_read[self._turn].tolist()
        self._turn = (self._turn + 1) % TURNS
        self.passes.cache.clock.filled += kept
        return said[:kept], confidences

    @property
    def window_seconds(self) -> float | None:
        """Windows overlap, so they have no duration of their own; passes are timed when they are captured."""
        return None

    def _now(self) -> torch.cuda.Event | None:
        if not self.window.ids.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _time(self, captured: Captured) -> float | None:
        """The duration of a pass on this machine, by which windows are chosen."""
        if not self.window.ids.is_cuda:
            return None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        seconds = []
        for _ in range(4):
            with self.passes.unchanged():
                begin.record()
                captured.graph.replay()
                end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        return min(seconds)

    def _draft(self, bucket: int) -> torch.Tensor:
        """One draft after the last one, and its confidence."""
        window, short, passes = self.window, self.short_head, self.passes
        ask = Ask(short=short)
        position = window.base + window.drafted
        passes.cache.on_device(position, bucket)
        ids = window.ids.gather(1, window.drafted.unsqueeze(0))
        mask = passes.mask(bucket, position)
        with contextlib.ExitStack() as undo:
            if short is not None:
                undo.enter_context(replaced(short, "product", passes.as_few_kernels(product)))
            logits = passes.stack.run(passes.layer_pass, ids, mask, passes.cache, apart(position), ask=ask)[:, -1]
        self._take_draft(logits, None if short is None else short.ids, position)
        return logits

    def _by_head(self, bucket: int) -> torch.Tensor:
        """One draft by the learned head, on top of those first layers of the model that it builds on."""
        window, passes, head = self.window, self.passes, self.head
        assert head is not None
        position = window.base + window.drafted
        ids = window.ids.gather(1, window.drafted.unsqueeze(0))
        count = head.head.shape.first_layers
        states: Mapping[int, torch.Tensor] = {}
        if count:
            passes.layer_pass.dropped, passes.layer_pass.repairs = frozenset(range(count, passes.plan.num_layers)), {}
            passes.cache.on_device(position, bucket)
            ask = Ask(states=(count - 1,), logits=False)
            mask = passes.mask(bucket, position)
            passes.stack.run(passes.layer_pass, ids, mask, passes.cache, apart(position), ask=ask)
            states = passes.layer_pass.states
        logits = head.draft(head.given(ids, states), position, bucket, passes.as_few_kernels)
        self._take_draft(logits, head.head.vocabulary, position)
        return logits

    def _take_draft(self, logits: torch.Tensor, rows: torch.Tensor | None, position: torch.Tensor) -> None:
        window = self.window
        where = (window.ids, window.drafted, window.confidences, window.turn)
        if self.pick.is_greedy:
            self.passes.as_few_kernels(take_draft)(logits, rows, *where)
        else:
            picked = self.pick.draft(logits, rows, window.ids, window.drafted, position)
            self.passes.as_few_kernels(take_picked)(picked, logits, rows, *where)
        copy_to_host(window.confidences, window.confidences_host)

    def _verify(self, size: int, bucket: int, reads: bool) -> torch.Tensor:
        """Verify the window with the full model and advance it. With `reads`, the head follows the text as well."""
        window, passes, head = self.window, self.passes, self.head
        ids = window.ids[:, :size].clone()
        positions = window.base + window.steps[:size]
        logits = passes.several(ids, positions, bucket, self._with_states if reads else PLAIN)
        before = None
        if reads and head is not None:
            states = {layer: state[:, :size] for layer, state in passes.layer_pass.states.items()}
            before = head.read_window(ids, states, positions, bucket, passes.as_few_kernels)
        elif head is not None:
            head.leave_out(positions)
        take_over = passes.as_few_kernels(take_verified)
        if self.pick.is_greedy:
            said = passes.as_few_kernels(likeliest)(logits)
        else:
            said = self.pick.verified(logits[0], ids, positions).unsqueeze(0)
        take_over(said, ids, window.ids, window.drafted, window.base, window.answers, window.turn)
        copy_to_host(window.answers, window.answers_host)
        self.pick.take(ids, window.base - positions[:1], window.ids[0, :1])
        if before is not None and head is not None:
            head.go_on(before.index_select(1, window.base - positions[:1] - 1))
        return logits
