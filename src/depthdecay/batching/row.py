"""One answer of a batch in the making: where it is, what its next pass reads, and what it keeps of what that says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from depthdecay.batching.drafting import RowDrafts
from depthdecay.engine.result import AnswerInProgress
from depthdecay.engine.sampling import Sampler, alike
from depthdecay.plan.plan import Plan


@dataclass(eq=False)
class BatchRow:
    """`row` takes the answer's tokens; `slot` is its place among the blocks once it was admitted."""

    id: int
    prompt: list[int]
    plan: Plan
    row: AnswerInProgress
    sampler: Sampler
    new_tokens: int
    logprobs: int | None
    depths: tuple[int, ...]  # of every token
    needs: dict[int, list[int]]  # blocks of each kind, from where it comes to a depth to its end
    submitted: float
    drafts: RowDrafts | None = None  # in lossless mode
    overtaken: int = 0  # by rows that came later and fitted into the cache when it did not
    slot: int = -1
    length: int = 0  # positions read so far and certain
    share: int = 0  # of its prompt's tokens, how many its next pass reads at most
    first_token: float | None = None

    @property
    def index(self) -> int:
        """Of the token that comes next."""
        return len(self.row.result.token_ids)

    @property
    def depth(self) -> int:
        """Of the pass that says the next token; the prompt's are always full."""
        return self.plan.num_layers if self.in_prompt else self.depths[self.index]

    @property
    def pass_depth(self) -> int:
        """Of its next pass, which may be a draft's."""
        if self.is_drafting and self.drafts is not None and self.drafts.source is not None:
            return self.drafts.source.depth
        return self.depth

    @property
    def in_prompt(self) -> bool:
        return self.length < len(self.prompt)

    @property
    def unread(self) -> int:
        """Tokens of its prompt that are still to be read."""
        return len(self.prompt) - self.length

    @property
    def most_blocks(self) -> list[int]:
        """Blocks of each kind that it holds at most, from its first token on."""
        return from_the_start(self.needs)

    @property
    def reads_its_text(self) -> bool:
        """Whether what was said plays a part in what comes next."""
        return alike(self.sampler) is None

    @property
    def is_drafting(self) -> bool:
        return self.drafts is not None and self.drafts.is_drafting

    @property
    def drafts_left(self) -> int:
        """Drafts that its window may still get: one more token than these is of use."""
        if self.drafts is None:
            return 0
        return min(self.drafts.longest, self.new_tokens - self.index - 1) - len(self.drafts.tokens)

    @property
    def ahead(self) -> int:
        """Drafts whose keys and values its next pass builds upon."""
        return len(self.drafts.tokens) if self.drafts is not None and self.is_drafting else 0

    def next_tokens(self) -> list[int]:
        if self.in_prompt:
            return self.prompt[self.length : self.length + self.share]
        tokens = self.row.result.token_ids[-1:] + (self.drafts.tokens if self.drafts is not None else [])
        return tokens[-1:] if self.is_drafting else tokens

    def keep(self, said: Sequence[int]) -> list[int | None]:
        """Move on by what a full pass said, the drafts before it being right: by kept token, what proposed it."""
        result, drafts = self.row.result, self.drafts
        if drafts is None:
            return [None]
        drafted = len(drafts.tokens)
        sources = drafts.judge(said)
        result.layer_passes += self.plan.num_layers
        if self.index > 0:  # the first token comes with the prompt
            result.verifications += 1
            result.drafted += drafted
            result.accepted += len(sources) - 1
            self.length += len(sources) - 1
        return sources


def from_the_start(needs: dict[int, list[int]]) -> list[int]:
    """The blocks that `KVBlocks.needs` names first: those of the whole text."""
    return next(iter(needs.values()))
