"""The fast path: prefill, decode by plan, stream text. `Engine(model, tokenizer, plan).generate(prompts)`."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .cache import PlannedCache, room_for
from .cpu.stack import open_stack
from .decoding import Decoder, EagerDecoder, Prompt, rooms
from .errors import DepthDecayError
from .graphs import CompiledLayers, GraphDecoder
from .lossless import LosslessDecoder, LosslessRun, drafting_for, drafting_plan
from .lossless_graphs import LosslessGraphDecoder
from .mailbox import Mailbox
from .origin import Origin
from .plan import Plan
from .plan_check import check_plan
from .repairs import Repairs, repairs_for
from .request import Request, prepare_request
from .sampling import Sampler, sequence_keys
from .short_head import ShortHead
from .stack import primary_device, require_eval
from .text import TextStream
from .windows import LONGEST, Drafting

MODES = ("full", "decay", "lossless")


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
    # In lossless mode: what proposed each token (a depth; 0: found in the text before; None: the full pass itself),
    # and what it took. `depths` are those of the passes that decided, all of them full.
    draft_depths: list[int | None] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0  # full-depth passes over one token or several
    layer_passes: int = 0  # layers of all passes that this row took part in, drafts included
    cache_bytes: int = 0  # keys and values of the whole batch
    cache_bytes_saved: int = 0  # against the same room in every layer

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


class Row:
    """One sequence of a batch on the host's side."""

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
        rest = self.text.finish()
        self.result.text = self.text.text
        return rest


class Engine:
    """Decodes with a model by a plan. Without a plan every token runs all layers.

    The model is changed only while a call runs, and left exactly as it was found. On a CPU `quantize` (none, int8,
    int4) says how its weights are read; `origin`, which `load` gives, keeps what was rounded for the next start, and
    `fast=False` leaves passes to the model's own forward.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        plan: Plan | None = None,
        *,
        compile: bool = False,
        graphs: bool | None = None,
        allow_other_weights: bool = False,
        repairs: Repairs | None = None,
        drafter: Plan | None = None,
        quantize: str | None = None,
        origin: Origin | None = None,
        fast: bool | None = None,
    ) -> None:
        self.stack = open_stack(model, quantize=quantize, origin=origin, fast=fast)
        require_eval(self.stack.model)
        self.tokenizer = tokenizer
        self.full_plan = Plan.full(self.stack.num_layers)
        self.plan = plan
        drafter = plan or drafter
        if drafter is not None:
            check_plan(drafter, self.stack.model, allow_other_weights=allow_other_weights)
        self.repairs = repairs_for(self.stack, drafter, repairs)
        self.device = primary_device(self.stack.model)
        self.uses_graphs = self._can_use_graphs() if graphs is None else graphs
        if self.uses_graphs and self.device.type != "cuda":
            raise DepthDecayError(f"CUDA graphs need a CUDA device, but the model is on {self.device}")
        if compile and not self.uses_graphs:
            warnings.warn(f"layers are compiled on CUDA only; on {self.device} they run eagerly", stacklevel=2)
        self.compiled = CompiledLayers() if compile and self.uses_graphs else None
        self._kept: _KeptDecoder | None = None
        self._drafting: Drafting | None = None
        self._short_head: ShortHead | None = None
        self._kept_lossless: LosslessGraphDecoder | None = None
        self.drafting_plan = drafter or drafting_plan(self.stack.num_layers)
        self._lock = threading.Lock()

    def _can_use_graphs(self) -> bool:
        spread = len(set((getattr(self.stack.model, "hf_device_map", None) or {}).values())) > 1
        return self.device.type == "cuda" and not spread

    def generate(
        self,
        prompts: str | Sequence[Any],
        max_new_tokens: int | None = None,
        *,
        mode: str | None = None,
        **settings: Any,
    ) -> list[Result]:
        """Answer all prompts in one lock-step batch; a Result each, in order.

        A prompt is a string (a chat model's template is put around it unless chat=False), a list of messages, or a list
        of token ids. Settings, where not given, come from the model's generation_config: do_sample, temperature, top_k,
        top_p, min_p, repetition_penalty, eos_token_id, …; also seed, stop, chat, logits_processor, stopping_criteria.
        """
        request = prepare_request(self, [prompts] if isinstance(prompts, str) else prompts, max_new_tokens, settings)
        results = self._new_results(request, self._mode(mode, request))
        for _ in self._decoded(request, results):
            pass
        return results

    def stream(
        self, prompt: Any, max_new_tokens: int | None = None, *, mode: str | None = None, **settings: Any
    ) -> Stream:
        """Answer one prompt piece by piece: no piece holds half a character or a part of a stop string."""
        if self.tokenizer is None:
            raise DepthDecayError("streaming text needs a tokenizer; Engine(model, tokenizer, plan) takes one")
        request = prepare_request(self, [prompt], max_new_tokens, settings)
        results = self._new_results(request, self._mode(mode, request))
        pieces = (pieces[0] for pieces in self._decoded(request, results) if pieces[0])
        return Stream(pieces, results[0])

    def _decoded(self, request: Request, results: list[Result]) -> Iterator[list[Piece]]:
        self.repairs = self.repairs.placed(self.stack.examples())  # the model may have been moved
        return (self._decode_lossless if results[0].mode == "lossless" else self._decode)(request, results)

    @property
    def step_mode(self) -> str:
        """Token by token: by the plan, or where there is none at full depth."""
        return "full" if self.plan is None else "decay"

    def _mode(self, mode: str | None, request: Request) -> str:
        """Where none is given: by the plan, and without one the full model's answer, in windows where they can pay."""
        if mode is None:
            mode = "lossless" if self.plan is None and self._suits_windows(request) else self.step_mode
        if mode not in MODES:
            raise DepthDecayError(f"unknown mode '{mode}'; choose one of {', '.join(MODES)}")
        if mode == "decay" and self.plan is None:
            raise DepthDecayError("mode 'decay' needs a plan; Engine(model, tokenizer, plan) takes one")
        return mode

    def _suits_windows(self, request: Request) -> bool:
        """One row, since rows share windows; on CUDA greedy, since only then the device goes on by itself."""
        if len(request.prompts) > 1 or request.stopping_criteria:
            return False
        return not (self.uses_graphs and request.generation_config.do_sample)

    def _new_results(self, request: Request, mode: str) -> list[Result]:
        layers = self.stack.num_layers
        return [Result(num_layers=layers, prompt_tokens=len(p), mode=mode, seed=request.seed) for p in request.prompts]

    def _decode(self, request: Request, results: list[Result]) -> Iterator[list[Piece]]:
        """The story of one batch: prefill, then steps until every row has ended; yields each step's pieces of text."""
        started = time.perf_counter()
        require_eval(self.stack.model)
        plan = self.full_plan if self.plan is None or results[0].mode == "full" else self.plan
        prompt = Prompt.pad(request.prompts, request.pad_token_id, self.device)
        rows = [Row(result, self.tokenizer, request) for result in results]
        with self._borrowed_decoder(plan, prompt, request.max_new_tokens) as decoder:
            # Gradients are off within each pass only: a consumer's code runs between them.
            with torch.no_grad():
                sampler = self._sampler(request, prompt)
                depth = decoder.prefill(prompt)
            mailbox = Mailbox(self.device, len(rows))
            sent: list[int] = []  # depth of every step that was started
            for index in range(request.max_new_tokens):
                with torch.no_grad():
                    if index > 0:
                        depth = decoder.step(index)
                    stopped = self._pick(decoder, sampler, request, index)
                    mailbox.post(decoder.tokens)
                sent.append(depth)
                if index == 0:
                    mailbox.wait()
                    prefill_seconds = time.perf_counter() - started
                is_last = index == request.max_new_tokens - 1
                for number, tokens in mailbox.collect(everything=is_last or stopped is not None):
                    taken = zip(rows, tokens, strict=True)
                    yield [Piece(row.take(token, sent[number]), sent[number]) for row, token in taken]
                for row, stop in zip(rows, stopped or [], strict=stopped is not None):
                    if stop and not row.finished:
                        row.end("stop")
                if all(row.finished for row in rows):
                    break
            cache = decoder.cache
        # Steps that were started before the host knew that all rows had ended.
        overrun = sum(sent[mailbox.collected :])
        rest = [Piece(row.finish_text(), row.result.depths[-1]) for row in rows]
        for result in results:
            result.overrun_layers += overrun
            result.seconds = time.perf_counter() - started
            result.prefill_seconds = prefill_seconds
            result.cache_bytes = cache.nbytes
            result.cache_bytes_saved = cache.nbytes_uniform - cache.nbytes
        if any(rest):
            yield rest

    def _decode_lossless(self, request: Request, results: list[Result]) -> Iterator[list[Piece]]:
        """The same story in windows: each yields some tokens for every row, all of them the full model's."""
        started = time.perf_counter()
        require_eval(self.stack.model)
        if request.stopping_criteria:
            raise DepthDecayError("stopping_criteria look at one token at a time; use mode 'full' or 'decay' with them")
        plan, layers = self.drafting_plan, self.stack.num_layers
        prompt = Prompt.pad(request.prompts, request.pad_token_id, self.device)
        rows = [Row(result, self.tokenizer, request) for result in results]
        drafting = self._prepared_drafting()
        with self._borrowed_lossless_decoder(plan, prompt, request.max_new_tokens, drafting) as decoder:
            sampler = self._sampler(request, prompt)
            run = LosslessRun(
                decoder,
                prompt,
                request.prompts,
                sampler,
                drafting=drafting,
                lookup=request.lookup,
                window=request.window,
            )
            for number, got in enumerate(run.windows(request.max_new_tokens)):
                if number == 0:
                    prefill_seconds = time.perf_counter() - started
                pieces = [""] * len(rows)
                for index, (row, tokens) in enumerate(zip(rows, got, strict=True)):
                    for place, token in enumerate(tokens):
                        if not row.finished:
                            pieces[index] += row.take(token, layers)
                            row.result.draft_depths.append(run.source_of(index, place))
                    run.active[index] &= not row.finished
                yield [Piece(piece, layers) for piece in pieces]
        rest = [Piece(row.finish_text(), layers) for row in rows]
        for index, result in enumerate(results):
            result.drafted, result.accepted = run.drafted[index], run.accepted[index]
            result.verifications, result.layer_passes = run.verifications[index], run.layer_passes[index]
            result.seconds = time.perf_counter() - started
            result.prefill_seconds = prefill_seconds
            result.cache_bytes = decoder.cache.nbytes
        if any(rest):
            yield rest

    def _prepared_drafting(self) -> Drafting:
        """What this engine has learnt about drafting, and the drafts' own output matrix."""
        with self._lock:
            if self._drafting is None or (self._short_head is not None and not self._short_head.is_for(self.stack)):
                self._short_head = ShortHead.of(self.stack, self.repairs.vocabulary)
                self._kept_lossless = None
                self._drafting = drafting_for(self.stack, self.drafting_plan, self.repairs, self._short_head)
            return self._drafting

    @contextlib.contextmanager
    def _borrowed_lossless_decoder(
        self, plan: Plan, prompt: Prompt, new_tokens: int, drafting: Drafting
    ) -> Iterator[LosslessDecoder]:
        """New on a CPU; on CUDA the kept one, with its graphs, where it fits and no other batch is using it."""
        short = self._short_head
        if not self.uses_graphs:
            yield LosslessDecoder(self.stack, plan, prompt, new_tokens, self.repairs, LONGEST, short)
            return
        with self._lock:
            kept = self._kept_lossless
            if kept is None or kept.is_busy or not kept.fits(prompt, new_tokens):
                if kept is not None and not kept.is_busy:
                    self._kept_lossless = None  # its memory is free before the next one takes more
                kept = LosslessGraphDecoder(
                    self.stack,
                    plan,
                    prompt,
                    new_tokens,
                    self.repairs,
                    LONGEST,
                    short,
                    self.compiled,
                    drafting.pace,
                )
                self._kept_lossless = self._kept_lossless or kept
            kept.is_busy = True
        try:
            yield kept
        finally:
            kept.is_busy = False

    def _sampler(self, request: Request, prompt: Prompt) -> Sampler:
        return Sampler(
            self.stack.model,
            request.generation_config,
            prompt.ids,
            logits_processor=request.logits_processor,
            keys=sequence_keys(request.seed, request.prompts) if request.seed is not None else [],
            max_new_tokens=request.max_new_tokens,
        )

    def _pick(self, decoder: Decoder, sampler: Sampler, request: Request, index: int) -> list[bool] | None:
        """Put T_index into `decoder.tokens`; where the user gave stopping criteria, ask them which rows end."""
        criteria = request.stopping_criteria
        if index > 0 and decoder.feeds_itself and sampler.is_plain_greedy and not criteria:
            return None
        tokens, scores = sampler.pick(decoder.logits, index)
        decoder.tokens.copy_(tokens.unsqueeze(1))
        if sampler.processors or criteria:
            sampler.record(tokens, index)
        if not criteria:
            return None
        stopped: list[bool] = criteria(sampler.text(index + 1), scores).tolist()
        return stopped

    @contextlib.contextmanager
    def _borrowed_decoder(self, plan: Plan, prompt: Prompt, new_tokens: int) -> Iterator[Decoder]:
        """A decoder for one batch: new on a CPU; on CUDA the kept one where it fits and no other batch is using it."""
        windows = self.stack.windows
        if not self.uses_graphs:
            cache = PlannedCache(rooms(plan, prompt.length, new_tokens, in_buckets=False), windows)
            yield EagerDecoder(self.stack, plan, cache, new_tokens, self.repairs)
            return
        with self._lock:
            kept = self._kept
            if kept is None or kept.is_busy or not kept.fits(plan, prompt, new_tokens):
                if kept is not None and not kept.is_busy:
                    self._kept = None  # its memory is free before the next one takes more
                capacity = room_for(prompt.length, prompt.ids.shape[0])
                cache = PlannedCache(rooms(plan, capacity, new_tokens, in_buckets=True), windows)
                decoder = GraphDecoder(self.stack, plan, cache, new_tokens, self.compiled, self.repairs)
                kept = _KeptDecoder(decoder, prompt.ids.shape[0], capacity, new_tokens)
                self._kept = self._kept or kept
            kept.is_busy = True
        try:
            yield kept.decoder
        finally:
            kept.is_busy = False


@dataclass
class _KeptDecoder:
    """The last graphs and their cache: a next request of the same shape starts without capturing anything."""

    decoder: GraphDecoder
    batch: int
    prompt_capacity: int
    new_tokens: int
    is_busy: bool = False

    def fits(self, plan: Plan, prompt: Prompt, new_tokens: int) -> bool:
        same = plan is self.decoder.plan and self.batch == prompt.ids.shape[0]
        return same and prompt.length <= self.prompt_capacity and new_tokens <= self.new_tokens
