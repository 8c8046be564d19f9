"""Where lossless windows run: an engine's drafters with their statistics, and a lane for each text."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthdecay.engine.reuse import Kept
from depthdecay.engine.sampling import Sampler
from depthdecay.model.kv_cache import room_for
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.speculative.compiled_lane import CompiledLane
from depthdecay.speculative.draft_head import DraftHead, portable_head_of
from depthdecay.speculative.drafter_choice import Drafting, drafting_for
from depthdecay.speculative.drafters import Lane
from depthdecay.speculative.expected_gain import LONGEST
from depthdecay.speculative.head_text import PlacedHead
from depthdecay.speculative.host_lane import HostLane
from depthdecay.speculative.short_head import ShortHead

if TYPE_CHECKING:
    from depthdecay.speculative.chain_lane import Chain


@dataclass(frozen=True)
class PassSettings:
    """How the passes of a request run."""

    repairs: Repairs
    uses_graphs: bool = False
    compiled: Any = None  # layers


# Where a learned head drafts for rows of a batch. On a CPU each verified token costs time, so drafts would have to be
# right nearly always, and following the text alone takes 7% of a step.
HEADS_IN_BATCHES = {"cuda"}


class Lanes:
    """Kept from request to request: graphs with the cache they are tied to, prepared heads, and drafting statistics."""

    def __init__(
        self, stack: LayerStack, plan: Plan, draft_head: DraftHead | None, head_plan: Plan | None = None
    ) -> None:
        """`plan`: its layers draft. `head_plan`: where the head comes from, if from a plan."""
        self.stack, self.plan, self.draft_head, self.head_plan = stack, plan, draft_head, head_plan
        self.chain: Kept[Chain] = Kept()
        self.sampled: Kept[BlockRunner] = Kept()
        self.short_head: ShortHead | None = None
        self.placed_head: PlacedHead | None = None
        self._drafting: Drafting | None = None
        self._lock = threading.Lock()

    def drafting(self, repairs: Repairs) -> Drafting:
        """The drafting statistics; also prepares the drafts' short LM head and the draft head."""
        with self._lock:
            rows = (self.short_head, self.placed_head)
            if self._drafting is None or not all(part is None or part.is_for(self.stack) for part in rows):
                self.short_head = ShortHead.of(self.stack, repairs.vocabulary)
                if self.draft_head is not None:
                    self.placed_head = placed_head(self.draft_head, self.stack)
                self.chain = Kept()
                self._drafting = drafting_for(self.stack, self.plan, repairs, self.short_head, self.placed_head)
            return self._drafting

    def head_for_rows(self, repairs: Repairs) -> PlacedHead | None:
        """The draft head for rows of a batch, where one can gain: it must not need the model's first layers."""
        if self.draft_head is None or self.stack.model.device.type not in HEADS_IN_BATCHES:
            return None
        self.drafting(repairs)
        placed = self.placed_head
        if placed is not None and not placed.head.shape.first_layers:
            return placed
        other = None if self.head_plan is None else portable_head_of(self.head_plan)
        return None if other is None else placed_head(other, self.stack)

    @contextlib.contextmanager
    def lane(self, prompt_tokens: int, new_tokens: int, sampler: Sampler, passes: PassSettings) -> Iterator[Lane]:
        """What runs one text's windows: on CUDA chained graphs, if they support the requested sampling."""
        if not passes.uses_graphs:
            yield self.host_lane(prompt_tokens, new_tokens, sampler, passes)
            return
        positions = prompt_tokens + new_tokens
        from depthdecay.speculative.chain_pick import settings_of

        if settings_of(sampler) is None:

            def make_runner() -> BlockRunner:
                runner = self._runner(positions, passes)
                runner.use_graphs(passes.compiled, LONGEST + 1)
                return runner

            with self.sampled.lent(lambda kept: kept.blocks.longest >= positions + LONGEST + 1, make_runner) as runner:
                yield self._host_lane(runner, prompt_tokens, sampler, passes)
            return
        from depthdecay.cuda.pass_graphs import PassGraphs
        from depthdecay.speculative.chain_lane import Chain

        pace = self.drafting(passes.repairs).pace

        def make_chain() -> Chain:
            room = [Chain.room_for(positions)] * self.stack.num_layers
            graphs = PassGraphs(self.stack, self.plan, passes.repairs, passes.compiled, batch=1, rooms=room)
            return Chain(graphs, self.short_head, self.placed_head, pace)

        with self.chain.lent(lambda kept: kept.fits(positions), make_chain) as chain:
            chain.prepare(sampler)
            yield chain

    def host_lane(self, prompt_tokens: int, new_tokens: int, sampler: Sampler, passes: PassSettings) -> HostLane:
        """A lane with the host between passes."""
        return self._host_lane(self._runner(prompt_tokens + new_tokens, passes), prompt_tokens, sampler, passes)

    def _host_lane(self, runner: BlockRunner, prompt_tokens: int, sampler: Sampler, passes: PassSettings) -> HostLane:
        pace, head, short = self.drafting(passes.repairs).pace, self.placed_head, self.short_head
        kind = CompiledLane if CompiledLane.supports(runner, sampler, head) else HostLane
        return kind(runner, self.plan, sampler, short, head, pace, prompt_tokens)

    def _runner(self, positions: int, passes: PassSettings) -> BlockRunner:
        """A runner for one text, with room for a window after it."""
        positions += LONGEST + 1
        if passes.uses_graphs:
            positions = room_for(positions, 1)
        return BlockRunner.with_room(self.stack, [[positions] * self.stack.num_layers], passes.repairs)


def placed_head(head: DraftHead, stack: LayerStack) -> PlacedHead:
    """A draft head attached to a model, with compiled calls if the model has them."""
    placed = PlacedHead(head, stack)
    if not stack.has_compiled_pass:
        return placed
    from depthdecay.speculative.compiled_head import CompiledHead

    return CompiledHead.of(placed) or placed
