"""Drafts of lossless rows in a batch: which, how many, and whether they pay given the other rows.

A verification is several one-token rows that share a slot. Keys are written before any row attends, and each attends
only up to its own position. So a pass needs no notion of drafts, and drafts do not pad any other row.

Prompt-lookup drafts cost no pass of their own, only extra rows in the next one, which slow it down for every row. A row
is charged for all of that, using measured times: with R rows, a window of m drafts costs

    1 + R · (time(R + m) / time(R) - 1)

steps. That is 1 while the step is bound by reading weights, and more than it can gain where every token costs the same.
Where drafting does not pay, rows decode without drafts. Lookup accuracy is still tracked at no cost, by comparing the
next token with the guess. The cost of drafts must be tried: by the whole batch at once, and less and less often.

Shallow-layer drafts save time only where the whole step is shallow, since one full-depth row makes every layer run. So
lossless rows draft in the same steps and are verified in the same step, and only while no other row runs deeper.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from depthdecay.engine.request import Request
from depthdecay.model.layers import LayerStack, primary_device
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.speculative.accept import count_right
from depthdecay.speculative.drafter_choice import drafting_for
from depthdecay.speculative.expected_gain import (
    LEARNED,
    LONGEST,
    LONGEST_PAUSE,
    MARGIN,
    PAUSE,
    Pace,
    Share,
    StepCosts,
    TrackRecord,
)
from depthdecay.speculative.head_rows import HeadRows
from depthdecay.speculative.prompt_lookup import Lookup

if TYPE_CHECKING:
    from depthdecay.batching.row import BatchRow

# The cost of another row on a CPU, as a share of a one-row step, until it is timed: CPUs are closer to compute-bound.
ROW_ON_CPU = 0.4


class RowDrafts:
    """One lossless row's window: the drafts that its next full pass verifies."""

    def __init__(self, prompt: Sequence[int], request: Request, can_draft: bool, common: Share) -> None:
        """`can_draft`: False for a row that must decode token by token; it is still counted.

        `common`: the lookup acceptance rate over all rows, which a new row starts from.
        """
        self.tokens: list[int] = []
        self.guess: int | None = None  # the first token it would have drafted, where it drafts nothing
        self.source: TrackRecord | None = None
        self.is_drafting = False  # whether its next pass produces a draft
        self.longest = request.window if can_draft else 0
        self.text = Lookup(prompt, request.lookup) if can_draft and request.lookup else None
        self.lookup = TrackRecord(StepCosts(0.0), prior=common.value)
        self.common = common

    def found(self, longest: int) -> list[int]:
        """Prompt lookup: the tokens that followed the current ending earlier in the text."""
        return self.text.after(longest) if self.text is not None else []

    def judge(self, said: Sequence[int]) -> list[int | None]:
        """The source of each token kept from the full model's output: a depth, 0 for lookup, None for the model."""
        right = count_right(self.tokens, said)
        depth = None if self.source is None else self.source.depth
        if not self.tokens and self.guess is not None:
            self._saw_lookup(1, int(self.guess == said[0]))
        elif self.source is self.lookup:
            self._saw_lookup(len(self.tokens), right)
        elif self.source is not None:
            self.source.saw(len(self.tokens), right)
        if self.text is not None:
            self.text.add(said[: right + 1])
        self.tokens, self.guess = [], None
        return [depth] * right + [None]

    def _saw_lookup(self, drafted: int, right: int) -> None:
        self.lookup.saw(drafted, right)
        if drafted:
            self.common.saw(min(right + 1, drafted), right)


Found = tuple[RowDrafts, list[int]]


class Tries:
    """When to draft although it does not seem to pay, in order to time it: less and less often."""

    def __init__(self) -> None:
        self._pause, self._next_pause = PAUSE // 4, PAUSE  # a few plain steps are timed first

    def is_due(self) -> bool:
        """Called at every step in which no drafts pay."""
        if self._pause > 0:
            self._pause -= 1
            return False
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        return True

    def start_anew(self) -> None:
        self._pause = self._next_pause = PAUSE


@dataclass
class BatchPace(Pace):
    """The time of a full-depth step by its number of rows, drafts included. The unit is a one-row step, not seconds.

    A step is compared with the steps just before it, if those had a different number of rows. The speed of a shared
    machine drifts by more than the cost of a row, and drafts that are not tried are not timed.
    """

    most_in_a_row: float = math.inf  # steps with drafts in a row, before one without is needed as a baseline
    together: int = 1  # rows that draft and verify together
    unit: float = 0.0  # current seconds per one-row step
    before: int = 0  # rows of the last step

    def __post_init__(self) -> None:
        self.takes_to_verify(1, 1.0)

    @property
    def has_begun(self) -> bool:
        """Whether drafting may start: not where a baseline must be timed first."""
        return True

    def longest_after(self, in_a_row: int) -> int:
        """How many drafts a row may have, after `in_a_row` steps in a row with drafts."""
        return LONGEST

    def saw_step(self, rows: int, seconds: float, drafts: int = 0) -> None:
        """`drafts`: how many of the rows are drafts."""
        known = self.verify(rows)
        if self.unit and rows not in (1, self.before):  # clamped: the first pass of a kind may load or capture
            sample = min(max(seconds / self.unit, known / 3), 3 * known)
            self.takes_to_verify(rows, 0.8 * known + 0.2 * sample)
        now = seconds / known
        self.unit = now if not self.unit else 0.5 * self.unit + 0.5 * min(now, 3 * self.unit)
        self.before = rows

    def _estimate(self, tokens: int) -> float:
        """Interpolate between the nearest timed counts: going from one row to two may be the largest jump."""
        known = sorted(self.verifications)
        if len(known) == 1:
            return super()._estimate(tokens)
        low = max(count for count in known if count <= tokens)
        least = self.verifications[low]
        if low in (tokens, known[-1]):
            return least * tokens / low  # beyond the timed counts, assume that every row costs the same
        high = min(count for count in known if count > tokens)
        return least + (self.verifications[high] - least) * (tokens - low) / (high - low)

    def costs(self, share: float, depth: int = 0) -> StepCosts:
        plain = self.verify(self.together)
        return StepCosts(share, lambda tokens: self.verify(self.together * tokens) / plain)

    def charged(self, rows: int) -> StepCosts:
        """Costs of one row's lookup drafts in a step of `rows` rows: all the time that they add, for every row."""
        plain = self.verify(rows)
        return StepCosts(0.0, lambda tokens: 1 + rows * (self.verify(rows + tokens - 1) / plain - 1))


@dataclass
class CPUPace(BatchPace):
    """For CPUs, where rows are expensive: the cost of a draft as a share of the cost of another row.

    A draft shares its row's keys and values, so in long texts it costs less than a row. A single share is learned from
    all steps with drafts compared with those without: a cost per width would be as noisy as one step's time.
    """

    most_in_a_row: float = 16
    share_of_row: float = 1.0
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=8))  # the unit in the last steps without drafts

    @property
    def has_begun(self) -> bool:
        return self.unit > 0

    def longest_after(self, in_a_row: int) -> int:
        return max(1, in_a_row)  # one more per step, so that a mistimed cost is noticed before it is paid in full

    def saw_step(self, rows: int, seconds: float, drafts: int = 0) -> None:
        plain = self.verify(rows - drafts)
        if drafts == 0:
            self.plain.append(seconds / plain)
            # Other load only makes steps longer, and a slow baseline would make drafts seem cheap: so a low quantile.
            self.unit = sorted(self.plain)[len(self.plain) // 4]
        elif self.unit:
            longer = seconds / (self.unit * plain) - 1
            sample = min(max(longer / self._longer(rows - drafts, drafts), 0.0), 3.0)
            self.share_of_row = 0.7 * self.share_of_row + 0.3 * sample

    def _estimate(self, tokens: int) -> float:
        return super()._estimate(tokens) if len(self.verifications) > 1 else 1 + ROW_ON_CPU * (tokens - 1)

    def _longer(self, rows: int, more: int) -> float:
        """How much longer a step gets with `more` rows, as a share of the step."""
        return max(self.verify(rows + more) / self.verify(rows) - 1, 0.001)

    def costs(self, share: float, depth: int = 0) -> StepCosts:
        return StepCosts(share, lambda tokens: 1 + self._drafts(self.together, self.together * (tokens - 1)))

    def charged(self, rows: int) -> StepCosts:
        return StepCosts(0.0, lambda tokens: 1 + rows * self._drafts(rows, tokens - 1))

    def _drafts(self, rows: int, drafts: int) -> float:
        return self.share_of_row * self._longer(rows, drafts) if drafts else 0.0


class BatchDrafting:
    """Decides what the lossless rows of a batch do in the next step."""

    def __init__(self, stack: LayerStack, plan: Plan, repairs: Repairs, head: HeadRows | None = None) -> None:
        """`head`: the learned draft head, if the model has one; it drafts for rows whose lookup finds nothing."""
        self.num_layers = stack.num_layers
        self.head = head
        self.has_layers = head is None or bool(repairs.at_depth)  # uncalibrated layers draft worse than a head
        right = 0.6 if head is None else head.head.right
        self.learned = TrackRecord(StepCosts(0.0), prior=right, depth=LEARNED)
        self.head_seconds = 0.0  # per draft, for all rows together
        self.pace = CPUPace() if primary_device(stack.model).type == "cpu" else BatchPace()
        self.tries = Tries()
        self.in_a_row = 0  # steps with drafts since one without
        self.found = Share.at_first(0.6)  # acceptance rate of lookup drafts
        self.by_layers = drafting_for(stack, plan, repairs, None)
        self.by_layers.pace = self.pace
        self.drafter: TrackRecord | None = None  # the shallow-layer drafter of the current window
        self.left = 0  # its remaining draft steps

    def prepare(self, rows: Sequence[BatchRow], room: int, deepest: int) -> None:
        """Decide each lossless row's next pass: a draft, or full depth over its drafts, if any.

        `rows`: all decoding rows. `room`: the most rows that the step may have, drafts included. `deepest`: the depth
        of whatever else the step runs.
        """
        lossless = [(row, row.drafts) for row in rows if row.drafts is not None]
        if not lossless:
            self.left = 0
            return
        able = [row for row, _ in lossless if row.drafts_left > 0]
        rest = max([deepest, *(row.depth for row in rows if row not in able)])
        for _, drafts in lossless:
            drafts.is_drafting = False
        if self.left == 0 and able and not any(drafts.tokens for _, drafts in lossless):
            self._begin(able, len(rows), room, rest)
        if self.left > 0 and able and self.drafter is not None and rest <= self.drafter.depth:
            self.left -= 1
            for row in able:
                assert row.drafts is not None
                row.drafts.is_drafting, row.drafts.source = True, self.drafter
            return
        self.left = 0
        free = max(0, room - len(rows))
        for _, drafts in lossless:  # more rows may have joined since the window began
            del drafts.tokens[free:]
            free -= len(drafts.tokens)

    def _begin(self, able: Sequence[BatchRow], rows: int, room: int, rest: int) -> None:
        """Begin a window where one pays: shallow-layer drafts for all rows that can, or each row's own lookup."""
        free = room - rows
        if free < 1 or not self.pace.has_begun:
            return
        found: list[Found] = []
        for row in able:
            if row.drafts is not None and (tokens := row.drafts.found(row.drafts_left)):
                row.drafts.lookup.costs, row.drafts.lookup.position = self.pace.charged(rows), row.index
                found.append((row.drafts, tokens))
        if self.has_layers:
            self._begin_by_layers(able, free, rest, found)
        if self.left > 0:
            return
        for drafts, tokens in found:
            drafts.guess = tokens[0]
        worth = self._worth_it(found, rows)
        longest = self.pace.longest_after(self.in_a_row)
        for drafts, tokens in worth:
            drafts.tokens, drafts.source = tokens[: min(longest, free)], drafts.lookup
            free -= len(drafts.tokens)
        self._draft_by_head([row for row in able if row.drafts is not None and not row.drafts.tokens], rows, free)

    def _draft_by_head(self, able: Sequence[BatchRow], rows: int, free: int) -> None:
        """Draft with the learned head for all rows whose lookup found nothing, as many tokens as pay overall."""
        if self.head is None or not able:
            return
        most = min(free // len(able), *(row.drafts_left for row in able))
        step = self.pace.unit * self.pace.verify(rows)
        self.pace.together = len(able)
        share = self.head_seconds / step if self.head_seconds and step else 0.1
        self.learned.costs, self.learned.position = self.pace.costs(share, LEARNED), max(row.index for row in able)
        count = min(self.learned.window(), most) if most > 0 else 0
        if count < 1:
            return
        started = time.perf_counter()
        samplers, slots = [row.sampler for row in able], [row.slot for row in able]
        drafted = self.head.draft(slots, count, samplers, [row.index for row in able])
        seconds = (time.perf_counter() - started) / count
        self.head_seconds = seconds if not self.head_seconds else 0.8 * self.head_seconds + 0.2 * seconds
        for row, tokens in zip(able, drafted, strict=True):
            assert row.drafts is not None
            row.drafts.tokens, row.drafts.source = tokens, self.learned

    def _begin_by_layers(self, able: Sequence[BatchRow], free: int, rest: int, found: Sequence[Found]) -> None:
        rate = 1 + sum(drafts.lookup.best_rate - 1 for drafts, _ in found) / len(able)
        self.pace.together = len(able)
        most = min(free // len(able), *(row.drafts_left for row in able))
        drafter = self.by_layers.choose(max(row.index for row in able))
        if most < 1 or rest > drafter.depth or (found and drafter.best_rate <= rate):
            return
        best_case = max(drafter.costs.rate(1.0, drafts) for drafts in range(1, most + 1))
        if best_case > MARGIN:  # otherwise not even full acceptance would pay
            self.drafter, self.left = drafter, min(drafter.window(), most)

    def _worth_it(self, found: Sequence[Found], rows: int) -> list[Found]:
        """The lookup drafts to verify: all that pay. Where none do, now and then a few, to time them."""
        paying = [(drafts, tokens[: drafts.lookup.best()]) for drafts, tokens in found if drafts.lookup.pays]
        if paying and self.in_a_row < self.pace.most_in_a_row:
            self.in_a_row += 1
            self.tries.start_anew()
            return paying
        self.in_a_row = 0
        if found and not paying and self.tries.is_due():
            return [(drafts, tokens[:1]) for drafts, tokens in found[: max(1, rows // 2)]]
        return []
