"""Windows on a CPU in one compiled call: drafts of a learned head, their verification, and what of them is right.

A draft of a small model takes a tenth of a step. With a call for each pass, Python and waking threads would cost as
much again.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from depthdecay.cpu import kernel_library as native
from depthdecay.cpu.compiled_rows import CompiledRows
from depthdecay.cpu.threads import threads
from depthdecay.engine.sampling import Sampler
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Runner
from depthdecay.runners.kv_blocks import BLOCK
from depthdecay.speculative.compiled_head import CompiledHead, CompiledHeadText
from depthdecay.speculative.drafters import Done
from depthdecay.speculative.expected_gain import CONFIDENCES, LEARNED, LONGEST, TrackRecord
from depthdecay.speculative.head_text import PlacedHead
from depthdecay.speculative.host_lane import HostLane

UNREAD = 64  # verified tokens that may wait for the head while drafting pauses; it reads them at once
_WIDEST = LONGEST + 1


def compiled_rows(runner: Runner) -> CompiledRows | None:
    return runner.compiled if isinstance(runner, BlockRunner) else None


class CompiledLane(HostLane):
    """A `HostLane` for greedy decoding whose verifications are compiled calls, with a learned head's drafts in them."""

    @staticmethod
    def supports(runner: Runner, sampler: Sampler, head: PlacedHead | None) -> bool:
        rows = compiled_rows(runner)
        if rows is None or not sampler.is_plain_greedy or not (head is None or isinstance(head, CompiledHead)):
            return False
        weights = rows.stack.weights
        return bool(weights.head.rows <= weights.embedding.rows)  # every token that it may pick can be read

    def begin(self, token: int) -> None:
        super().begin(token)
        rows = compiled_rows(self.runner)
        assert rows is not None
        self.window = CompiledWindow(rows, self.draft_head)
        if self.draft_head is not None:
            assert isinstance(self.head_text, CompiledHeadText)
            self.window.follow(self.head_text)

    def whole_window(self, record: TrackRecord, limit: int) -> Done | None:
        if record.depth != LEARNED or self.drafts:
            return None
        window = self.window
        window.expect(record)
        window.run(self.last, self.length, [], limit)
        # Not the whole call: after a pause, the head first reads a backlog, which says nothing about windows.
        self.window_seconds = window.told.draft_seconds + window.told.verify_seconds
        made, verified = window.told.drafted, window.told.verified
        self.pace.saw_draft(LEARNED, window.told.draft_seconds / made)
        self.pace.saw_verification(verified + 1, window.told.verify_seconds)
        self.confidences = window.shares[:made]
        self.drafts = window.ids[1 : made + 1]
        if made == verified:
            return Done(made)
        missed = window.told.accepted == verified and self.drafts[verified] == window.said[verified]
        return Done(verified + 1, left_out=1, missed=int(missed))

    def _verify(self) -> None:
        window, started = self.window, time.perf_counter()
        window.run(self.last, self.length, self.drafts, 0)
        ended = time.perf_counter()
        self.pace.saw_verification(len(self.drafts) + 1, window.told.verify_seconds)
        if self._drafting:
            self.pace.saw_draft(self._depth, self._drafting / len(self.drafts))
        self.window_seconds = ended - (started if self._begun is None else self._begun)

    def collect(self) -> tuple[list[int], list[float]]:
        kept, confidences = self.window.said[: self.window.told.accepted + 1], self.confidences
        self.length += len(kept)
        self.last = kept[-1]
        self.drafts, self.confidences, self._drafting, self._begun = [], [], 0.0, None
        return kept, confidences


class CompiledWindow:
    """The call's arguments, which stay the same from window to window but for a few numbers."""

    def __init__(self, rows: CompiledRows, head: PlacedHead | None) -> None:
        self.rows = rows
        self.stack = rows.stack
        self.most_positions = rows.blocks.longest
        self._alive: list[Any] = []
        self.read: native.Pass | None = None  # of a learned head
        numbers = ctypes.c_int64 * _WIDEST
        self.ids, self.said = numbers(), numbers()
        self.shares = (ctypes.c_float * _WIDEST)()
        self.likelihoods = (ctypes.c_float * (len(CONFIDENCES) + 1))()
        model, columns = self.stack.weights, numbers()
        running = (ctypes.c_int64 * self.stack.num_layers)()
        no_maps = (ctypes.POINTER(native.Map) * self.stack.num_layers)()
        segment = native.Segment(0, 0, no_maps)
        cosine, sine = self.stack.angles_up_to(self.most_positions)
        saved = None
        if head is not None:
            places: list[int | None] = [None] * self.stack.num_layers
            for layer in head.head.shape.states:
                places[layer] = self._floats(_WIDEST, model.hidden)
            saved = (ctypes.c_void_p * self.stack.num_layers)(*places)
        self.verification = native.Pass(
            batch=rows.blocks.table.shape[1],
            ids=ctypes.addressof(self.ids),
            row=numbers(),
            column=columns,
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            state=self._floats(_WIDEST, model.hidden),
            keys=rows.keys,
            values=rows.values,
            table=rows.blocks.table.data_ptr(),
            most=rows.blocks.table.shape[2],
            block=BLOCK,
            halves=rows.halves,
            running=running,
            segment=ctypes.pointer(segment),
            segments=1,
            wanted=numbers(*range(_WIDEST)),
            logits=self._floats(_WIDEST, model.head.rows),
            best=self.said,
            saved=saved,
        )
        self.told = native.WindowStruct(
            model=ctypes.pointer(model),
            verification=ctypes.pointer(self.verification),
            ids=self.ids,
            columns=columns,
            running=running,
            segment=ctypes.pointer(segment),
            bounds=(ctypes.c_float * len(CONFIDENCES))(*CONFIDENCES),
            likelihoods=self.likelihoods,
            bounds_count=len(CONFIDENCES),
            shares=self.shares,
        )
        self._alive += [cosine, sine]

    def follow(self, text: CompiledHeadText) -> None:
        """Continue what a learned head has read of the text so far."""
        head, shape, told = text.placed, text.head.shape, self.told
        room, end = UNREAD + _WIDEST, self.most_positions
        text._make_room(end, text.before[0])
        assert text.keys is not None
        assert text.values is not None
        cosine, sine = head.angles(end)
        unread = (ctypes.c_int64 * room)(*text.tokens)
        before = torch.zeros((room, len(shape.states) * shape.hidden))
        before[: len(text.tokens)] = torch.cat(text.before)
        columns, table, pointer = (ctypes.c_int64 * room)(), ctypes.c_int64(0), ctypes.c_void_p * 1
        self.read = native.Pass(
            batch=1,
            row=(ctypes.c_int64 * room)(),
            column=columns,
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            state=self._floats(room, shape.hidden),
            keys=pointer(text.keys.data_ptr()),
            values=pointer(text.values.data_ptr()),
            table=ctypes.addressof(table),
            most=1,
            block=text.keys.shape[0],
            segments=1,
            logits=self._floats(1, len(head.head.vocabulary)),
            best=(ctypes.c_int64 * 1)(),
            share=(ctypes.c_float * 1)(),
            beside=self._floats(room, shape.hidden),
        )
        told.head, told.read = ctypes.pointer(head.model), ctypes.pointer(self.read)
        told.read_columns, told.vocabulary = columns, head.head.vocabulary.data_ptr()
        told.unread, told.unread_states, told.unread_room = unread, before.data_ptr(), room
        told.unread_count, told.read_count = len(text.tokens), text.length - 1
        told.states = (ctypes.c_int64 * len(shape.states))(*shape.states)
        told.states_count = len(shape.states)
        self._alive += [cosine, sine, before, table, text.keys, text.values, head]

    def expect(self, record: TrackRecord) -> None:
        """Set what ends drafting, and what leaves drafts out of the verification."""
        told = self.told
        self.likelihoods[:] = [*record.likelihoods()]
        told.next_pays_above, told.verified_above = record.next_pays_above, record.verified_above

    def run(self, last: int, length: int, drafts: Sequence[int], more: int) -> None:
        """One window after so many positions: these drafts, and up to so many `more` of the head's."""
        told = self.told
        self.ids[: len(drafts) + 1] = [last, *drafts]
        told.length, told.given, told.most = length, len(drafts), more
        self.verification.threads = threads()  # may have changed since the text began
        if self.read is not None:
            self.read.threads = self.verification.threads
        with self.stack.exclusive():
            self.stack.code.run_window(told)

    def _floats(self, *shape: int) -> int:
        self._alive.append(torch.empty(shape))
        return int(self._alive[-1].data_ptr())
