"""How long a window to draft, and at which depth: the expected gain, from costs that were measured and acceptance seen.

A full-depth step costs 1 and yields one token. A window of m drafts costs m draft steps and one verification of m + 1
tokens; if each draft is right with probability p, independently, it yields 1 + p + p² + … + p^m tokens. So its rate is

    rate(m) = (1 - p^(m+1)) / (1 - p) / (m · draft + verify(m + 1))

and the depth and the length with the highest rate are drafted, none where no rate is above that of plain steps by a
margin. Where windows take longer than their parts were timed to take, rates are lower by that. Drafts are not equally
likely to be right, and the draft itself says how sure it is. How often drafts of that confidence were right is counted
too; with the product of these shares as the chance that everything so far is right, one more draft pays while the
chance that it counts is above what its cost would bring elsewhere: `sure · p > rate · draft`.

Later tokens are easier, so acceptance is counted by the place in the answer as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LOOKUP, LEARNED = 0, -1  # in the place of a depth: drafts found in the text, and those of a learned head
LONGEST = 15  # drafts: with the token before them a verification of 16
# After how many plain steps a stopped drafter is tried again, at first and at most; it doubles with every vain try.
PAUSE, LONGEST_PAUSE = 16, 512
# What an unknown drafter is trusted with, counted as this many drafts that were seen.
PRIOR_DRAFTS = 8.0
# Old drafts count less: text changes its kind.
MEMORY = 0.98
# What a window must promise against plain steps: less is within what timing can tell.
MARGIN = 1.05
# Where one range of confidence ends and the next begins, and how often drafts of each are right at first sight.
CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
FIRST_SHARES = (0.35, 0.55, 0.7, 0.82, 0.91, 0.97, 0.995)
# Places in the answer where acceptance is counted anew.
PLACES = (64, 192)
# What a further token in a verification costs until one has been timed: little, since reading weights is most of it.
_UNTIMED = 0.02


def expected_tokens(p: float, drafts: int) -> float:
    """Tokens that a window yields: the accepted drafts and the verifier's own."""
    return float(drafts + 1) if p >= 1 else (1 - p ** (drafts + 1)) / (1 - p)


@dataclass
class StepCosts:
    """Of a draft step and of a verification, in full-depth steps."""

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
    """Seconds that passes take on this machine, as running means: what windows are chosen by."""

    drafts: dict[int, float] = field(default_factory=dict)  # by depth
    verifications: dict[int, float] = field(default_factory=dict)  # by number of tokens
    _costs: dict[tuple[float, int], StepCosts] = field(default_factory=dict, init=False)  # until something is timed
    _verify: dict[int, float] = field(default_factory=dict, init=False)  # likewise

    @property
    def step(self) -> float | None:
        """A full pass over one token."""
        return self.verifications.get(1)

    def saw_draft(self, depth: int, seconds: float) -> None:
        self.takes_to_draft(depth, _running_mean(self.drafts.get(depth), seconds))

    def saw_verification(self, tokens: int, seconds: float) -> None:
        self.takes_to_verify(tokens, _running_mean(self.verifications.get(tokens), seconds))

    def takes_to_draft(self, depth: int, seconds: float) -> None:
        self.drafts[depth] = seconds
        self._costs.clear()

    def takes_to_verify(self, tokens: int, seconds: float) -> None:
        self.verifications[tokens] = seconds
        self._costs.clear()
        self._verify.clear()

    def costs(self, share: float, depth: int = 0) -> StepCosts:
        """In full-depth steps; what has not been timed yet is taken from the share of bytes that it reads.

        Asked at every window, while the device waits: made once for all that has been timed so far.
        """
        if (share, depth) not in self._costs:
            step, draft = self.step, self.drafts.get(depth)
            verify = [0.0, *(self.verify(tokens) for tokens in range(1, LONGEST + 2))]
            cost = share if draft is None or step is None else draft / step
            self._costs[share, depth] = StepCosts(cost, verify.__getitem__)
        return self._costs[share, depth]

    def verify(self, tokens: int) -> float:
        """Of one pass over so many tokens, in full-depth steps."""
        if tokens not in self._verify:
            self._verify[tokens] = self._estimate(tokens)
        return self._verify[tokens]

    def _estimate(self, tokens: int) -> float:
        known = [count for count in self.verifications if count > 1]
        if self.step is None or not known or tokens == 1:
            return 1.0 + _UNTIMED * (tokens - 1)
        nearest = min(known, key=lambda count: (abs(count - tokens), count))
        slope = (self.verifications[nearest] / self.step - 1) / (nearest - 1)
        return max(1.0, 1.0 + slope * (tokens - 1))


def _running_mean(before: float | None, seconds: float) -> float:
    return seconds if before is None else 0.8 * before + 0.2 * min(seconds, 3 * before)


@dataclass
class Share:
    """How many of some drafts were right, old ones counting less."""

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
    """What has become of the drafts of one source, and what its next window promises."""

    costs: StepCosts
    prior: float = 0.8  # how often a draft is right, before any was seen
    longest: int = LONGEST
    depth: int = LOOKUP  # of its passes, or what drafts in their place
    layers: int = 0  # of the model, that a draft runs
    position: int = 0  # in the answer, where the next window starts
    judged: int = 0
    drag: float = 1.0  # how much longer windows took than their parts were timed to take
    _by_place: dict[int, Share] = field(default_factory=dict, init=False)
    _by_confidence: list[Share] = field(init=False)
    _pause: int = field(default=0, init=False)
    _next_pause: int = field(default=PAUSE, init=False)
    _best: tuple[StepCosts, float, int] | None = field(default=None, init=False)  # for these costs and acceptance

    def __post_init__(self) -> None:
        self._by_confidence = [Share.at_first(value) for value in FIRST_SHARES]

    @property
    def acceptance(self) -> float:
        """The estimate that windows are chosen by."""
        return self._here().value

    def _here(self) -> Share:
        place = bisect_right(PLACES, self.position)
        if place not in self._by_place:  # what is known of the place before is a first guess
            before = [known for known in self._by_place if known < place] or list(self._by_place)
            value = self._by_place[max(before)].value if before else self.prior
            self._by_place[place] = Share.at_first(value)
        return self._by_place[place]

    def likelihood(self, confidence: float) -> float:
        """How often drafts of this confidence were right."""
        return self._by_confidence[bisect_right(CONFIDENCES, confidence)].value

    def best(self) -> int:
        """The window with the highest rate, for what is known now; sought anew only where that has changed."""
        p = self.acceptance
        if self._best is None or self._best[0] is not self.costs or self._best[1] != p:
            self._best = self.costs, p, self.costs.best(p, self.longest)
        return self._best[2]

    @property
    def best_rate(self) -> float:
        return max(1.0, self.costs.rate(self.acceptance, self.best()) / self.drag)

    def window(self) -> int:
        """How many tokens to draft now. Where drafting does not pay it pauses, and then tries a short window again."""
        if self._pause > 0:
            self._pause -= 1
            return 0
        if self.pays:
            return self.best()
        self._pause = self._next_pause
        self._next_pause = min(self._next_pause * 2, LONGEST_PAUSE)
        return 1

    @property
    def is_pausing(self) -> bool:
        return self._pause > 0

    @property
    def pays(self) -> bool:
        """Whether the next window will be more than a try."""
        return not self.is_pausing and self.best() > 0 and self.best_rate > MARGIN

    def goes_on(self, sure: float) -> bool:
        """Whether one more draft pays, given how likely all drafts so far are right.

        It costs a draft step, in which the best window makes `rate · draft` tokens, and yields one token if everything
        before it and it itself is right.
        """
        return sure * self.acceptance > self.best_rate * self.costs.draft

    def saw(self, drafted: int, accepted: int, confidences: Sequence[float] = (), cost: float | None = None) -> None:
        """A window's end: drafts behind the first wrong one say nothing about the drafter.

        `cost` is what the whole window took, in full-depth steps, where that can be told.
        """
        if drafted == 0:
            return
        if cost is not None:
            expected = drafted * self.costs.draft + self.costs.verify(drafted + 1)
            self.drag = 0.9 * self.drag + 0.1 * min(max(cost / expected, 0.8), 2.0)
        judged = min(accepted + 1, drafted)
        self.judged += judged
        self._here().saw(judged, accepted)
        for place, confidence in enumerate(confidences[:judged]):
            self._by_confidence[bisect_right(CONFIDENCES, confidence)].saw(1, int(place < accepted))
        if accepted == drafted:  # a try that went well: the next comes soon, and at once where drafting pays by now
            self._next_pause = 2 * PAUSE
            if self.best_rate > MARGIN:
                self._next_pause, self._pause = PAUSE, 0
