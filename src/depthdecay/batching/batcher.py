"""Continuous batching: rows join and leave at every step, each with its own position, plan, settings and seed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from depthdecay.batching.admission import Admission
from depthdecay.batching.drafting import BatchDrafting
from depthdecay.batching.exact_rows import ROWS_PICKED, prove_exact, require_exact
from depthdecay.batching.logprobs import Logprobs, logprobs_of
from depthdecay.batching.new_rows import Intake
from depthdecay.batching.prompt_reading import PROMPT_ROWS, read_exactly, read_in_own_passes, read_within_step
from depthdecay.batching.row import BatchRow, from_the_start
from depthdecay.engine.engine import Engine
from depthdecay.engine.request import UNENDING, Request, prepare_request
from depthdecay.engine.result import Result
from depthdecay.engine.sampling import Sampler, pick_tokens, rows_of
from depthdecay.errors import DepthDecayError, UnsupportedModelError
from depthdecay.model.devices import free_bytes
from depthdecay.model.layers import require_eval
from depthdecay.plan.plan import Plan
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import PLAIN, Ask, Part, Said
from depthdecay.runners.kv_blocks import BLOCK, KVBlocks, Usage, blocks_for
from depthdecay.speculative.head_rows import HeadRows

States = dict[int, torch.Tensor]  # by layer

logger = logging.getLogger("depthdecay.batching")

DEFAULT_POSITIONS = 4096  # for models that state no context limit


@dataclass(frozen=True)
class BatchSettings:
    """The operator's settings for a batch."""

    max_batch: int = 32
    prefill_tokens: int = 128  # prompt tokens read between two decoding steps
    cohort_seconds: float = 0.02  # how long a request waits at most for others to join it
    cache_bytes: int | None = None  # for the KV cache; None: enough for max_batch texts, up to half of free memory
    max_positions: int | None = None  # longest text, prompt plus answer; None: the model's context limit
    draft_rows: int = 64  # lossless rows draft while a step has at most this many rows, drafts included
    exact: bool = False  # batch-invariant answers, bitwise; refused where that cannot be guaranteed
    prompts_first: bool = False  # prefill all prompts before decoding: for texts that start and end together

    def __post_init__(self) -> None:
        for name in ("max_batch", "prefill_tokens", "cache_bytes", "max_positions", "draft_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DepthDecayError(f"{name} is {value}; expected a whole number of at least 1")
        if not 0 <= self.cohort_seconds <= 60:
            raise DepthDecayError(f"cohort_seconds is {self.cohort_seconds}; expected seconds from 0 to 60")


@dataclass(frozen=True)
class Update:
    """What one step produced for one sequence."""

    id: int
    token: int | None = None
    depth: int = 0
    text: str = ""
    draft_depth: int | None = None  # as in Result.draft_depths
    layer_passes: int = 0  # as in Result, up to this token
    logprobs: Logprobs | None = None
    finished: bool = False
    result: Result | None = None  # with the last update
    error: Exception | None = None  # its pass failed; no more updates follow


@dataclass
class Counters:
    """Work done, counted where it runs."""

    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    layers_executed: int = 0  # layers times rows, in decode passes
    layers_full: int = 0  # the same at full depth; lossless rows count what they ran, drafts included
    layer_passes: int = 0  # layers of decode passes, whatever their number of rows
    drafted: int = 0  # drafts that were verified
    accepted: int = 0
    errors: int = 0  # rows that failed
    failed_passes: int = 0  # including those that succeeded when retried in halves


class Batcher:
    """The batch of one model. Not thread-safe: one thread submits, steps and cancels."""

    def __init__(
        self,
        engine: Engine,
        settings: BatchSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_eval(engine.stack.model)
        _refuse_unsupported(engine)
        self.engine = engine
        self.stack = engine.stack
        self.settings = settings or BatchSettings()
        if self.settings.exact:
            require_exact(engine)
        self.clock = clock
        limit = self.stack.context_limit() or DEFAULT_POSITIONS
        self.max_positions = min(limit, self.settings.max_positions or limit)
        shapes = self.stack.kept_shapes()
        a_block = BLOCK * sum(shape.nbytes for shape in shapes)
        useful = self.settings.max_batch * blocks_for(self.max_positions) * a_block
        wanted = min(useful, self.settings.cache_bytes or max(a_block, _spare_bytes(engine.device)))
        if wanted < a_block:
            raise DepthDecayError(
                f"{wanted} bytes for the KV cache are less than one block; expected at least {a_block}"
            )
        self.blocks = KVBlocks.within(shapes, self.settings.max_batch, self.max_positions, wanted)
        self.repairs = engine.repairs.placed(self.stack.examples())
        self.runner = BlockRunner(self.stack, self.blocks, self.repairs)
        if engine.uses_graphs and self.settings.exact and engine.compiled is not None:
            self.runner.use_exact_graphs(engine.compiled, self.settings.max_batch + PROMPT_ROWS)
        elif engine.uses_graphs:
            self.runner.use_graphs(engine.compiled, self.settings.max_batch + PROMPT_ROWS)
        placed = engine.lanes.head_for_rows(self.repairs)
        self.head = None if placed is None else HeadRows(placed, self.settings.max_batch)
        self.drafting = BatchDrafting(self.stack, engine.drafting_plan, self.repairs, self.head)
        self.intake = Intake(engine, self.blocks, self.repairs, self.drafting, self.max_positions)
        settings = self.settings
        self.admission = Admission(self.blocks, settings.max_batch, settings.cohort_seconds, settings.prefill_tokens)
        self.waiting = self.admission.waiting
        self.pace = self.admission.pace
        self.rows: list[BatchRow] = []
        self.counters = Counters()
        if self.settings.exact:
            prove_exact(self)

    @property
    def inexact(self) -> str | None:
        """Why answers are not batch-invariant; None where they are."""
        return self.runner.inexact

    def warm_up(self) -> None:
        """Decode a short text: libraries load, graphs are captured, and the pace of a single row is timed."""
        self.runner.capture_ahead()
        request = prepare_request(self.engine, [[0, 0]], 4, UNENDING)
        self.submit(request)
        while not self.is_idle:
            started = time.perf_counter()
            for update in self.step():
                if update.error is not None:
                    raise update.error
            seconds = time.perf_counter() - started
        self.counters = Counters()
        self.pace.step, self.pace.lone_layer = 0.0, seconds / self.stack.num_layers
        self._time_rows()

    def _time_rows(self) -> None:
        """Time a step with 1, 2, 4, … rows. All belong to one text, as drafts do."""
        pace, rows, one = self.drafting.pace, 1, 0.0
        while rows <= min(self.settings.draft_rows, self.max_positions):
            needs = from_the_start(self.blocks.needs(self.engine.full_plan, rows, 1))
            if not self.blocks.can_hold(needs):
                break
            slot = self.blocks.enter(needs)
            self.blocks.extend(slot, range(self.stack.num_layers), rows)
            parts = [Part(slot, 0, [0] * rows, self.stack.num_layers, self.engine.full_plan, wanted=rows)]
            times = []
            for _ in range(3):  # the first may include loading
                started = time.perf_counter()
                self.runner.run(parts).logits.argmax(-1).tolist()
                times.append(time.perf_counter() - started)
            self.blocks.leave(slot)
            one = one or min(times)
            pace.takes_to_verify(rows, min(times) / one)
            rows *= 2
        pace.unit = one

    def submit(
        self,
        request: Request,
        plan: Plan | None = None,
        mode: str = "full",
        *,
        logprobs: int | None = None,
        into: Sequence[tuple[Result, Sampler]] | None = None,
    ) -> list[int]:
        """Queue a request and return an id for each of its prompts. `into`: their results and samplers, where the
        caller has created them."""
        rows = self.intake.rows_of(request, plan, mode, self.clock(), logprobs=logprobs, into=into)
        self.waiting.extend(rows)
        return [row.id for row in rows]

    def cancel(self, sequence_id: int) -> bool:
        """Drop a waiting or running sequence; False if it has already ended."""
        for sequence in self.waiting:
            if sequence.id == sequence_id:
                self.waiting.remove(sequence)
                return True
        for sequence in self.rows:
            if sequence.id == sequence_id:
                self._leave(sequence)
                return True
        return False

    @property
    def is_idle(self) -> bool:
        return not self.rows and not self.waiting

    def usage(self) -> Usage:
        return self.blocks.usage([sequence.length for sequence in self.rows])

    def step(self) -> list[Update]:
        """Admit rows, prefill part of the prompts, then run one pass for all decoding rows: each gets a token, a draft,
        or several tokens."""
        self.rows += self.admission.admit(self.rows, self.clock)
        updates: list[Update] = []
        within, apart = self._prompts_to_read()
        for reading in apart:
            updates += self._pass(reading)
        decoding = [row for row in self.rows if not row.in_prompt]
        if self.settings.prompts_first and len(decoding) < len(self.rows):
            decoding = []
        self._draft(decoding, within)
        rows = sorted([*within, *decoding], key=lambda row: -row.pass_depth)
        if rows:
            wide = sum(len(row.next_tokens()) for row in rows)
            drafts = wide - len(rows)
            is_full = not within and rows[-1].pass_depth == self.stack.num_layers
            started = time.perf_counter()
            updates += self._pass(rows)
            seconds = time.perf_counter() - started
            self.pace.saw(seconds)
            if is_full and wide <= self.settings.draft_rows:
                self.drafting.pace.saw_step(wide, seconds, drafts)
        self.counters.steps += 1
        return updates

    def _draft(self, decoding: Sequence[BatchRow], within: Sequence[BatchRow]) -> None:
        """Let lossless rows draft as much as fits into the step."""
        room = self.settings.draft_rows
        if self.runner.graphs is not None:
            room = min(room, self.runner.graphs.rows - sum(row.share for row in within))
        self.drafting.prepare(decoding, room, self.stack.num_layers if within else 0)

    def _prompts_to_read(self) -> tuple[list[BatchRow], list[list[BatchRow]]]:
        """Rows whose prompts are prefilled within the decode step, and those prefilled in separate passes."""
        graphs, budget = self.runner.graphs, self.settings.prefill_tokens
        if graphs is not None and graphs.exact:
            return read_exactly(self.rows, graphs.rows, budget)
        within = [] if graphs is None else read_within_step(self.rows, graphs.rows)
        return within, [] if within else read_in_own_passes(self.rows, budget)

    def _pass(self, rows: Sequence[BatchRow]) -> list[Update]:
        """Run a pass. If it fails, retry it in halves until only the rows that cannot run are left out.

        Retrying is safe: a pass writes keys and values to the same positions, and rows advance only after it.
        """
        try:
            said = self._run(rows)
        except Exception as error:
            self.counters.failed_passes += 1
            if len(rows) > 1:
                logger.warning(
                    "a pass failed; retrying in halves", exc_info=True, extra={"fields": {"rows": len(rows)}}
                )
                half = len(rows) // 2
                return self._pass(rows[:half]) + self._pass(rows[half:])
            return [self._failed(rows[0], error)]
        return self._taken(rows, said)

    def _run(self, rows: Sequence[BatchRow]) -> Said:
        parts: list[Part] = []
        full = 0  # layers that full-depth decoding would run
        layers = self.stack.num_layers
        for row in rows:
            tokens, depth = row.next_tokens(), row.pass_depth
            plan = self.engine.drafting_plan if row.is_drafting else row.plan
            wanted = 1 if row.in_prompt else len(tokens)
            parts.append(Part(row.slot, row.length + row.ahead, tokens, depth, plan, wanted))
            if not row.in_prompt:
                full += layers if row.drafts is None else depth * len(tokens)
        drafts = self.head is not None and any(row.drafts is not None for row in rows)
        said = self.runner.run(
            parts, Ask(states=self.head.placed.states) if drafts and self.head is not None else PLAIN
        )
        if full:
            in_prompts = sum(len(row.next_tokens()) for row in rows if row.in_prompt)  # tokens that run every layer
            self.counters.layers_executed += sum(said.tokens_run) - layers * in_prompts
            self.counters.layers_full += full
            self.counters.layer_passes += said.layers_executed
        return said

    def _taken(self, rows: Sequence[BatchRow], passed: Said) -> list[Update]:
        """Advance the rows, and return the tokens of those whose prompts are prefilled."""
        states = self._states_of(rows, passed)
        speaking: list[tuple[BatchRow, int, range]] = []  # each with its depth and its indices into the pass's logits
        behind = 0
        for row in rows:
            tokens, depth = row.next_tokens(), row.pass_depth
            places = range(behind, behind + (1 if row.in_prompt else len(tokens)))
            behind = places.stop
            if row.in_prompt:
                self.counters.prompt_tokens += len(tokens)
                row.length += len(tokens)
                self._read_along(row, row.prompt[row.length - len(tokens) + 1 : row.length + 1], states)
            elif not row.is_drafting:
                row.length += 1  # plus one for each accepted draft, in `keep`
            if not row.in_prompt:
                speaking.append((row, depth, places))
        if not speaking:
            return []
        said = rows_of(passed.logits, [place for _, _, places in speaking for place in places])
        asked = [(row, row.index + row.ahead + place) for row, _, places in speaking for place in range(len(places))]
        picked = iter(self._picked(asked, said))
        updates, behind = [], 0
        for row, depth, places in speaking:
            tokens_or_errors = [next(picked) for _ in places]
            updates += self._spoken(row, tokens_or_errors, depth, said[behind], states)
            behind += len(places)
        return updates

    def _states_of(self, rows: Sequence[BatchRow], passed: Said) -> dict[int, States]:
        """For each row id, the hidden states that the draft head reads: one per token and layer."""
        if self.head is None or not passed.states:
            return {}
        found, behind = {}, 0
        for row in rows:
            count = len(row.next_tokens())
            if row.drafts is not None and not row.is_drafting:
                found[row.id] = {layer: state[behind : behind + count] for layer, state in passed.states.items()}
            behind += count
        return found

    def _read_along(self, row: BatchRow, tokens: Sequence[int], states: dict[int, States]) -> None:
        """Feed the draft head the tokens that are now final. Each follows a position whose states the pass returned."""
        own = states.get(row.id)
        if self.head is None or own is None or not tokens:
            return
        self.head.verified(row.slot, tokens, own)
        states[row.id] = {layer: state[len(tokens) :] for layer, state in own.items()}

    def _picked(self, asked: Sequence[tuple[BatchRow, int]], logits: torch.Tensor) -> list[int | Exception]:
        """Sample the token at the given index of each row; an exception stands for a row that failed."""
        samplers, indices = [row.sampler for row, _ in asked], [index for _, index in asked]
        together = ROWS_PICKED if self.settings.exact else None
        try:
            return list(pick_tokens(samplers, indices, logits, together=together))
        except Exception:
            tokens: list[int | Exception] = []
            for place in range(len(asked)):
                try:
                    tokens += pick_tokens(
                        [samplers[place]], [indices[place]], logits[place : place + 1], together=together
                    )
                except Exception as error:
                    tokens.append(error)
            return tokens

    def _spoken(
        self,
        row: BatchRow,
        picked: Sequence[int | Exception],
        depth: int,
        logits: torch.Tensor,
        states: dict[int, States],
    ) -> list[Update]:
        """Keep a draft for its verification; otherwise return updates for the accepted tokens."""
        tokens = [token for token in picked if not isinstance(token, Exception)]
        errors = [error for error in picked if isinstance(error, Exception)]
        if errors:
            return [self._failed(row, errors[0])]
        if row.is_drafting and row.drafts is not None:
            row.drafts.tokens += tokens
            row.row.result.layer_passes += depth
            return []
        self.counters.drafted += len(tokens) - 1
        updates: list[Update] = []
        try:
            sources = row.keep(tokens)
            self.counters.accepted += len(sources) - 1
            self._read_along(row, tokens[: len(sources)], states)
            for token, source in zip(tokens, sources, strict=False):
                if row.drafts is not None:
                    row.row.result.draft_depths.append(source)
                updates.append(self._told(row, token, depth, logits))
                if row.row.finished:
                    break
        except Exception as error:  # such as a tokenizer that cannot decode; only this row fails
            updates.append(self._failed(row, error))
        return updates

    def _told(self, row: BatchRow, token: int, depth: int, logits: torch.Tensor) -> Update:
        logprobs = None if row.logprobs is None else logprobs_of(logits, token, row.logprobs)
        if row.reads_its_text:
            row.sampler.record(token, row.index)
        text = row.row.take(token, depth)
        self.counters.tokens += 1
        now, result = self.clock(), row.row.result
        told = Update(
            row.id,
            token,
            depth,
            text,
            draft_depth=result.draft_depths[-1] if row.drafts is not None else None,
            layer_passes=result.layer_passes,
            logprobs=logprobs,
        )
        if row.first_token is None:
            row.first_token = now
        if row.index >= row.new_tokens and not row.row.finished:
            row.row.end("length")
        if row.row.finished:
            text += row.row.finish_text()
            result.seconds, result.prefill_seconds = now - row.submitted, row.first_token - row.submitted
            if self.engine.uses_graphs or self.inexact is None:
                result.exact, result.inexact_because = self.inexact is None, self.inexact
            self._leave(row)
            return replace(told, text=text, finished=True, result=result)
        if row.depth < depth:
            self.blocks.drop(row.slot, row.plan.dropped(row.depth))
            self.blocks.promise(row.slot, row.needs[row.depth])
        return told

    def _failed(self, row: BatchRow, error: Exception) -> Update:
        self.counters.errors += 1
        self._leave(row)
        return Update(row.id, finished=True, error=error)

    def _leave(self, row: BatchRow) -> None:
        if row in self.rows:
            self.rows.remove(row)
            self.blocks.leave(row.slot)
            if self.head is not None:
                self.head.leave(row.slot)


def _refuse_unsupported(engine: Engine) -> None:
    if len({parameter.device for parameter in engine.stack.model.parameters()}) > 1:
        raise UnsupportedModelError("the model is spread over several devices; batched requests need it on one")
    config = engine.stack.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "mrope_section" in str(rope):
        raise UnsupportedModelError(
            f"{type(engine.stack.model).__name__} has multi-axis positions (M-RoPE), which a batch does not support"
        )


def _spare_bytes(device: torch.device) -> int:
    """Half of the free memory, or 2 GiB where the system does not report it."""
    free = free_bytes(device)
    return 2**31 if math.isinf(free) else int(free) // 2
