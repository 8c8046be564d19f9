"""Lossless decoding: a shallow pass drafts, the full model checks several drafts at once and keeps what it would say.

Draft and verifier are one model with one cache. Drafts write keys and values only in the layers that they run; the
verification starts at the last token that is certain and writes all layers, so the cache is whole behind it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from .budget import Costs
from .cache import PlannedCache
from .decoding import EagerDecoder, Prompt
from .plan import Plan
from .repairs import Repairs
from .sampling import Sampler, gumbel_noise, likeliest
from .short_head import ShortHead
from .stack import Stack
from .windows import LONGEST, LOOKUP, Drafter, Drafting, Lookup

MOST_DEPTH = 0.85  # of the layers: deeper drafts cost nearly what they are to spare
# The share of windows in which lookup may find something where drafts are begun before that is known. Such a draft is
# lost; without it the device waits for the host, for a 1.5B model on an H200 about 0.4 of what a draft takes.
MOST_FINDS = 0.3


class Chain(Protocol):
    """Windows of one greedy row that the device goes through by itself: the host starts passes and reads what comes."""

    chains: bool  # until a pass cannot be captured; then nothing below does anything

    def begin(self, first: torch.Tensor) -> None:
        """The answer's first token is there."""

    def offer(self, drafts: list[int]) -> None:
        """Drafts that no pass made."""

    def draft_one(self, depth: int, step: int) -> None:
        """Start the pass that makes draft number `step` of this window."""

    def confidence(self, step: int) -> float:
        """How sure that draft is; waits for it."""

    def launch(self, width: int) -> None:
        """Start the verification of so many drafts. The next window may be begun behind it."""

    def collect(self) -> tuple[list[int], list[float]]:
        """Wait for the verification: the tokens that the window yields, and how sure its drafts were."""


class LosslessDecoder(EagerDecoder):
    """Rows in lock-step windows, each accepted by its own length.

    Rows that got fewer tokens than others are moved to the right in the cache, so that all texts end in one column:
    then masks, windows and positions are those of a batch padded on the left, which every architecture knows.
    """

    chains = False  # whether the device can go through windows by itself, as a `Chain`

    def __init__(
        self,
        stack: Stack,
        plan: Plan,
        prompt: Prompt,
        new_tokens: int,
        repairs: Repairs,
        longest: int,
        short_head: ShortHead | None = None,
    ) -> None:
        self.batch = prompt.ids.shape[0]
        self.room = self._room(prompt.length + new_tokens + longest + 1)
        cache = PlannedCache([self.room] * stack.num_layers, stack.windows)
        super().__init__(stack, plan, cache, new_tokens, repairs)
        self.longest = longest
        self.short_head = short_head
        self.is_busy = False
        self.mask = torch.ones((self.batch, self.room), dtype=torch.long, device=prompt.ids.device)

    def _room(self, columns: int) -> int:
        return columns

    def fits(self, prompt: Prompt, new_tokens: int) -> bool:
        """Whether another request can be decoded in the same room."""
        return (
            self.batch == prompt.ids.shape[0] and self._room(prompt.length + new_tokens + self.longest + 1) <= self.room
        )

    def prefill(self, prompt: Prompt) -> int:
        executed = super().prefill(prompt)
        self.mask.fill_(1)
        self.is_padded = prompt.mask is not None or self.batch > 1  # rows of a batch become so as they part
        if prompt.mask is not None:
            self.mask[:, : prompt.length] = prompt.mask
        self.next_position = prompt.position_ids[:, -1:] + 1
        return executed

    @property
    def filled(self) -> int:
        return self.cache.clock.filled

    def draft(
        self,
        sampler: RowSampler,
        last: torch.Tensor,
        indices: list[int],
        drafts: int,
        depth: int,
        go_on: Callable[[list[float]], bool] | None = None,
    ) -> tuple[torch.Tensor, list[float]]:
        """Tokens (batch, at most drafts) that a pass at this depth would say after `last`, T_indices of each row.

        Where `go_on` is given it is told the confidence of every draft so far (the least of all rows), and may end the
        window; these confidences come with the tokens.
        """
        start, token = self.filled, last
        said: list[torch.Tensor] = []
        confidences: list[float] = []
        short = self._short_head(sampler)
        for step in range(drafts):
            logits = self._pass(token, self.next_position + step, depth, short=short)[:, -1]
            if short is None:
                picked = token = sampler.pick(logits, [index + 1 + step for index in indices], said).unsqueeze(1)
            else:
                picked = logits.argmax(-1, keepdim=True)
                token = short.ids[picked]
            said.append(token)
            if go_on is not None:
                confidences.append(float(logits.float().softmax(-1).gather(1, picked).min()))
                if step + 1 < drafts and not go_on(confidences):
                    break
        self.cache.clock.filled = start  # drafts are taken back: the verification writes over them
        return torch.cat(said, dim=1), confidences

    def _short_head(self, sampler: RowSampler) -> ShortHead | None:
        """Other choices than the likeliest token look at all of them."""
        return self.short_head if sampler.is_plain_greedy else None

    def verify(self, sampler: RowSampler, last: torch.Tensor, drafts: torch.Tensor, indices: list[int]) -> torch.Tensor:
        """What the full model says at every place of the window (batch, drafts + 1), given the drafts before it."""
        start = self.filled
        inputs = torch.cat([last, drafts], dim=1)
        steps = torch.arange(inputs.shape[1], device=inputs.device)
        logits = self._pass(inputs, self.next_position + steps, self.stack.num_layers, keep=inputs.shape[1])
        self.cache.clock.filled = start  # until `keep` says how much of it stays
        if sampler.is_plain_greedy:
            return likeliest(logits.float())
        said: list[torch.Tensor] = []
        picked: list[torch.Tensor] = []
        for place in range(inputs.shape[1]):
            picked.append(sampler.pick(logits[:, place], [index + 1 + place for index in indices], said).unsqueeze(1))
            if place < drafts.shape[1]:
                said.append(drafts[:, place : place + 1])  # right as long as it is of use
        return torch.cat(picked, dim=1)

    def keep(self, kept: list[int], active: list[bool], ahead: int) -> None:
        """Row b keeps its first kept[b] columns of the window; all rows end in one column again.

        Room for `ahead` more columns is made by dropping those that no active row uses any more.
        """
        device = self.mask.device
        most = max(kept)
        self.cache.clock.filled += most
        self.next_position = self.next_position + torch.tensor(kept, device=device).unsqueeze(1)
        if min(kept) < most:
            self._shift(torch.tensor([most - count for count in kept], device=device))
        if self.filled + ahead > self.room:
            used = self.mask[torch.tensor(active, device=device), : self.filled]
            free = int((used.cumsum(1) == 0).sum(1).min())
            self._shift(torch.full((self.batch,), -free, device=device))
            self.cache.clock.filled -= free

    def _shift(self, by: torch.Tensor) -> None:
        """Move each row's columns to the right (or left where negative); what comes in from the left is masked."""
        columns = torch.arange(self.room, device=self.mask.device).unsqueeze(1)
        source = columns - by.unsqueeze(0)  # (room, batch)
        source = source.clamp(0, self.room - 1)
        for layer in self.cache.planned:
            for states in (layer.keys, layer.values):
                if states is not None:
                    index = source[:, :, None, None].expand(-1, -1, *states.shape[2:])
                    states.copy_(states.gather(0, index))
        self.mask.copy_(torch.where((columns < by).T, 0, self.mask.gather(1, source.T)))

    def _pass(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        depth: int,
        keep: int = 1,
        short: ShortHead | None = None,
    ) -> torch.Tensor:
        """The model's own forward over some new columns; logits of the last `keep` of them."""
        self.go_to(depth)
        end = self.filled + ids.shape[1]
        mask = self.mask[:, :end] if self.is_padded else None
        logits = self.stack.run(self.layer_pass, ids, mask, self.cache, positions, keep, short)
        self.cache.clock.filled = end
        return logits


class RowSampler:
    """Picks tokens for rows that are at different places of their texts, as `Sampler` does for one place.

    Noise is keyed by a token's index, so the draft, the verification and plain decoding draw the same at the same
    place: a seeded answer is the seeded full-depth answer.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.counts = [0] * sampler.history.shape[0]

    @property
    def is_plain_greedy(self) -> bool:
        return self.sampler.is_plain_greedy

    def pick(self, logits: torch.Tensor, indices: list[int], said: list[torch.Tensor]) -> torch.Tensor:
        """T_indices of every row; `said` are tokens behind those on record, (batch, 1) each."""
        scores = logits.float()
        if self.sampler.processors:
            ahead = torch.cat(said, dim=1) if said else None
            rows = [self._processed(row, scores[row : row + 1], ahead) for row in range(len(indices))]
            scores = torch.cat(rows)
        keys = self.sampler.keys
        if keys is None:
            return likeliest(scores)
        # Places behind the last token are looked at, and thrown away.
        places = torch.tensor([min(index, keys.shape[1] - 1) for index in indices], device=keys.device)
        noise = gumbel_noise(keys.gather(1, places.unsqueeze(1)).squeeze(1), scores.shape[-1])
        return (scores + noise).argmax(-1)

    def _processed(self, row: int, scores: torch.Tensor, ahead: torch.Tensor | None) -> torch.Tensor:
        text = self.sampler.history[row : row + 1, : self.sampler.prompt_length + self.counts[row]]
        if ahead is not None:
            text = torch.cat([text, ahead[row : row + 1]], dim=1)
        processed: torch.Tensor = self.sampler.processors(text, scores)
        return processed

    def record(self, row: int, tokens: list[int]) -> None:
        if not self.sampler.processors:  # nobody looks back, and writing would wait for the device
            return
        start = self.sampler.prompt_length + self.counts[row]
        room = self.sampler.history.shape[1] - start
        kept = tokens[:room]
        self.sampler.history[row, start : start + len(kept)] = torch.tensor(kept, device=self.sampler.history.device)
        self.counts[row] += len(kept)


class LosslessRun:
    """One batch from its prompts to its answers, window by window."""

    def __init__(
        self,
        decoder: LosslessDecoder,
        prompt: Prompt,
        texts: list[list[int]],
        sampler: Sampler,
        *,
        drafting: Drafting,
        lookup: int = LOOKUP,
        window: int = LONGEST,
    ) -> None:
        self.decoder = decoder
        self.chain = cast(Chain, decoder)  # where it chains
        self.prompt = prompt
        self.texts = texts
        self.last = [text[-1] for text in texts]
        self.answered = [0] * len(texts)
        self.active = [True] * len(texts)
        self.sampler = RowSampler(sampler)
        self.before = [Lookup(text, lookup) for text in texts] if lookup else []
        self.drafting = drafting
        self.longest = min(window, decoder.longest)
        self._ahead = False  # a plain step is on the way behind the one that is waited for
        self._begun: Drafter | None = None  # whose first draft is on the way behind a verification
        # The account, by row. What every token of the last window came from, by place.
        self.drafted, self.accepted, self.verifications = ([0] * len(texts) for _ in range(3))
        self.layer_passes = [decoder.stack.num_layers] * len(texts)  # the first token comes with the prompt
        self._sources: list[list[int | None]] = [[None] for _ in texts]

    def source_of(self, row: int, place: int) -> int | None:
        """What proposed a token of the last window: a depth, 0 for the text before, None for the full pass itself."""
        return self._sources[row][place]

    def windows(self, new_tokens: int) -> Iterator[list[list[int]]]:
        """By window, the tokens that each row got; a row that was ended from outside gets no more."""
        decoder, self.new_tokens = self.decoder, new_tokens
        if decoder.short_head is not None:
            decoder.short_head.start(token for text in self.texts for token in text)
        with torch.no_grad():
            decoder.prefill(self.prompt)
            first = self.sampler.pick(decoder.logits, [0] * len(self.last), [])
            got = self._take([[token] for token in first.tolist()])
            window = None
            if decoder.chains and self.sampler.is_plain_greedy and any(self.active):
                self.chain.begin(first)
                window = self._started()
        yield got
        while any(self.active):
            with torch.no_grad():
                # A chained window is begun before the last one's tokens are handed out: the device works meanwhile.
                got = self._take(self._window() if window is None else self._ended(window))
                window = self._started() if window is not None and decoder.chains and any(self.active) else None
            yield got
        self._drop_begun()

    def _take(self, got: list[list[int]]) -> list[list[int]]:
        for row, tokens in enumerate(got):
            tokens = tokens[: self.new_tokens - self.answered[row]] if self.active[row] else []
            got[row] = tokens
            if tokens:
                self.last[row] = tokens[-1]
            self.answered[row] += len(tokens)
            self.sampler.record(row, tokens)
            if self.before:
                self.before[row].add(tokens)
            if self.decoder.short_head is not None:
                self.decoder.short_head.add(tokens)
            if self.answered[row] >= self.new_tokens:
                self.active[row] = False
        return got

    @property
    def _position(self) -> int:
        return max(count for count, on in zip(self.answered, self.active, strict=True) if on)

    @property
    def _most(self) -> int:
        """Drafts that could still be of use."""
        left = max(self.new_tokens - count for count, on in zip(self.answered, self.active, strict=True) if on)
        return min(left - 1, self.longest)

    def _looked_up(self) -> list[list[int]]:
        """By row, drafts that cost no pass: what followed the same words before. None at all where that does not pay.

        Rows that find nothing get a token of the verification all the same, and no draft.
        """
        nothing: list[list[int]] = [[] for _ in self.texts]
        if not self.before or self._most < 1:
            return nothing
        found = [text.after(self._most) if on else [] for text, on in zip(self.before, self.active, strict=True)]
        share = sum(map(bool, found)) / sum(self.active)
        if share == 0 or not self.drafting.lookup_pays(self._position, share):
            return nothing
        width = self.drafting.found(self._position).window()
        return [drafts[:width] for drafts in found]

    def _window(self) -> list[list[int]]:
        """A window in the common way: any number of rows, any sampling, any device."""
        decoder, device = self.decoder, self.decoder.mask.device
        begun = time.perf_counter()
        last = torch.tensor([[token] for token in self.last], device=device)
        indices = [count - 1 for count in self.answered]
        again = self._looked_up()
        width = max(map(len, again))
        source: Drafter | None = self.drafting.lookup if width else None
        confidences: list[float] = []
        filled = [row + [0] * (width - len(row)) for row in again]
        drafts = torch.tensor(filled, device=device, dtype=torch.long)
        widths = [len(row) for row in again]
        if width == 0 and self._most > 0:
            drafts, source, confidences = self._drafts(last, indices)
            width = drafts.shape[1]
            widths = [width] * len(again)
        started = time.perf_counter()
        said = decoder.verify(self.sampler, last, drafts, indices)
        rows = said.tolist()  # waits for the device, once a window
        if device.type == "cpu" or not width or source is self.drafting.lookup:  # else the drafts' own time is in it
            self.drafting.pace.saw(f"verify {width + 1}", time.perf_counter() - started)
        right = (drafts == said[:, :width]).long().cumprod(1).sum(1).tolist() if width else [0] * len(rows)
        kept = [min(right[row], widths[row]) + 1 if self.active[row] else 1 for row in range(len(rows))]
        most = max(kept)
        kept = [kept[row] if self.active[row] else most for row in range(len(rows))]
        decoder.keep(kept, self.active, decoder.longest + 1)
        step = self.drafting.pace.seconds.get("verify 1") if device.type == "cpu" else None
        self._learn(source, widths, kept, confidences, None if step is None else (time.perf_counter() - begun) / step)
        return [tokens[:count] for tokens, count in zip(rows, kept, strict=True)]

    def _drafts(self, last: torch.Tensor, indices: list[int]) -> tuple[torch.Tensor, Drafter | None, list[float]]:
        drafter = self.drafting.choose(self._position)
        count = min(drafter.window(), self._most)
        if count == 0:
            return last[:, :0], None, []
        on_cpu = last.device.type == "cpu"

        def go_on(confidences: list[float]) -> bool:
            # The draft's own confidence ends a window earlier or later than the average would.
            return count > 1 and drafter.goes_on(math.prod(map(drafter.likelihood, confidences)))

        started = time.perf_counter()
        limit = self._most if on_cpu and count > 1 else count
        drafts, confidences = self.decoder.draft(
            self.sampler, last, indices, limit, drafter.depth, go_on if on_cpu else None
        )
        if on_cpu:
            self.drafting.pace.saw(f"draft {drafter.depth}", (time.perf_counter() - started) / drafts.shape[1])
        return drafts, drafter, confidences

    def _started(self) -> Chained:
        """Begin a window that the device goes through by itself; nothing is waited for.

        While drafting pauses, the next plain step is started before this one's token is known, as long as no lookup has
        found anything: then the device never waits for the host.
        """
        chain = self.chain
        if self._ahead:
            drafter = self.drafting.choose(self._position)
            drafter.window()
            self._ahead = self._goes_ahead()
            return Chained(None, 0, launched=True)
        (again,) = self._looked_up()
        if self.before:
            self.drafting.finds.saw(1, int(bool(again)))
        if again:
            self._drop_begun()
            chain.offer(again)
            chain.launch(len(again))
            return Chained(self.drafting.lookup, len(again), launched=True)
        drafter = self.drafting.choose(self._position) if self._begun is None else self._begun
        count = min(drafter.window(), self._most)
        if count == 0:
            self._drop_begun()
            chain.launch(0)
            self._ahead = self._goes_ahead()
            return Chained(None, 0, launched=True)
        width = min(count, 2)
        for step in range(0 if self._begun is None else 1, width):
            chain.draft_one(drafter.depth, step)
        self._begun = None
        return Chained(drafter, width, limit=self._most if count > 1 else 1)

    def _begin_next(self, width: int) -> None:
        """Start the next window's first draft behind a verification, so that the device does not wait for the host.

        Whatever the verification keeps, that draft stands behind it. It is lost where lookup finds something, or where
        the answer ends.
        """
        if self._most <= width + 1 or (self.before and self.drafting.finds.value > MOST_FINDS):
            return
        drafter = self.drafting.choose(self._position)
        if drafter.pays:
            self.chain.draft_one(drafter.depth, 0)
            self._begun = drafter

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self.layer_passes[0] += self._begun.depth
            self._begun = None

    def _goes_ahead(self) -> bool:
        """Start one more plain step, where the next window will be one too."""
        finds = any(text.after(1) for text in self.before)
        if finds or self._most < 1 or not self.drafting.pauses:
            return False
        self.chain.launch(0)
        return True

    def _ended(self, window: Chained) -> list[list[int]]:
        """Draft on while it pays, verify, and wait for the answer.

        The confidence of a draft is read while the next one runs, so the device never waits for the host here; a window
        that ends has one draft more than it wanted, which is verified all the same.
        """
        chain, drafter = self.chain, window.drafter
        if not window.launched:
            assert drafter is not None
            sure = 1.0
            for step in range(1, window.limit):
                if step >= window.width:
                    chain.draft_one(drafter.depth, step)
                    window.width = step + 1
                if not chain.chains:
                    break
                sure *= drafter.likelihood(chain.confidence(step - 1))
                if not drafter.goes_on(sure * drafter.acceptance):
                    break
            chain.launch(window.width)
            self._begin_next(window.width)
        if not chain.chains:  # a graph could not be captured
            self._begun = None
            return self._window()
        tokens, confidences = chain.collect()
        self._learn(drafter, [window.width], [len(tokens)], [] if window.launched else confidences[: window.width])
        return [tokens]

    def _learn(
        self,
        source: Drafter | None,
        widths: list[int],
        kept: list[int],
        confidences: Sequence[float],
        cost: float | None = None,
    ) -> None:
        """Account for a window, and tell its drafter what became of the drafts."""
        active = [row for row, on in enumerate(self.active) if on]
        passes = self.decoder.stack.num_layers + (0 if source is None else max(widths) * source.depth)
        for row in active:
            self.verifications[row] += 1
            self.layer_passes[row] += passes
            self.drafted[row] += widths[row]
            self.accepted[row] += kept[row] - 1
            self._sources[row] = [None if source is None else source.depth] * (kept[row] - 1) + [None]
        if source is self.drafting.lookup and len(self.texts) > 1:
            for row in active:
                source.saw(widths[row], kept[row] - 1)
        elif source is not None:  # rows share a window, so the shortest acceptance decides what longer ones would bring
            source.saw(max(widths), min(kept[row] - 1 for row in active), confidences, cost)


@dataclass
class Chained:
    """A window on the device: who drafts, how many drafts have been started, and how many there may be."""

    drafter: Drafter | None
    width: int
    limit: int = 0
    launched: bool = False  # its verification is on the way


def draft_depths(plan: Plan, repairs: Repairs) -> list[int]:
    """Depths worth drafting at: of those that have maps a few, else the one that the plan ends at."""
    layers = plan.num_layers
    mapped = sorted(depth for depth in repairs.at_depth if depth <= MOST_DEPTH * layers)
    if not mapped:
        return [plan.schedule.final_depth]
    return sorted({mapped[place * (len(mapped) - 1) // 3] for place in range(4)})


def drafting_for(stack: Stack, plan: Plan, repairs: Repairs, short_head: ShortHead | None) -> Drafting:
    """What an engine starts with: depths to draft at, and what a pass at each reads of a full one's bytes."""
    costs = Costs(stack, plan, repairs)
    spared = 0 if short_head is None else costs.head - short_head.nbytes
    shares = {depth: (costs.at(depth) - spared) / costs.full() for depth in draft_depths(plan, repairs)}
    return Drafting(stack.num_layers, shares)


def drafting_plan(num_layers: int) -> Plan:
    """What drafts where nothing was calibrated: three quarters of the layers, dropped from the middle outwards."""
    core = min(2, (num_layers - 1) // 2)
    least = max(2 * core, 1)
    return Plan.constant(num_layers, max(least, -(-num_layers * 3 // 4)), core_head=core, core_tail=core)
