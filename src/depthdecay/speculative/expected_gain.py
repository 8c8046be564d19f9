"""How many tokens to draft, and at which depth: the expected gain, from measured costs and observed acceptance.

A full-depth step costs 1 and yields one token. A window of m drafts costs m draft steps and one verification of m + 1
tokens. If each draft is accepted with probability p, independently, it yields 1 + p + p² + … + p^m tokens. So its rate
is

    rate(m) = (1 - p^(m+1)) / (1 - p) / (m · draft + verify(m + 1))

and the depth and length with the highest rate are drafted, or nothing if no rate beats plain steps by a margin. If
windows take longer than their parts were timed to take, rates are scaled down accordingly. Drafts are not equally
likely to be accepted, and each has a confidence. The acceptance rate per range of confidence is tracked too, and the
product of these rates is the probability `sure` that all drafts so far are accepted. One more draft pays while its
expected yield exceeds what the best window makes in the same time: `sure · p > rate · draft`.

Later tokens are easier, so acceptance is also tracked by position in the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LOOKUP, LEARNED = 0, -1  # stand for a depth: drafts from prompt lookup, and from a learned head
LONGEST = 15  # drafts: with the token before them, a verification of 16
# Plain steps before a paused drafter is tried again, at first and at most; doubles with every unsuccessful try.
PAUSE, LONGEST_PAUSE = 16, 512
# A drafter whose draft costs less than this share of a step is tried in several windows, at first and after a pause:
# they cost little, and a single one says little about the drafter and about what its passes take.
CHEAP, TRIES = 0.15, 4
# Weight of the prior for an unknown drafter, in observed drafts.
PRIOR_DRAFTS = 8.0
# Older drafts count less, as text changes its character.
MEMORY = 0.98
# By how much a window must beat plain steps: smaller gains are within timing noise.
MARGIN = 1.05
# Boundaries between ranges of confidence, and the prior acceptance rate of each range.
CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
FIRST_SHARES = (0.35, 0.55, 0.7, 0.82, 0.91, 0.97, 0.995)
# Positions in the answer at which a new acceptance count starts.
PLACES = (64, 192)
# Assumed cost of each further token in a verification until one has been timed. Small where reading weights dominates;
# on a CPU each takes time of its own.
_UNTIMED, UNTIMED_ON_CPU = 0.02, 0.13
# Of each kind of pass the first is not timed, since it touches memory and loads code: a verification of two tokens took
# four times as long as all later ones, and drafting paused for good. Of the next ones the shortest counts.
FIRST_PASSES = 4
# By how much one pass may change what is known of its kind, and one window what is known of windows.
MOST_CHANGE, MOST_DRAG = 1.05, 1.02
# Verifications after which the last plain step is too old to compare with: other load may be on the machine by then.
RECENT = 8


def expected_tokens(p: float, drafts: int) -> float:
    """Tokens that a window yields: the accepted drafts and one from the verification itself."""
    return float(drafts + 1) if p >= 1 else (1 - p ** (drafts + 1)) / (1 - p)


@dataclass
class StepCosts:
    """Costs of a draft step and of a verification, in full-depth steps."""

    draft: float
    verify: Callable[[int], float] = lambda tokens: 1.0

    def rate(self, p: float, drafts: int) -> float:
        if drafts == 0:
            return 1.0
        return expected_tokens(p, drafts) / (drafts * self.draft + self.verify(drafts + 1))

    def best(self, p: float, longest: int) -> int:
        """The number of drafts with the highest rate."""
        return max(range(longest + 1), key=lambda drafts: self.rate(p, drafts))


@dataclass
class Pace:
    """Measured pass times on this machine in seconds, as running means; windows are chosen by them."""

    drafts: dict[int, float] = field(default_factory=dict)  # by depth
    verifications: dict[int, float] = field(default_factory=dict)  # by number of tokens
    untimed: float = _UNTIMED
    _costs: dict[tuple[float, int], StepCosts] = field(default_factory=dict, init=False)  # valid until the next timing
    _verify: dict[int, float] = field(default_factory=dict, init=False)  # likewise
    _since_step: int = field(default=0, init=False)  # verifications since the last plain step
    _seen: dict[tuple[str, int], int] = field(default_factory=dict, init=False)  # passes of each kind

    @classmethod
    def untimed_on(cls, device: str) -> Pace:
        """What to expect before anything has been timed."""
        return cls(untimed=UNTIMED_ON_CPU if device == "cpu" else _UNTIMED)

    @property
    def step(self) -> float | None:
        """A full pass over one token."""
        return self.verifications.get(1)

    def saw_draft(self, depth: int, seconds: float) -> None:
        if self._is_comparable or depth not in self.drafts:
            now = self._timed(("draft", depth), self.drafts.get(depth), seconds)
            if now is not None:
                self.takes_to_draft(depth, now)

    def saw_verification(self, tokens: int, seconds: float) -> None:
        """Only costs in steps matter, and other processes slow all passes down alike.

        So a plain step that takes longer than before scales the other times with it, and those are updated only soon
        after a plain step. Otherwise drafting that once paused on a busy machine would never pay again.
        """
        before = self.step
        self._since_step = 0 if tokens == 1 else self._since_step + 1
        if not self._is_comparable and tokens in self.verifications:
            return
        kind = ("verification", tokens)
        now = self._timed(kind, self.verifications.get(tokens), seconds)
        if now is None:
            return
        if tokens == 1 and before is not None and self._seen[kind] > FIRST_PASSES:  # costs in steps stay as they are
            self.drafts = {depth: time * now / before for depth, time in self.drafts.items()}
            self.verifications = {count: time * now / before for count, time in self.verifications.items()}
        else:
            self.takes_to_verify(tokens, now)

    def _timed(self, kind: tuple[str, int], before: float | None, seconds: float) -> float | None:
        """The time of such a pass, given what was known before; None for the first."""
        self._seen[kind] = count = self._seen.get(kind, 0) + 1
        if count == 1:
            return None
        if before is None or count > FIRST_PASSES:
            return _running_mean(before, seconds)
        return min(before, seconds)

    @property
    def _is_comparable(self) -> bool:
        return self.step is None or self._since_step <= RECENT

    def in_steps(self, seconds: float | None) -> float | None:
        """What a window took, in full-depth steps; None if no step was timed lately."""
        return None if seconds is None or self.step is None or not self._is_comparable else seconds / self.step

    def takes_to_draft(self, depth: int, seconds: float) -> None:
        self.drafts[depth] = seconds
        self._costs.clear()

    def takes_to_verify(self, tokens: int, seconds: float) -> None:
        self.verifications[tokens] = seconds
        self._costs.clear()
        self._verify.clear()

    def costs(self, share: float, depth: int = 0) -> StepCosts:
        """In full-depth steps; what has not been timed yet is estimated by the share of bytes that it reads.

        Called for every window while the device waits, so the result is cached until the next timing.
        """
        if (share, depth) not in self._costs:
            step, draft = self.step, self.drafts.get(depth)
            verify = [0.0, *(self.verify(tokens) for tokens in range(1, LONGEST + 2))]
            cost = share if draft is None or step is None else draft / step
            self._costs[share, depth] = StepCosts(cost, verify.__getitem__)
        return self._costs[share, depth]

    def verify(self, tokens: int) -> float:
        """The cost of one pass over so many tokens, in full-depth steps."""
        if tokens not in self._verify:
            self._verify[tokens] = self._estimate(tokens)
        return self._verify[tokens]

    def _estimate(self, tokens: int) -> float:
        known = [count for count in self.verifications if count > 1]
        if self.step is None or not known or tokens == 1:
            return 1.0 + self.untimed * (tokens - 1)
        nearest = min(known, key=lambda count: (abs(count - tokens), count))
        slope = (self.verifications[nearest] / self.step - 1) / (nearest - 1)
        return max(1.0, 1.0 + slope * (tokens - 1))


def _running_mean(before: float | None, seconds: float) -> float:
    """A mean that no single time moves far: on a shared machine, now and then one is several times the others."""
    if before is None:
        return seconds
    return min(max(0.8 * before + 0.2 * seconds, before / MOST_CHANGE), before * MOST_CHANGE)


@dataclass
class Share:
    """The acceptance rate of some drafts, with older ones counting less."""

    right: float
    seen: float = PRIOR_DRAFTS

    @classmethod
    def at_first(cls, value: float) -> Share:
        return cls(value * PRIOR_DRAFTS)

    @property
    def value(self) -> float:
        return min(self.right / self.seen, 0.998)

    def saw(self, judged: int, right: int) -> None:
        self.right = self.right * MEMORY**judged + right
        self.seen = self.seen * MEMORY**judged + judged


@dataclass
class TrackRecord:
    """The history of one source of drafts, and what its next window is expected to gain."""

    costs: StepCosts
    prior: float = 0.8  # acceptance rate before any draft was observed
    longest: int = LONGEST
    depth: int = LOOKUP  # of its passes; or LOOKUP or LEARNED
    layers: int = 0  # of the model, that a draft runs
    position: int = 0  # in the answer, at which the next window starts
    judged: int = 0
    drag: float = 1.0  # how much longer windows took than the sum of their timed parts
    _by_place: dict[int, Share] = field(default_factory=dict, init=False)
    _by_confidence: list[Share] = field(init=False)
    _pause: int = field(default=0, init=False)
    _next_pause: int = field(default=PAUSE, init=False)
    _tries: int = field(default=0, init=False)  # windows since drafting last paused or paid
    _best: tuple[StepCosts, float, int] | None = field(default=None, init=False)  # for these costs and acceptance

    def __post_init__(self) -> None:
        self._by_confidence = [Share.at_first(value) for value in FIRST_SHARES]

    @property
    def acceptance(self) -> float:
        """The estimate by which windows are chosen."""
        return self._here().value

    def _here(self) -> Share:
        place = bisect_right(PLACES, self.position)
        if place not in self._by_place:  # start from the estimate for the preceding positions
            before = [known for known in self._by_place if known < place] or list(self._by_place)
            value = self._by_place[max(before)].value if before else self.prior
            self._by_place[place] = Share.at_first(value)
        return self._by_place[place]

    def likelihood(self, confidence: float) -> float:
        """The acceptance rate of drafts with this confidence."""
        return self._by_confidence[bisect_right(CONFIDENCES, confidence)].value

    def likelihoods(self) -> list[float]:
        """The same for each range of confidence."""
        return [share.value for share in self._by_confidence]

    def best(self) -> int:
        """The window with the highest rate, given what is known; recomputed only when that has changed."""
        p = self.acceptance
        if self._best is None or self._best[0] is not self.costs or self._best[1] != p:
            self._best = self.costs, p, self.costs.best(p, self.longest)
        return self._best[2]

    @property
    def best_rate(self) -> float:
        return max(1.0, self.costs.rate(self.acceptance, self.best()) / self.drag)

    def window(self) -> int:
        """How many tokens to draft now. If drafting does not pay it pauses, then tries windows of one draft again."""
        if self._pause > 0:
            self._pause -= 1
            return 0
        if self.pays:
            self._tries = 0
            return self.best()
        self._tries += 1
        if self._tries >= (TRIES if self.costs.draft < CHEAP else 1):
            self._tries = 0
            self._pause = self._next_pause
            self._next_pause = min(self._next_pause * 2, LONGEST_PAUSE)
        return 1

    @property
    def is_pausing(self) -> bool:
        return self._pause > 0

    @property
    def pays(self) -> bool:
        """Whether the next window is expected to gain, rather than being a retry."""
        return not self.is_pausing and self.best() > 0 and self.best_rate > MARGIN

    def goes_on(self, sure: float) -> bool:
        """Whether one more draft pays, given the probability that all drafts so far are accepted.

        It costs a draft step, in which the best window makes `rate · draft` tokens. It yields one token if it and all
        drafts before it are accepted.
        """
        return sure > self.next_pays_above

    @property
    def next_pays_above(self) -> float:
        """The probability that all drafts so far are accepted above which one more pays."""
        return self.best_rate * self.costs.draft / max(self.acceptance, 1e-9)

    @property
    def verified_above(self) -> float:
        """The same above which the last of them is worth its share of the verification."""
        return self.best_rate * (self.costs.verify(2) - self.costs.verify(1))

    def saw(
        self,
        drafted: int,
        accepted: int,
        confidences: Sequence[float] = (),
        cost: float | None = None,
        missed: int = 0,
    ) -> None:
        """Record a window's outcome. Drafts after the first rejected one say nothing about the drafter.

        `cost` is what the whole window took, in full-depth steps, if known. `missed`: drafts among the accepted that
        were not verified though right; each costs a plain step more.
        """
        if drafted == 0:
            return
        if cost is not None:
            expected = drafted * self.costs.draft + self.costs.verify(drafted + 1)
            mean = 0.9 * self.drag + 0.1 * min(max((cost + missed) / expected, 0.8), 2.0)
            self.drag = min(max(mean, self.drag / MOST_DRAG), self.drag * MOST_DRAG)
        judged = min(accepted + 1, drafted)
        self.judged += judged
        self._here().saw(judged, accepted)
        for place, confidence in enumerate(confidences[:judged]):
            self._by_confidence[bisect_right(CONFIDENCES, confidence)].saw(1, int(place < accepted))
        if accepted == drafted:  # success: retry sooner, or resume at once if drafting pays by now
            self._next_pause = 2 * PAUSE
            if self.best_rate > MARGIN:
                self._next_pause, self._pause = PAUSE, 0
