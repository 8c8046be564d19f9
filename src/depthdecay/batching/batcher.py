"""Continuous batching: rows join and leave at every step, each with its own position, plan, settings and seed."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..devices import free_bytes
from ..engine import MODES, Engine, Result, Row
from ..errors import DepthDecayError, UnsupportedModelError
from ..plan import Plan
from ..request import PLAIN_GREEDY, Request, prepare_request
from ..sampling import Sampler, sequence_keys
from ..stack import require_eval
from .blocks import Blocks, Usage, blocks_for
from .picking import Logprobs, logprobs_of, pick_tokens, rows_of
from .ragged import Part, RaggedCache, run_ragged, shapes_of
from .steps import PROMPT_ROWS, GraphSteps, NotCapturable

DEFAULT_POSITIONS = 4096  # for models that set no bound


@dataclass(frozen=True)
class BatchSettings:
    """What an operator decides about a batch."""

    max_batch: int = 32
    prefill_tokens: int = 128  # prompt tokens read between two decoding steps
    cohort_seconds: float = 0.02  # the longest that a request waits for others of its age
    cache_bytes: int | None = None  # for keys and values; None: for max_batch texts, within half of what is free
    max_positions: int | None = None  # longest text, prompt and answer; None: the model's context

    def __post_init__(self) -> None:
        for name in ("max_batch", "prefill_tokens", "cache_bytes", "max_positions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DepthDecayError(f"{name} is {value}; expected a whole number of at least 1")
        if not 0 <= self.cohort_seconds <= 60:
            raise DepthDecayError(f"cohort_seconds is {self.cohort_seconds}; expected seconds from 0 to 60")


@dataclass(eq=False)
class Entry:
    """One answer in the making. `row` takes its tokens; `slot` is its place among the blocks once it was admitted."""

    id: int
    prompt: list[int]
    plan: Plan
    row: Row
    sampler: Sampler
    new_tokens: int
    logprobs: int | None
    depths: tuple[int, ...]  # of every token
    needs: dict[int, list[int]]  # blocks of each kind, from where it comes to a depth to its end
    submitted: float
    slot: int = -1
    length: int = 0  # positions read so far
    share: int = 0  # of its prompt's tokens, how many its next pass reads at most
    first_token: float | None = None

    @property
    def index(self) -> int:
        """Of the token that its next pass produces."""
        return len(self.row.result.token_ids)

    @property
    def depth(self) -> int:
        """Of its next pass; the prompt's are always full."""
        return self.plan.num_layers if self.in_prompt else self.depths[self.index]

    @property
    def in_prompt(self) -> bool:
        return self.length < len(self.prompt)

    def next_tokens(self) -> list[int]:
        if self.in_prompt:
            return self.prompt[self.length : self.length + self.share]
        return self.row.result.token_ids[-1:]


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
    layers_full: int = 0  # the same at full depth
    layer_passes: int = 0  # layers of decoding passes, however many rows each had
    errors: int = 0


@dataclass
class Pace:
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
        self.stack = engine.stack.for_batches()
        self.settings = settings or BatchSettings()
        self.clock = clock
        limit = self.stack.context_limit() or DEFAULT_POSITIONS
        self.max_positions = min(limit, self.settings.max_positions or limit)
        shapes = shapes_of(self.stack)
        a_block = sum(shape.block_bytes for shape in shapes)
        useful = self.settings.max_batch * blocks_for(self.max_positions) * a_block
        wanted = min(useful, self.settings.cache_bytes or max(a_block, _spare_bytes(engine.device)))
        if wanted < a_block:
            raise DepthDecayError(
                f"{wanted} bytes for keys and values hold not even one block; expected at least {a_block}"
            )
        self.blocks = Blocks(shapes, self.settings.max_batch, self.max_positions, wanted)
        self.cache = RaggedCache(self.blocks, self.stack.windows)
        self.repairs = engine.repairs.placed(self.stack.examples())
        self.steps: GraphSteps | None = None  # on CUDA, until something cannot be captured
        if engine.uses_graphs:
            self.steps = self._new_steps(compile=engine.compiled is not None)
        self._is_compared = False  # graphs have been held against an eager pass
        self.compiled_rows = self._new_compiled_rows()
        self.waiting: deque[Entry] = deque()
        self.rows: list[Entry] = []
        self.counters = Counters()
        self.pace = Pace()
        self._ids = itertools.count()

    def _new_compiled_rows(self) -> Any:
        """On a CPU, where the engine's passes are compiled code."""
        if self.engine.uses_graphs or self.engine.device.type != "cpu":
            return None
        from ..cpu.rows import CompiledRows

        return CompiledRows.of(self.engine.stack, self.blocks, self.repairs)

    def _new_steps(self, compile: bool) -> GraphSteps:
        return GraphSteps(self.stack, self.blocks, self.repairs, self.settings.max_batch, compile)

    def warm_up(self) -> None:
        """Answer something once: libraries load what they need, graphs are there, and a lone row's pace is known."""
        if self.steps is not None:
            with self._or_eagerly():
                self.steps.capture_layers()
        request = prepare_request(self.engine, [[0, 0]], 4, {**PLAIN_GREEDY, "eos_token_id": -1, "stop": ()})
        self.submit(request)
        while not self.is_idle:
            started = time.perf_counter()
            for update in self.step():
                if update.error is not None:
                    raise update.error
            seconds = time.perf_counter() - started
        self.counters, self.pace = Counters(), Pace(lone_layer=seconds / self.stack.num_layers)

    def submit(
        self, request: Request, plan: Plan | None = None, mode: str = "full", *, logprobs: int | None = None
    ) -> list[int]:
        """Let a request wait for its place: an id for each of its prompts. Mode lossless runs at full depth here."""
        plan = self._plan_for(plan, mode)
        if request.stopping_criteria:
            raise DepthDecayError("stopping_criteria are not asked within a batch; use Engine.generate with them")
        keys = sequence_keys(request.seed, request.prompts) if request.seed is not None else []
        sequences = []
        for number, prompt in enumerate(request.prompts):
            needs = self._needs(prompt, plan, request.max_new_tokens)
            result = Result(
                num_layers=self.stack.num_layers,
                prompt_tokens=len(prompt),
                mode="decay" if mode == "decay" else "full",
                seed=request.seed,
            )
            sampler = Sampler(
                self.stack.model,
                request.generation_config,
                torch.tensor([prompt], device=self.engine.device),
                logits_processor=request.logits_processor,
                keys=keys[number : number + 1],
                max_new_tokens=request.max_new_tokens,
            )
            row = Row(result, self.engine.tokenizer, request)
            sequences.append(
                Entry(
                    id=next(self._ids),
                    prompt=prompt,
                    plan=plan,
                    row=row,
                    sampler=sampler,
                    new_tokens=request.max_new_tokens,
                    logprobs=logprobs,
                    depths=plan.depths(request.max_new_tokens),
                    needs=needs,
                    submitted=self.clock(),
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
        """Admit, read a piece of the prompts, then one token for every row that decodes."""
        self._admit()
        updates: list[Update] = []
        within = self._within_step()
        if not within:
            reading = self._chunk()
            if reading:
                updates += self._pass(reading)
        rows = sorted([*within, *(row for row in self.rows if not row.in_prompt)], key=lambda row: -row.depth)
        if rows:
            started = time.perf_counter()
            updates += self._pass(rows)
            self.pace.saw(time.perf_counter() - started)
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

    def _within_step(self) -> list[Entry]:
        """Rows whose prompts are read on within the step, where that runs as graphs and they are not much to read."""
        reading = [row for row in self.rows if row.in_prompt]
        rest = sum(len(row.prompt) - row.length for row in reading)
        if self.steps is None or rest > 4 * PROMPT_ROWS:  # a pass of their own is faster then
            return []
        room = self.steps.rows - (len(self.rows) - len(reading))
        chosen = []
        for row in reading:
            row.share = min(len(row.prompt) - row.length, room)
            room -= row.share
            if row.share:
                chosen.append(row)
        return chosen

    def _chunk(self) -> list[Entry]:
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

    def _pass(self, rows: Sequence[Entry]) -> list[Update]:
        """Run a pass; where it fails, halves of it, until only the rows that cannot run are left out.

        A pass may be repeated: it writes keys and values in the same places, and rows move on only behind it.
        """
        try:
            logits = self._run(rows)
        except Exception as error:
            if len(rows) > 1:
                half = len(rows) // 2
                return self._pass(rows[:half]) + self._pass(rows[half:])
            return [self._failed(rows[0], error)]
        return self._taken(rows, logits)

    def _run(self, rows: Sequence[Entry]) -> torch.Tensor:
        parts = []
        for row in rows:
            tokens = row.next_tokens()
            end = row.length + len(tokens)
            if blocks_for(end) > blocks_for(row.length):
                self.blocks.extend(row.slot, row.plan.layers(row.depth), end)
            parts.append(Part(row.slot, row.length, tokens, row.depth, row.plan))
        logits, counts = self._compiled_logits(parts) or self._graph_logits(parts) or self._eager_logits(parts)
        decoding = sum(not row.in_prompt for row in rows)
        if decoding:
            in_prompts = sum(len(part.tokens) for part in parts) - decoding  # tokens that run every layer
            layers = self.stack.num_layers
            self.counters.layers_executed += sum(counts) - layers * in_prompts
            self.counters.layers_full += layers * decoding
            self.counters.layer_passes += sum(count > 0 for count in counts)
        return logits

    def _eager_logits(self, parts: Sequence[Part]) -> tuple[torch.Tensor, list[int]]:
        logits, ragged = run_ragged(self.stack, self.cache, parts, self.repairs)
        return logits, ragged.tokens_run

    def _compiled_logits(self, parts: Sequence[Part]) -> tuple[torch.Tensor, list[int]] | None:
        if self.compiled_rows is None or not self.compiled_rows.has_room(sum(len(part.tokens) for part in parts)):
            return None
        found: tuple[torch.Tensor, list[int]] = self.compiled_rows.run(parts)
        return found

    def _graph_logits(self, parts: Sequence[Part]) -> tuple[torch.Tensor, list[int]] | None:
        """None where the pass has to run eagerly: there are no graphs, or it has too many tokens for them."""
        if self.steps is None or not self.steps.has_room(sum(len(part.tokens) for part in parts)):
            return None
        with self._or_eagerly():
            logits, counts = self.steps.run(parts)
            if not self._is_compared:
                expected = self._eager_logits(parts)[0].float()
                error = float((logits.float() - expected).norm() / expected.norm())
                if not error <= (1e-2 if logits.dtype == torch.float32 else 0.15):
                    raise NotCapturable(f"its graphs differ from an eager pass by {error:.3g} of the logits")
                self._is_compared = True
            return logits, counts
        return None

    @contextlib.contextmanager
    def _or_eagerly(self) -> Iterator[None]:
        """What cannot be compiled runs as it is from now on, and what cannot be captured eagerly; a warning says so."""
        try:
            yield
        except NotCapturable as error:
            if self.steps is not None and self.steps.is_compiled:
                warnings.warn(f"a batch's layers could not be compiled and run as they are: {error}", stacklevel=3)
                self.steps = self._new_steps(compile=False)
                self.blocks.extended.update(row.slot for row in self.rows)
                return
            warnings.warn(f"this model's batches cannot run as CUDA graphs and run eagerly: {error}", stacklevel=3)
            self.steps = None

    def _taken(self, rows: Sequence[Entry], logits: torch.Tensor) -> list[Update]:
        """Move the rows on, and hand out the tokens of those that have read their prompts."""
        depths = [row.depth for row in rows]
        for row in rows:
            count = len(row.next_tokens())
            self.counters.prompt_tokens += count if row.in_prompt else 0
            row.length += count
        ready = [place for place, row in enumerate(rows) if not row.in_prompt]
        if not ready:
            return []
        speaking = [rows[place] for place in ready]
        said = rows_of(logits, ready)
        tokens = self._picked(speaking, said)
        updates = []
        for place, row, token in zip(range(len(ready)), speaking, tokens, strict=True):
            if isinstance(token, Exception):
                updates.append(self._failed(row, token))
                continue
            try:
                updates.append(self._told(row, token, depths[ready[place]], said[place]))
            except Exception as error:  # a tokenizer that cannot decode, for one: this row's own trouble
                updates.append(self._failed(row, error))
        return updates

    def _picked(self, rows: Sequence[Entry], logits: torch.Tensor) -> list[int | Exception]:
        try:
            return list(pick_tokens([row.sampler for row in rows], [row.index for row in rows], logits))
        except Exception:
            tokens: list[int | Exception] = []
            for place, row in enumerate(rows):
                try:
                    tokens += pick_tokens([row.sampler], [row.index], logits[place : place + 1])
                except Exception as error:
                    tokens.append(error)
            return tokens

    def _told(self, row: Entry, token: int, depth: int, logits: torch.Tensor) -> Update:
        logprobs = None if row.logprobs is None else logprobs_of(logits, token, row.logprobs)
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

    def _failed(self, row: Entry, error: Exception) -> Update:
        self.counters.errors += 1
        self._leave(row)
        return Update(row.id, finished=True, error=error)

    def _leave(self, row: Entry) -> None:
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
    config = engine.stack.model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "mrope_section" in str(rope):
        raise UnsupportedModelError(
            f"{type(engine.stack.model).__name__} has positions of several axes, which rows of a batch cannot mix"
        )


def _spare_bytes(device: torch.device) -> int:
    """Half of what is free; where the system does not say, 2 GiB."""
    free = free_bytes(device)
    return 2**31 if math.isinf(free) else int(free) // 2
