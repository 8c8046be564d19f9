"""The fast path: prefill, decode with a plan, stream text. `Engine(model, tokenizer, plan).generate(prompts)`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from depthdecay.argument_checks import Number
from depthdecay.engine.lanes import Lanes, PassSettings
from depthdecay.engine.mailbox import Mailbox
from depthdecay.engine.plan_choice import DepthSettings, require_mode
from depthdecay.engine.request import Request, prepare_request
from depthdecay.engine.result import AnswerInProgress, Piece, Result, Stream
from depthdecay.engine.reuse import Kept
from depthdecay.engine.rows import decode_rows
from depthdecay.engine.sampling import Sampler
from depthdecay.engine.streamers import told_to
from depthdecay.errors import ArgumentError, DepthDecayError, UnsupportedModelError
from depthdecay.model.kv_cache import room_for, rooms
from depthdecay.model.layers import LayerStack, primary_device, require_eval, unwrap
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.repairs import Repairs, repairs_for
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.plan.compatibility import check_plan
from depthdecay.plan.file import EMBEDDED_MODEL
from depthdecay.plan.plan import Plan
from depthdecay.plan.stored_plans import drafter_of, plan_with_head, shipped_plan
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import FED, Ask, Part, Runner, Said
from depthdecay.runners.keyed_noise import sequence_keys
from depthdecay.speculative.draft_head import DraftHead, head_of
from depthdecay.speculative.drafter_choice import drafting_plan
from depthdecay.speculative.lossless import LosslessRun

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from depthdecay.batching.batcher import Batcher
    from depthdecay.cuda.pass_graphs import PassGraphs

logger = logging.getLogger("depthdecay")
NO_TOKENIZER = (
    "the model came without a tokenizer, which text needs; put its tokenizer.json next to the weights, or in Python "
    "pass one to Engine(model, tokenizer, plan)"
)


class Engine:
    """Decodes with a model and a plan. Without a plan, every answer is the full model's own.

    `model` is the result of `dd.load`, which includes its tokenizer, its file's quantized weights and the plan that the
    package ships for it; or a transformers model, with its tokenizer. It is changed only while a call runs, and left
    exactly as it was.

    `plan` is a plan or the path of one. `mode` is the default for calls. With "lossless" the plan only drafts, or the
    plan next to it that was calibrated for drafting. On CUDA, layers are compiled unless `compile` is False: the first
    answer takes longer, and the compiled code is cached on disk. On a CPU, `quantize` (none, int8, int4) sets the
    weight format, and `fast=False` runs the model's own forward. `progress` gets a line for each slow one-time step.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        plan: Plan | DepthSettings | str | os.PathLike[str] | None = None,
        *,
        mode: str | None = None,
        compile: bool | None = None,
        graphs: bool | None = None,
        allow_other_weights: bool = False,
        repairs: Repairs | None = None,
        drafter: Plan | None = None,
        draft_head: DraftHead | None = None,
        quantize: str | None = None,
        origin: WeightsOrigin | None = None,
        fast: bool | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        loaded = model if isinstance(model, LoadedModel) else None
        require_mode(mode)
        self.mode = mode
        self.stack = _open(model, quantize, origin, fast, progress or logger.info)
        require_eval(self.stack.model)
        self.tokenizer = loaded.tokenizer if loaded is not None and tokenizer is None else tokenizer
        self.full_plan = Plan.full(self.stack.num_layers)
        self.plan = _chosen_plan(plan, self.stack, loaded, mode)
        drafter = self.plan or drafter or (shipped_plan(loaded.name) if loaded is not None else None)
        if drafter is not None:
            check_plan(drafter, self.stack.model, allow_other_weights=allow_other_weights)
        self.repairs = repairs_for(self.stack, drafter, repairs)
        self.head_plan = None if drafter is None else plan_with_head(drafter)
        if self.head_plan is not None and self.head_plan is not drafter:
            check_plan(self.head_plan, self.stack.model, allow_other_weights=allow_other_weights)
        self.draft_head = head_of(self.head_plan) if draft_head is None and self.head_plan is not None else draft_head
        if self.draft_head is not None:
            self.draft_head.shape.check(self.stack)
        self.device = primary_device(self.stack.model)
        self.uses_graphs = self._can_use_graphs() if graphs is None else graphs
        if self.uses_graphs and self.device.type != "cuda":
            raise DepthDecayError(f"CUDA graphs need a CUDA device, but the model is on {self.device}")
        if compile and not self.uses_graphs:
            warnings.warn(f"layers are only compiled on CUDA; on {self.device} they run eagerly", stacklevel=2)
        self.compiled = _compiled_layers() if self.uses_graphs and compile is not False else None
        self._tell = logger.info if progress is None else progress
        self._has_told_of_compiling = self.compiled is None
        self.drafting_plan = drafter or drafting_plan(self.stack.num_layers)
        # Kept for the next request: graphs with the cache they are tied to, batches, and drafting statistics.
        self.steps: Kept[PassGraphs] = Kept()
        self.rows: Kept[Batcher] = Kept()
        self.lanes = Lanes(self.stack, self.drafting_plan, self.draft_head, self.head_plan)
        self._told_inexact = False

    @classmethod
    def from_pretrained(
        cls,
        model: str = EMBEDDED_MODEL,
        *,
        plan: Plan | str | os.PathLike[str] | None = None,
        alpha: Number | None = None,
        speedup: Number | None = None,
        over_tokens: int | None = None,
        warmup_tokens: int | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        trust_remote_code: bool = False,
        progress: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a model by name and decode with it, as the command line does.

        Without a plan, answers are the full model's own, in lossless mode. `plan`, `speedup` or `alpha` trade quality
        for speed; a `speedup` uses the model's calibrated plan if there is one. The other settings are those of
        `Engine`. `progress` gets one line for each step that may take long.
        """
        from depthdecay.model.load import load

        depth = DepthSettings(plan, alpha, speedup, over_tokens, warmup_tokens).read()
        require_mode(settings.get("mode"))
        loaded = load(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, progress=progress)
        return cls(loaded, plan=depth, progress=progress, **settings)

    def _can_use_graphs(self) -> bool:
        spread = len(set((getattr(self.stack.model, "hf_device_map", None) or {}).values())) > 1
        return self.device.type == "cuda" and not spread

    def generate(
        self,
        prompts: str | Sequence[Any],
        max_new_tokens: int | None = None,
        *,
        mode: str | None = None,
        exact: bool = False,
        streamer: BaseStreamer | None = None,
        progress: Callable[[int], None] | None = None,
        **settings: Any,
    ) -> list[Result]:
        """Answer all prompts in one batch; returns a Result for each, in order.

        A prompt is a string (wrapped in a chat model's template unless chat=False), a list of messages, or a list of
        token ids. Settings default to `generation_config`, then to the model's own: do_sample, temperature, top_k,
        top_p, min_p, repetition_penalty, eos_token_id, …; also seed, stop, chat, logits_processor, stopping_criteria.
        A transformers `streamer` gets the tokens of one prompt; `progress` gets the length of the longest answer after
        each step. `exact`: answers are batch-invariant, bitwise identical to those of `serve --exact`; raises an error
        where that is not possible.
        """
        request = prepare_request(self, [prompts] if isinstance(prompts, str) else prompts, max_new_tokens, settings)
        results = self._new_results(request, self._mode(mode, request))
        with told_to(streamer, request.prompts, results) as tell:
            for _ in self._decoded(request, results, exact):
                tell()
                if progress is not None:
                    progress(max(len(result.token_ids) for result in results))
        return results

    def stream(
        self, prompt: Any, max_new_tokens: int | None = None, *, mode: str | None = None, **settings: Any
    ) -> Stream:
        """Stream the answer to one prompt: no piece splits a character or contains part of a stop string."""
        if self.tokenizer is None:
            raise DepthDecayError(NO_TOKENIZER)
        request = prepare_request(self, [prompt], max_new_tokens, settings)
        results = self._new_results(request, self._mode(mode, request))
        pieces = (pieces[0] for pieces in self._decoded(request, results) if pieces[0])
        return Stream(pieces, results[0])

    def _decoded(self, request: Request, results: list[Result], exact: bool = False) -> Iterator[list[Piece]]:
        require_eval(self.stack.model)
        if not self._has_told_of_compiling:
            self._has_told_of_compiling = True
            self._tell(
                "compiling layers and capturing graphs, once; the compiled code is cached on disk for the next start"
            )
        self.repairs = self.repairs.placed(self.stack.examples())  # the model may have been moved
        if exact:
            return decode_rows(self, request, results, exact=True)
        if results[0].mode != "lossless":
            return self._decode(request, results)
        if request.stopping_criteria:
            raise DepthDecayError("stopping_criteria check one token at a time; use mode 'full' or 'decay' with them")
        return self._decode_lossless(request, results)

    @property
    def pass_settings(self) -> PassSettings:
        return PassSettings(self.repairs, self.uses_graphs, self.compiled)

    @property
    def step_mode(self) -> str:
        """The token-by-token mode: with the plan, or at full depth without one that drops layers."""
        return "full" if self.plan is None or self.plan.only_drafts else "decay"

    @property
    def row_mode(self) -> str:
        """The default of a server's requests: rows draft only if asked to, or if that is all that the plan is for."""
        return "lossless" if self.plan is not None and self.plan.only_drafts else self.step_mode

    def _mode(self, mode: str | None, request: Request) -> str:
        """The default mode: decay with a plan that drops layers; else lossless where windows can pay off."""
        mode = mode or self.mode
        if mode is None:
            mode = self.step_mode
            if mode == "full" and self._suits_windows(request):
                mode = "lossless"
        require_mode(mode)
        if mode == "decay" and self.plan is None:
            raise ArgumentError("mode 'decay' needs a plan; Engine(model, tokenizer, plan) takes one", "mode", "plan")
        return mode

    def _suits_windows(self, request: Request) -> bool:
        """A single row without stopping criteria, which check one token at a time."""
        return len(request.prompts) == 1 and not request.stopping_criteria

    def _new_results(self, request: Request, mode: str) -> list[Result]:
        return [Result.of(self.stack.num_layers, prompt, request, mode) for prompt in request.prompts]

    def _decode(self, request: Request, results: list[Result]) -> Iterator[list[Piece]]:
        """Decode one batch: prefill, then steps until every row has ended; yields each step's pieces of text."""
        started = time.perf_counter()
        plan = self.full_plan if self.plan is None or results[0].mode == "full" else self.plan
        rows = [AnswerInProgress(result, self.tokenizer, request) for result in results]
        with self._lock_step_runner(plan, request) as runner:
            sampler = self.sampler(request)
            mailbox = Mailbox(self.device, len(rows))
            sent: list[int] = []  # layers of every step started
            tokens = None
            for index in range(request.max_new_tokens):
                # Gradients are off only within each pass, since the consumer's code runs in between.
                with torch.no_grad():
                    said = runner.run(_parts(request.prompts, plan, index), Ask(fed=tokens))
                    tokens, stopped = self._pick(said, sampler, request, index)
                    mailbox.post(tokens, stopped, said.arriving if tokens is said.likeliest else None)
                sent.append(said.layers_executed)
                if index == 0:
                    mailbox.wait()
                    prefill_seconds = time.perf_counter() - started
                is_last = index == request.max_new_tokens - 1
                for number, arrived, ends in mailbox.collect(everything=is_last):
                    taken = zip(rows, arrived, strict=True)
                    yield [Piece(row.take(token, sent[number]), sent[number]) for row, token in taken]
                    for row in itertools.compress(rows, ends):
                        if not row.finished:
                            row.end("stop")
                if all(row.finished for row in rows):
                    break
            cache_bytes, uniform = runner.cache_bytes, runner.cache_bytes_uniform
            self.tell_exact(results, runner.inexact)
        # Steps started before the host knew that all rows had ended.
        overrun = sum(sent[mailbox.collected :])
        rest = [Piece(row.finish_text(), row.result.depths[-1]) for row in rows]
        for result in results:
            result.overrun_layers += overrun
            result.seconds = time.perf_counter() - started
            result.prefill_seconds = prefill_seconds
            result.cache_bytes = cache_bytes
            result.cache_bytes_saved = uniform - cache_bytes
        if any(rest):
            yield rest

    def _pick(
        self, said: Said, sampler: Sampler, request: Request, index: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens T_index, and which rows end according to the user's stopping criteria, if any.

        The flags stay on the device until the host catches up, so criteria may be called for steps past the end.
        """
        criteria = request.stopping_criteria
        if said.likeliest is not None and sampler.is_plain_greedy and not criteria:
            return said.likeliest, None
        if not criteria:
            tokens = sampler.pick(said.logits, index)
            if sampler.processors:
                sampler.record(tokens, index)
            return tokens, None
        tokens, scores = sampler.pick_scored(said.logits, index)
        sampler.record(tokens, index)
        stopped: torch.Tensor = criteria(sampler.text(index + 1), scores)
        return tokens, stopped

    @contextlib.contextmanager
    def _lock_step_runner(self, plan: Plan, request: Request) -> Iterator[Runner]:
        """A runner for one batch: new on a CPU; on CUDA the kept graphs if they fit and no other batch uses them."""
        batch, new_tokens = len(request.prompts), request.max_new_tokens
        if not self.uses_graphs:
            room = [rooms(plan, len(p), new_tokens, in_buckets=False) for p in request.prompts]
            yield BlockRunner.with_room(self.stack, room, self.repairs)
            return
        from depthdecay.cuda.pass_graphs import PassGraphs

        longest = max(map(len, request.prompts))

        def fits(kept: PassGraphs) -> bool:
            needs = rooms(plan, longest, new_tokens, in_buckets=False)
            return kept.plan is plan and kept.batch == batch and kept.has_room(needs)

        def make() -> PassGraphs:
            room = rooms(plan, room_for(longest, batch), new_tokens, in_buckets=True)
            return PassGraphs(self.stack, plan, self.repairs, self.compiled, batch=batch, rooms=room)

        with self.steps.lent(fits, make) as graphs:
            yield graphs

    def _decode_lossless(self, request: Request, results: list[Result]) -> Iterator[list[Piece]]:
        """The same in lossless mode: each window yields some tokens, all of them the full model's."""
        if len(results) == 1:
            for piece in self._decode_windows(request, results, 0):
                yield [piece]
            return
        try:
            yield from decode_rows(self, request, results)
        except UnsupportedModelError:  # batching is not supported, so decode one text after the other
            for row in range(len(results)):
                for piece in self._decode_windows(request, results, row):
                    yield [piece if place == row else Piece("", piece.depth) for place in range(len(results))]

    def _decode_windows(self, request: Request, results: list[Result], row: int) -> Iterator[Piece]:
        """Decode one text in lossless mode."""
        started, layers = time.perf_counter(), self.stack.num_layers
        prompt, result, lanes = request.prompts[row], results[row], self.lanes
        drafting = lanes.drafting(self.repairs)
        answer = AnswerInProgress(result, self.tokenizer, request)
        sampler = self.sampler(request, row)
        where = (len(prompt), request.max_new_tokens, sampler, self.pass_settings)
        with lanes.lane(*where) as lane:
            run = LosslessRun(
                lane,
                prompt,
                sampler,
                drafting,
                result,
                new_tokens=request.max_new_tokens,
                window=request.window,
                lookup=request.lookup,
                short_head=lanes.short_head,
                other_lane=lambda: lanes.host_lane(*where),
            )
            for number, tokens in enumerate(run.windows()):
                if number == 0:
                    result.prefill_seconds = time.perf_counter() - started
                text = ""
                for token, source in zip(tokens, run.sources, strict=False):
                    if not answer.finished:
                        text += answer.take(token, layers)
                        result.draft_depths.append(source)
                run.is_active = not answer.finished
                yield Piece(text, layers)
            result.cache_bytes = run.lane.cache_bytes
            self.tell_exact([result], run.lane.inexact)
        rest = answer.finish_text()
        result.seconds = time.perf_counter() - started
        if rest:
            yield Piece(rest, layers)

    def tell_exact(self, results: Sequence[Result], inexact: str | None) -> None:
        """Report whether results are batch-invariant, where that is known. Irrelevant if a plan drops layers."""
        if results[0].mode == "decay" or (inexact is not None and not self.uses_graphs):
            return
        for result in results:
            result.exact, result.inexact_because = inexact is None, inexact
        half = self.stack.model.dtype in (torch.bfloat16, torch.float16)  # in 32 bits near-ties are rare
        if inexact is not None and half and results[0].mode == "lossless" and not self._told_inexact:
            self._told_inexact = True
            warnings.warn(f"lossless answers may differ from full depth at near-ties: {inexact}", stacklevel=2)

    def sampler(self, request: Request, row: int | None = None, *, padded: bool = True) -> Sampler:
        """A sampler for all rows in lock-step, or for one. Processors see prompts with padding, as in generate, unless
        a row must not depend on the others' lengths."""
        own = slice(None) if row is None else slice(row, row + 1)
        length = max(map(len, request.prompts if padded else request.prompts[own]))
        ids = [[request.pad_token_id] * (length - len(prompt)) + prompt for prompt in request.prompts[own]]
        return Sampler(
            self.stack.model,
            request.generation_config,
            torch.tensor(ids, device=self.device),
            logits_processor=request.logits_processor,
            keys=sequence_keys(request.seed, request.prompts)[own] if request.seed is not None else [],
            max_new_tokens=request.max_new_tokens,
        )


def _parts(prompts: Sequence[Sequence[int]], plan: Plan, index: int) -> list[Part]:
    """Each row's input to the pass that produces T_index: its prompt, or the previous token, which is on the device."""
    if index == 0:
        return [Part(row, 0, prompt, plan.num_layers, plan) for row, prompt in enumerate(prompts)]
    depth = plan.depth(index)
    return [Part(row, len(prompt) + index - 1, FED, depth, plan) for row, prompt in enumerate(prompts)]


def _chosen_plan(
    asked: Plan | DepthSettings | str | os.PathLike[str] | None,
    stack: LayerStack,
    loaded: LoadedModel | None,
    mode: str | None,
) -> Plan | None:
    """The requested plan; in lossless mode, unless a speed-up was given, the plan next to it that is for drafting."""
    depth = DepthSettings.of(asked)
    name = loaded.name if loaded is not None else None
    plan = depth.choose(stack, name, drafts_only=mode == "lossless")
    return drafter_of(plan) if plan is not None and mode == "lossless" and depth.speedup is None else plan


def _open(
    model: Any,
    quantize: str | None,
    origin: WeightsOrigin | None,
    fast: bool | None,
    say: Callable[[str], None],
) -> LayerStack:
    """The model's layers, with compiled passes on a CPU."""
    if isinstance(model, LoadedModel):
        quantize = model.quantize_as_filed() if quantize is None and fast is not False else quantize
        model, origin = model.model, model.origin
    if quantize is None and (fast is False or primary_device(unwrap(model)).type != "cpu"):
        return LayerStack.of(model)
    from depthdecay.cpu.choose_stack import open_stack

    return open_stack(model, quantize=quantize, origin=origin, fast=fast, say=say)


def _compiled_layers() -> Any:
    from depthdecay.cuda.compiled_layers import CompiledLayers

    return CompiledLayers()
