"""Continuous batching: rows join and leave at every step, each with its own position, plan, settings and seed."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from depthdecay.batching.drafting import BatchDrafting, RowDrafts
from depthdecay.batching.logprobs import Logprobs, logprobs_of
from depthdecay.batching.row import BatchRow
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import MODES
from depthdecay.engine.request import UNENDING, Request, prepare_request
from depthdecay.engine.result import AnswerInProgress, Result
from depthdecay.engine.sampling import Sampler, alike, pick_tokens, rows_of, sequence_keys
from depthdecay.errors import DepthDecayError, UnsupportedModelError
from depthdecay.model.devices import free_bytes
from depthdecay.model.layers import require_eval
from depthdecay.plan.plan import Plan
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Part
from depthdecay.runners.kv_blocks import BLOCK, KVBlocks, Usage, blocks_for

logger = logging.getLogger("depthdecay.batching")

PROMPT_ROWS = 64  # a step of graphs has room for so many tokens of prompts beside a full batch: weights take longer
DEFAULT_POSITIONS = 4096  # for models that set no bound


@dataclass(frozen=True)
class BatchSettings:
    """What an operator decides about a batch."""

    max_batch: int = 32
    prefill_tokens: int = 128  # prompt tokens read between two decoding steps
    cohort_seconds: float = 0.02  # the longest that a request waits for others of its age
    cache_bytes: int | None = None  # for keys and values; None: for max_batch texts, within half of what is free
    max_positions: int | None = None  # longest text, prompt and answer; None: the model's context
    draft_rows: int = 16  # lossless rows draft while a step has no more rows than this, drafts counted

    def __post_init__(self) -> None:
        for name in ("max_batch", "prefill_tokens", "cache_bytes", "max_positions", "draft_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DepthDecayError(f"{name} is {value}; expected a whole number of at least 1")
        if not 0 <= self.cohort_seconds <= 60:
            raise DepthDecayError(f"cohort_seconds is {self.cohort_seconds}; expected seconds from 0 to 60")


@dataclass(frozen=True)
class Update:
    """What a step brought for one sequence."""

    id: int
    token: int | None = None
    depth: int = 0
    text: str = ""
    logprobs: Logprobs | None = None
    finished: bool = False
    result: Result | None = None  # with the last update
    error: Exception | None = None  # its pass failed; there will be no more


@dataclass
class Counters:
    """What ran, counted where it ran."""

    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    layers_executed: int = 0  # layers times rows of decoding passes
    layers_full: int = 0  # the same at full depth; of lossless rows, drafts and all, what they ran
    layer_passes: int = 0  # layers of decoding passes, however many rows each had
    drafted: int = 0  # tokens that verifications judged
    accepted: int = 0
    errors: int = 0  # rows that were given up
    failed_passes: int = 0  # also those whose rows ran when they were repeated in halves


@dataclass
class CohortPace:
    """How long passes take, for the choice of cohorts: seconds of a step, and of one layer with one row."""

    step: float = 0.0
    lone_layer: float = 0.0

    def saw(self, seconds: float) -> None:
        self.step = seconds if not self.step else 0.9 * self.step + 0.1 * seconds


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
        self.clock = clock
        limit = self.stack.context_limit() or DEFAULT_POSITIONS
        self.max_positions = min(limit, self.settings.max_positions or limit)
        shapes = self.stack.kept_shapes()
        a_block = BLOCK * sum(shape.nbytes for shape in shapes)
        useful = self.settings.max_batch * blocks_for(self.max_positions) * a_block
        wanted = min(useful, self.settings.cache_bytes or max(a_block, _spare_bytes(engine.device)))
        if wanted < a_block:
            raise DepthDecayError(
                f"{wanted} bytes for keys and values hold not even one block; expected at least {a_block}"
            )
        self.blocks = KVBlocks.within(shapes, self.settings.max_batch, self.max_positions, wanted)
        self.repairs = engine.repairs.placed(self.stack.examples())
        self.runner = BlockRunner(self.stack, self.blocks, self.repairs)
        if engine.uses_graphs:
            self.runner.use_graphs(engine.compiled, self.settings.max_batch + PROMPT_ROWS)
        self.drafting = BatchDrafting(self.stack, engine.drafting_plan, self.repairs)
        self.waiting: deque[BatchRow] = deque()
        self.rows: list[BatchRow] = []
        self.counters = Counters()
        self.pace = CohortPace()
        self._ids = itertools.count()

    def warm_up(self) -> None:
        """Answer something once: libraries load what they need, graphs are there, and a lone row's pace is known."""
        self.runner.capture_ahead()
        request = prepare_request(self.engine, [[0, 0]], 4, UNENDING)
        self.submit(request)
        while not self.is_idle:
            started = time.perf_counter()
            for update in self.step():
                if update.error is not None:
                    raise update.error
            seconds = time.perf_counter() - started
        self.counters, self.pace = Counters(), CohortPace(lone_layer=seconds / self.stack.num_layers)
        self._time_rows()

    def _time_rows(self) -> None:
        """What a step takes by its number of rows: 1, 2, 4, … of one text, as drafts are."""
        pace, rows, one = self.drafting.pace, 1, 0.0
        while rows <= min(self.settings.draft_rows, self.max_positions):
            needs = _all_of(self.blocks.needs(self.engine.full_plan, rows, 1))
            if not self.blocks.can_hold(needs):
                break
            slot = self.blocks.enter(needs)
            self.blocks.extend(slot, range(self.stack.num_layers), rows)
            parts = [Part(slot, 0, [0] * rows, self.stack.num_layers, self.engine.full_plan, wanted=rows)]
            times = []
            for _ in range(3):  # the first may load something
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
        """Let a request wait for its place: an id for each of its prompts. `into`: their results and
        samplers, where the caller has made them."""
        plan = self._plan_for(plan, mode)
        if request.stopping_criteria:
            raise DepthDecayError("stopping_criteria are not asked within a batch; use Engine.generate with them")
        keys = sequence_keys(request.seed, request.prompts) if request.seed is not None else []
        sequences = []
        for number, prompt in enumerate(request.prompts):
            limit = request.own_limits[number]
            needs = self._needs(prompt, plan, limit)
            if into is not None:
                result, sampler = into[number]
            else:
                result = Result.of(self.stack.num_layers, prompt, request, mode)
                sampler = Sampler(
                    self.stack.model,
                    request.generation_config,
                    torch.tensor([prompt], device=self.engine.device),
                    logits_processor=request.logits_processor,
                    keys=keys[number : number + 1],
                    max_new_tokens=limit,
                )
            row = AnswerInProgress(result, self.engine.tokenizer, request)
            # What looks at the text so far, or is told of every token, goes token by token.
            can_draft = logprobs is None and alike(sampler) is not None
            sequences.append(
                BatchRow(
                    id=next(self._ids),
                    prompt=prompt,
                    plan=plan,
                    row=row,
                    sampler=sampler,
                    new_tokens=limit,
                    logprobs=logprobs,
                    depths=plan.depths(limit),
                    needs=needs,
                    submitted=self.clock(),
                    drafts=RowDrafts(prompt, request, can_draft, self.drafting.found) if mode == "lossless" else None,
                )
            )
        self.waiting.extend(sequences)
        return [sequence.id for sequence in sequences]

    def _plan_for(self, plan: Plan | None, mode: str) -> Plan:
        if mode not in MODES:
            raise DepthDecayError(f"unknown mode '{mode}'; choose one of {', '.join(MODES)}")
        if mode != "decay":
            return self.engine.full_plan  # every layer, so nested with any ladder
        plan = plan or self.engine.plan
        if plan is None:
            raise DepthDecayError("mode 'decay' needs a plan; Engine(model, tokenizer, plan) takes one")
        served = self.engine.drafting_plan
        if plan.ladder.num_layers != served.num_layers or not _nested(plan, served):
            raise DepthDecayError(
                "the plan drops layers in another order than the served one; one batch has one ladder"
            )
        if self.repairs.at_depth:
            self.repairs.check(plan, self.stack.hidden_size)
        return plan

    def _needs(self, prompt: Sequence[int], plan: Plan, new_tokens: int) -> dict[int, list[int]]:
        length = len(prompt) + new_tokens
        if length > self.max_positions:
            raise DepthDecayError(
                f"the prompt has {len(prompt)} tokens and the answer up to {new_tokens}, but texts here have at most "
                f"{self.max_positions}; ask for fewer tokens"
            )
        needs = self.blocks.needs(plan, len(prompt), new_tokens)
        if not self.blocks.can_ever_hold(_all_of(needs)):
            raise DepthDecayError(
                f"a prompt of {len(prompt)} tokens with an answer of {new_tokens} needs more keys and values than this "
                "server has room for; ask for fewer tokens"
            )
        return needs

    def cancel(self, sequence_id: int) -> bool:
        """Forget a sequence, wherever it is; False where it has ended already."""
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
        """Admit, read a piece of the prompts, then one pass for all that decode: a token each, a draft, or several."""
        self._admit()
        updates: list[Update] = []
        within = self._within_step()
        if not within:
            reading = self._chunk()
            if reading:
                updates += self._pass(reading)
        decoding = [row for row in self.rows if not row.in_prompt]
        self._draft(decoding, within)
        rows = sorted([*within, *decoding], key=lambda row: -row.pass_depth)
        if rows:
            wide = sum(len(row.next_tokens()) for row in rows)
            is_full = not within and rows[-1].pass_depth == self.stack.num_layers
            started = time.perf_counter()
            updates += self._pass(rows)
            seconds = time.perf_counter() - started
            self.pace.saw(seconds)
            if is_full and wide <= self.settings.draft_rows:
                self.drafting.pace.saw_step(wide, seconds)
        self.counters.steps += 1
        return updates

    def _admit(self) -> None:
        """First come, first served: one that is too big for now holds up those behind it, so it is never starved."""
        if self._waits_for_cohort():
            return
        while self.waiting and self.blocks.can_hold(_all_of(self.waiting[0].needs)):
            sequence = self.waiting.popleft()
            sequence.slot = self.blocks.enter(_all_of(sequence.needs))
            self.rows.append(sequence)

    def _waits_for_cohort(self) -> bool:
        """Whether new rows should wait for others of their age.

        A new row makes layers run that the batch has dropped. One that comes d seconds later keeps them running
        for d longer; both together would not. So waiting saves every row the share of its time that those layers take,
        and costs each waiting row all of it. Once more wait than that, or the first has waited long enough, all enter.
        """
        if not self.rows or not self.waiting or not self.pace.step:
            return False
        room = self.settings.max_batch - len(self.rows)
        if len(self.waiting) >= room or self.clock() - self.waiting[0].submitted >= self.settings.cohort_seconds:
            return False
        idle = self.stack.num_layers - max(row.depth for row in self.rows)
        share = min(1.0, idle * self.pace.lone_layer / self.pace.step)
        return share * len(self.rows) > len(self.waiting)

    def _draft(self, decoding: Sequence[BatchRow], within: Sequence[BatchRow]) -> None:
        """Let lossless rows draft as far as the step has room for it."""
        room = self.settings.draft_rows
        if self.runner.graphs is not None:
            room = min(room, self.runner.graphs.rows - sum(row.share for row in within))
        self.drafting.prepare(decoding, room, self.stack.num_layers if within else 0)

    def _within_step(self) -> list[BatchRow]:
        """Rows whose prompts are read on within the step, where that runs as graphs and they are not much to read."""
        reading = [row for row in self.rows if row.in_prompt]
        rest = sum(len(row.prompt) - row.length for row in reading)
        if self.runner.graphs is None or rest > 4 * PROMPT_ROWS:  # a pass of their own is faster then
            return []
        room = self.runner.graphs.rows - (len(self.rows) - len(reading))
        chosen = []
        for row in reading:
            row.share = min(len(row.prompt) - row.length, room)
            room -= row.share
            if row.share:
                chosen.append(row)
        return chosen

    def _chunk(self) -> list[BatchRow]:
        """Rows whose prompts are read on now: of similar length, since short ones are filled up to the longest."""
        reading = [row for row in self.rows if row.in_prompt]
        if not reading:
            return []
        budget = self.settings.prefill_tokens
        first = min(len(reading[0].prompt) - reading[0].length, budget)  # the oldest is always among them
        chosen, longest = [reading[0]], first
        others = ((min(len(row.prompt) - row.length, budget), row) for row in reading[1:])
        for count, row in sorted(others, key=lambda pair: abs(pair[0] - first)):
            if max(longest, count) * (len(chosen) + 1) > budget:
                break
            chosen.append(row)
            longest = max(longest, count)
        for row in chosen:
            row.share = budget
        return chosen

    def _pass(self, rows: Sequence[BatchRow]) -> list[Update]:
        """Run a pass; where it fails, halves of it, until only the rows that cannot run are left out.

        A pass may be repeated: it writes keys and values in the same places, and rows move on only behind it.
        """
        try:
            logits = self._run(rows)
        except Exception as error:
            self.counters.failed_passes += 1
            if len(rows) > 1:
                logger.warning(
                    "a pass failed; repeated in halves", exc_info=True, extra={"fields": {"rows": len(rows)}}
                )
                half = len(rows) // 2
                return self._pass(rows[:half]) + self._pass(rows[half:])
            return [self._failed(rows[0], error)]
        return self._taken(rows, logits)

    def _run(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        parts: list[Part] = []
        full = 0  # layers that decoding at full depth would run
        layers = self.stack.num_layers
        for row in rows:
            tokens, depth = row.next_tokens(), row.pass_depth
            plan = self.engine.drafting_plan if row.is_drafting else row.plan
            wanted = 1 if row.in_prompt else len(tokens)
            parts.append(Part(row.slot, row.length + row.ahead, tokens, depth, plan, wanted))
            if not row.in_prompt:
                full += layers if row.drafts is None else depth * len(tokens)
        said = self.runner.run(parts)
        if full:
            in_prompts = sum(len(row.next_tokens()) for row in rows if row.in_prompt)  # tokens that run every layer
            self.counters.layers_executed += sum(said.tokens_run) - layers * in_prompts
            self.counters.layers_full += full
            self.counters.layer_passes += said.layers_executed
        return said.logits

    def _taken(self, rows: Sequence[BatchRow], logits: torch.Tensor) -> list[Update]:
        """Move the rows on, and hand out the tokens of those that have read their prompts."""
        speaking: list[tuple[BatchRow, int, range]] = []  # with the depth and the places of what the pass said of each
        behind = 0
        for row in rows:
            tokens, depth = row.next_tokens(), row.pass_depth
            places = range(behind, behind + (1 if row.in_prompt else len(tokens)))
            behind = places.stop
            if row.in_prompt:
                self.counters.prompt_tokens += len(tokens)
                row.length += len(tokens)
            elif not row.is_drafting:
                row.length += 1  # and by every draft that turns out right
            if not row.in_prompt:
                speaking.append((row, depth, places))
        if not speaking:
            return []
        said = rows_of(logits, [place for _, _, places in speaking for place in places])
        asked = [(row, row.index + row.ahead + place) for row, _, places in speaking for place in range(len(places))]
        picked = iter(self._picked(asked, said))
        updates, behind = [], 0
        for row, depth, places in speaking:
            tokens_or_errors = [next(picked) for _ in places]
            updates += self._spoken(row, tokens_or_errors, depth, said[behind])
            behind += len(places)
        return updates

    def _picked(self, asked: Sequence[tuple[BatchRow, int]], logits: torch.Tensor) -> list[int | Exception]:
        """The token with this index of each row."""
        samplers, indices = [row.sampler for row, _ in asked], [index for _, index in asked]
        try:
            return list(pick_tokens(samplers, indices, logits))
        except Exception:
            tokens: list[int | Exception] = []
            for place in range(len(asked)):
                try:
                    tokens += pick_tokens([samplers[place]], [indices[place]], logits[place : place + 1])
                except Exception as error:
                    tokens.append(error)
            return tokens

    def _spoken(
        self, row: BatchRow, picked: Sequence[int | Exception], depth: int, logits: torch.Tensor
    ) -> list[Update]:
        """A draft is kept for its verification; of all else the tokens that are right are told."""
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
            for token, source in zip(tokens, sources, strict=False):
                if row.drafts is not None:
                    row.row.result.draft_depths.append(source)
                updates.append(self._told(row, token, depth, logits))
                if row.row.finished:
                    break
        except Exception as error:  # a tokenizer that cannot decode, for one: this row's own trouble
            updates.append(self._failed(row, error))
        return updates

    def _told(self, row: BatchRow, token: int, depth: int, logits: torch.Tensor) -> Update:
        logprobs = None if row.logprobs is None else logprobs_of(logits, token, row.logprobs)
        if row.reads_its_text:
            row.sampler.record(token, row.index)
        text = row.row.take(token, depth)
        self.counters.tokens += 1
        now, result = self.clock(), row.row.result
        if row.first_token is None:
            row.first_token = now
        if row.index >= row.new_tokens and not row.row.finished:
            row.row.end("length")
        if row.row.finished:
            text += row.row.finish_text()
            result.seconds, result.prefill_seconds = now - row.submitted, row.first_token - row.submitted
            self._leave(row)
            return Update(row.id, token, depth, text, logprobs, finished=True, result=result)
        if row.depth < depth:
            self.blocks.drop(row.slot, row.plan.dropped(row.depth))
            self.blocks.promise(row.slot, row.needs[row.depth])
        return Update(row.id, token, depth, text, logprobs)

    def _failed(self, row: BatchRow, error: Exception) -> Update:
        self.counters.errors += 1
        self._leave(row)
        return Update(row.id, finished=True, error=error)

    def _leave(self, row: BatchRow) -> None:
        if row in self.rows:
            self.rows.remove(row)
            self.blocks.leave(row.slot)


def _all_of(needs: dict[int, list[int]]) -> list[int]:
    """From the first token on."""
    return next(iter(needs.values()))


def _nested(plan: Plan, served: Plan) -> bool:
    return all(ours == theirs for ours, theirs in zip(plan.ladder.drop_order, served.ladder.drop_order, strict=False))


def _refuse_unsupported(engine: Engine) -> None:
    if len({parameter.device for parameter in engine.stack.model.parameters()}) > 1:
        raise UnsupportedModelError("the model is spread over several devices; a batch of requests needs it on one")
    config = engine.stack.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "mrope_section" in str(rope):
        raise UnsupportedModelError(
            f"{type(engine.stack.model).__name__} has positions of several axes, which rows of a batch cannot mix"
        )


def _spare_bytes(device: torch.device) -> int:
    """Half of what is free; where the system does not say, 2 GiB."""
    free = free_bytes(device)
    return 2**31 if math.isinf(free) else int(free) // 2
