"""One row of a batch: its position, the tokens of its next pass, and which of the returned tokens it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from depthdecay.batching.drafting import RowDrafts
from depthdecay.engine.result import AnswerInProgress
from depthdecay.engine.sampling import Sampler, alike
from depthdecay.plan.plan import Plan


@dataclass(eq=False)
class BatchRow:
    """`row` collects the answer's tokens; `slot` is its index in the KV blocks once it is admitted."""

    id: int
    prompt: list[int]
    plan: Plan
    row: AnswerInProgress
    sampler: Sampler
    new_tokens: int
    logprobs: int | None
    depths: tuple[int, ...]  # of every token
    needs: dict[int, list[int]]  # by depth, blocks of each kind from there to the end of the answer
    submitted: float
    drafts: RowDrafts | None = None  # in lossless mode
    overtaken: int = 0  # how often a later row was admitted first because this one did not fit
    slot: int = -1
    length: int = 0  # final positions in the KV cache so far
    share: int = 0  # prompt tokens that its next pass reads at most
    first_token: float | None = None

    @property
    def index(self) -> int:
        """Index of the next token."""
        return len(self.row.result.token_ids)

    @property
    def depth(self) -> int:
        """Depth of the pass that produces the next token; the prompt always runs at full depth."""
        return self.plan.num_layers if self.in_prompt else self.depths[self.index]

    @property
    def pass_depth(self) -> int:
        """Depth of its next pass, which may be a draft's."""
        if self.is_drafting and self.drafts is not None and self.drafts.source is not None:
            return self.drafts.source.depth
        return self.depth

    @property
    def in_prompt(self) -> bool:
        return self.length < len(self.prompt)

    @property
    def unread(self) -> int:
        """Prompt tokens that are not yet prefilled."""
        return len(self.prompt) - self.length

    @property
    def most_blocks(self) -> list[int]:
        """The most blocks of each kind that it ever holds."""
        return from_the_start(self.needs)

    @property
    def reads_its_text(self) -> bool:
        """Whether sampling depends on the text so far."""
        return alike(self.sampler) is None

    @property
    def is_drafting(self) -> bool:
        return self.drafts is not None and self.drafts.is_drafting

    @property
    def drafts_left(self) -> int:
        """Drafts that its window may still get; a verification yields one token more than its drafts."""
        if self.drafts is None:
            return 0
        return min(self.drafts.longest, self.new_tokens - self.index - 1) - len(self.drafts.tokens)

    @property
    def ahead(self) -> int:
        """Drafts that precede its next pass in the KV cache."""
        return len(self.drafts.tokens) if self.drafts is not None and self.is_drafting else 0

    def next_tokens(self) -> list[int]:
        if self.in_prompt:
            return self.prompt[self.length : self.length + self.share]
        tokens = self.row.result.token_ids[-1:] + (self.drafts.tokens if self.drafts is not None else [])
        return tokens[-1:] if self.is_drafting else tokens

    def keep(self, said: Sequence[int]) -> list[int | None]:
        """Advance by the tokens of a full pass, up to the first rejected draft: the source of each token kept."""
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
    """The first entry of `KVBlocks.needs`: the blocks of the whole text."""
    return next(iter(needs.values()))
