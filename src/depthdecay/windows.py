"""How long a window to draft: the expected gain, from costs that were measured and acceptance that was seen.

A full-depth step costs 1 and yields one token. A window of m drafts costs m draft steps and one verification of m + 1
tokens; if each draft is right with probability p, independently, it yields 1 + p + p² + … + p^m tokens. So its rate is

    rate(m) = (1 - p^(m+1)) / (1 - p) / (m · draft + verify(m + 1))

and the window with the highest rate is drafted, none where no rate is above 1. Where the draft's own confidence is
read, it decides how long the window becomes: one more draft pays while the chance that it counts is above what its cost
would bring elsewhere, `sure · p > rate · draft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

LONGEST = 16
# After how many plain steps a stopped drafter is tried again, at first; it doubles with every vain try.
PAUSE = 16
# What an unknown drafter is trusted with, counted as this many drafts that were seen.
PRIOR_DRAFTS = 8.0
# Old drafts count less: text changes its kind.
MEMORY = 0.98


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


@dataclass
class Drafter:
    """One source of drafts, and what has become of them."""

    costs: StepCosts
    prior: float = 0.8  # how often a draft is right, before any was seen
    longest: int = LONGEST
    drafted: int = 0
    accepted: int = 0
    windows: int = 0
    _right: float = field(init=False)
    _seen: float = field(default=PRIOR_DRAFTS, init=False)
    _pause: int = field(default=0, init=False)
    _next_pause: int = field(default=PAUSE, init=False)

    def __post_init__(self) -> None:
        self._right = self.prior * PRIOR_DRAFTS

    @property
    def acceptance(self) -> float:
        """The estimate that windows are chosen by."""
        return min(self._right / self._seen, 0.995)

    def window(self) -> int:
        """How many tokens to draft now. Where drafting does not pay it pauses, and then tries a short window again."""
        if self._pause > 0:
            self._pause -= 1
            return 0
        rates = [self.costs.rate(self.acceptance, drafts) for drafts in range(self.longest + 1)]
        best = max(range(len(rates)), key=lambda drafts: rates[drafts])
        if best > 0:
            return best
        self._pause = self._next_pause
        self._next_pause = min(self._next_pause * 2, 512)
        return 1

    def goes_on(self, sure: float) -> bool:
        """Whether one more draft pays, given how likely all drafts so far are right.

        It costs a draft step, in which the best window makes `rate · draft` tokens, and yields one token if everything
        before it and it itself is right.
        """
        best = max(self.costs.rate(self.acceptance, drafts) for drafts in range(self.longest + 1))
        return sure * self.acceptance > best * self.costs.draft

    def saw(self, drafted: int, accepted: int) -> None:
        """A window's end: drafts behind the first wrong one say nothing about the drafter."""
        if drafted == 0:
            return
        judged = min(accepted + 1, drafted)
        self._right = self._right * MEMORY**judged + accepted
        self._seen = self._seen * MEMORY**judged + judged
        self.windows += 1
        self.drafted += drafted
        self.accepted += accepted
        if accepted == drafted:  # no loss was made, so the next try need not wait
            self._pause, self._next_pause = 0, PAUSE


def found_again(text: list[int], longest: int, size: int = 3) -> list[int]:
    """What followed the last place where the text's end stood before: a draft for nothing (prompt lookup).

    The longest end that is found decides, of at most `size` tokens and at least 2.
    """
    for length in range(min(size, len(text) - 1), 1, -1):
        end = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == end:
                return text[start + length : start + length + longest]
    return []
