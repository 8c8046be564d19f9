"""From a request to waiting rows: checks that its plan matches the served ladder and its texts fit the KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from depthdecay.batching.drafting import BatchDrafting, RowDrafts
from depthdecay.batching.row import BatchRow, from_the_start
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import MODES
from depthdecay.engine.request import Request
from depthdecay.engine.result import AnswerInProgress, Result
from depthdecay.engine.sampling import Sampler, alike
from depthdecay.errors import DepthDecayError
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.runners.keyed_noise import sequence_keys
from depthdecay.runners.kv_blocks import KVBlocks


class Intake:
    """Turns requests into rows, or refuses them with an error message."""

    def __init__(
        self, engine: Engine, blocks: KVBlocks, repairs: Repairs, drafting: BatchDrafting, max_positions: int
    ) -> None:
        self.engine = engine
        self.stack = engine.stack
        self.blocks = blocks
        self.repairs = repairs
        self.drafting = drafting
        self.max_positions = max_positions
        self._ids = itertools.count()

    def rows_of(
        self,
        request: Request,
        plan: Plan | None,
        mode: str,
        now: float,
        *,
        logprobs: int | None = None,
        into: Sequence[tuple[Result, Sampler]] | None = None,
    ) -> list[BatchRow]:
        """A row for each prompt. `into`: their results and samplers, where the caller has created them."""
        plan = self._plan_for(plan, mode)
        if request.stopping_criteria:
            raise DepthDecayError("stopping_criteria are not supported in a batch; use Engine.generate instead")
        keys = sequence_keys(request.seed, request.prompts) if request.seed is not None else []
        rows = []
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
            # Samplers that depend on the text so far, and logprobs, need decoding token by token.
            can_draft = logprobs is None and alike(sampler) is not None
            rows.append(
                BatchRow(
                    id=next(self._ids),
                    prompt=prompt,
                    plan=plan,
                    row=AnswerInProgress(result, self.engine.tokenizer, request),
                    sampler=sampler,
                    new_tokens=limit,
                    logprobs=logprobs,
                    depths=plan.depths(limit),
                    needs=needs,
                    submitted=now,
                    drafts=RowDrafts(prompt, request, can_draft, self.drafting.found) if mode == "lossless" else None,
                )
            )
        return rows

    def _plan_for(self, plan: Plan | None, mode: str) -> Plan:
        if mode not in MODES:
            raise DepthDecayError(f"unknown mode '{mode}'; choose one of {', '.join(MODES)}")
        if mode != "decay":
            return self.engine.full_plan  # every layer, so compatible with any ladder
        plan = plan or self.engine.plan
        if plan is None:
            raise DepthDecayError("mode 'decay' needs a plan; pass one, or create Engine(model, tokenizer, plan)")
        served = self.engine.drafting_plan
        if plan.ladder.num_layers != served.num_layers or not _nested(plan, served):
            raise DepthDecayError(
                "the plan drops layers in a different order than the served plan; a batch has one ladder"
            )
        if self.repairs.at_depth:
            self.repairs.check(plan, self.stack.hidden_size)
        return plan

    def _needs(self, prompt: Sequence[int], plan: Plan, new_tokens: int) -> dict[int, list[int]]:
        length = len(prompt) + new_tokens
        if length > self.max_positions:
            raise DepthDecayError(
                f"the prompt has {len(prompt)} tokens and the answer up to {new_tokens}, but the limit for both "
                f"together is {self.max_positions}; request fewer tokens"
            )
        needs = self.blocks.needs(plan, len(prompt), new_tokens)
        if not self.blocks.can_ever_hold(from_the_start(needs)):
            raise DepthDecayError(
                f"a prompt of {len(prompt)} tokens with an answer of {new_tokens} does not fit into the KV cache; "
                "request fewer tokens"
            )
        return needs


def _nested(plan: Plan, served: Plan) -> bool:
    return all(ours == theirs for ours, theirs in zip(plan.ladder.drop_order, served.ladder.drop_order, strict=False))
