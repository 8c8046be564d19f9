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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

LONGEST = 15  # drafts: with the token before them a verification of 16
LOOKUP = 8  # the longest end of a text that is looked for in the text before: the longer, the surer what follows
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
# Judged drafts after which a depth is known, and windows after which another one is tried again.
ENOUGH, AGAIN = 24, 64
# How the share of wrong drafts grows with the number of dropped layers, for depths that have not been tried.
GROWTH = 1.5
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

    seconds: dict[str, float] = field(default_factory=dict)
    _costs: dict[tuple[float, int], StepCosts] = field(default_factory=dict, init=False)  # until something is timed
    _verify: dict[int, float] = field(default_factory=dict, init=False)  # likewise

    def saw(self, kind: str, seconds: float) -> None:
        before = self.seconds.get(kind)
        self.takes(kind, seconds if before is None else 0.8 * before + 0.2 * min(seconds, 3 * before))

    def takes(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = seconds
        self._costs.clear()
        self._verify.clear()

    def costs(self, share: float, depth: int = 0) -> StepCosts:
        """In full-depth steps; what has not been timed yet is taken from the share of bytes that it reads.

        Asked at every window, while the device waits: made once for all that has been timed so far.
        """
        if (share, depth) not in self._costs:
            step, draft = self.seconds.get("verify 1"), self.seconds.get(f"draft {depth}")
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
        step = self.seconds.get("verify 1")
        known = [int(kind.split()[1]) for kind in self.seconds if kind.startswith("verify") and kind != "verify 1"]
        if step is None or not known or tokens == 1:
            return 1.0 + _UNTIMED * (tokens - 1)
        nearest = min(known, key=lambda count: (abs(count - tokens), count))
        slope = (self.seconds[f"verify {nearest}"] / step - 1) / (nearest - 1)
        return max(1.0, 1.0 + slope * (tokens - 1))


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
class Drafter:
    """One source of drafts, and what has become of them."""

    costs: StepCosts
    prior: float = 0.8  # how often a draft is right, before any was seen
    longest: int = LONGEST
    depth: int = 0  # of its passes; 0 for drafts that cost none
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


class Drafting:
    """All that an engine knows about drafting: a drafter for every depth that may be drafted at, and lookup."""

    def __init__(self, num_layers: int, shares: dict[int, float], pace: Pace | None = None) -> None:
        """`shares`: the bytes that a draft step at each depth reads, of those of a full-depth step."""
        self.num_layers = num_layers
        self.pace = Pace() if pace is None else pace
        self.shares = shares
        self.by_depth = {depth: Drafter(StepCosts(share), depth=depth) for depth, share in shares.items()}
        self.lookup = Drafter(StepCosts(0.0), prior=0.6)
        self.finds = Share.at_first(0.5)  # of windows, in which lookup found something
        self._windows = 0
        self._chosen: Drafter | None = None

    @property
    def pauses(self) -> bool:
        """Whether the window after the one that was chosen for will draft nothing either."""
        return self._chosen is not None and self._chosen.is_pausing

    def found(self, position: int) -> Drafter:
        self.lookup.costs = self.pace.costs(0.0)
        self.lookup.position = position
        return self.lookup

    def lookup_pays(self, position: int, share: float) -> bool:
        """Whether drafts for a share of the rows, at no cost, bring more than drafts by layers for all of them."""
        if share == 1:
            return True
        lookup = self.found(position)
        drafts, p = lookup.best(), lookup.acceptance
        rate = (share * expected_tokens(p, drafts) + 1 - share) / lookup.costs.verify(drafts + 1)
        return rate > max(MARGIN, *(drafter.best_rate for drafter in self.by_depth.values()))

    def choose(self, position: int) -> Drafter:
        """The drafter with the highest rate; first those that might turn out to have it, and now and then another."""
        self._chosen = self._choose(position)
        return self._chosen

    def _choose(self, position: int) -> Drafter:
        for depth, drafter in self.by_depth.items():
            drafter.position = position
            drafter.costs = self.pace.costs(self.shares[depth], depth)
        known = [drafter for drafter in self.by_depth.values() if drafter.judged >= ENOUGH]
        if not known:  # one that has begun goes on, else the middle one is tried first
            depths = sorted(self.by_depth)
            begun = [drafter for drafter in self.by_depth.values() if drafter.judged > 0]
            return begun[0] if begun else self.by_depth[depths[len(depths) // 2]]
        best = max(known, key=lambda drafter: (drafter.best_rate, drafter.depth))
        for drafter in self.by_depth.values():
            if drafter not in known and self._guess(drafter, best) > best.best_rate:
                return drafter
        self._windows += 1
        if self._windows % AGAIN == 0 and len(known) > 1 and best.best_rate > 1:
            return min((drafter for drafter in known if drafter is not best), key=lambda drafter: drafter.judged)
        return best

    def _guess(self, drafter: Drafter, known: Drafter) -> float:
        """The rate of a depth that was not tried enough, from a known one: more layers dropped, more drafts wrong."""
        ratio = (self.num_layers - drafter.depth) / max(1, self.num_layers - known.depth)
        p = min(max(1 - (1 - known.acceptance) * ratio**GROWTH, 0.0), 0.998)
        return drafter.costs.rate(p, drafter.costs.best(p, drafter.longest))


class Lookup:
    """What followed the last place where the text's end stood before: a draft for nothing (prompt lookup).

    The longest end that is found decides, of at most `size` tokens and at least 2. Every end is kept with the place
    behind it, so that a look costs the same however long the text is.
    """

    def __init__(self, text: Iterable[int] = (), size: int = LOOKUP) -> None:
        self.size = size
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.add(text)

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            place = len(self.text)  # an end is known once something follows it
            for length in range(2, min(self.size, place) + 1):
                self._behind[tuple(self.text[place - length :])] = place
            self.text.append(token)

    def after(self, longest: int) -> list[int]:
        for length in range(min(self.size, len(self.text) - 1), 1, -1):
            place = self._behind.get(tuple(self.text[-length:]))
            if place is not None:
                return self.text[place : place + longest]
        return []
