"""Lossless decoding: a shallow pass drafts, the full model checks several drafts at once and keeps what it would say.

Draft and verifier are one model with one cache. Drafts write keys and values only in the layers that they run; the
verification starts at the last token that is certain and writes all layers, so the cache is whole behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from .budget import Costs
from .cache import PlannedCache
from .decoding import EagerDecoder, Prompt
from .plan import Plan
from .repairs import Repairs
from .sampling import Sampler, gumbel_noise
from .stack import Stack
from .windows import Drafter, StepCosts, found_again

# What a further token in a verification costs until one has been timed: little, since reading weights is most of it.
_UNTIMED = 0.02


@dataclass
class Pace:
    """Seconds that passes took on this machine, as running means: what windows are chosen by."""

    seconds: dict[str, float] = field(default_factory=dict)

    def saw(self, kind: str, seconds: float) -> None:
        before = self.seconds.get(kind)
        self.seconds[kind] = seconds if before is None else 0.8 * before + 0.2 * min(seconds, 3 * before)

    def costs(self, draft_share: float) -> StepCosts:
        """In full-depth steps; what has not been timed yet is taken from the bytes that it reads."""
        step = self.seconds.get("verify 1")

        def verify(tokens: int) -> float:
            known = [int(kind.split()[1]) for kind in self.seconds if kind.startswith("verify") and kind != "verify 1"]
            if step is None or not known or tokens == 1:
                return 1.0 + _UNTIMED * (tokens - 1)
            nearest = min(known, key=lambda count: (abs(count - tokens), count))
            slope = (self.seconds[f"verify {nearest}"] / step - 1) / (nearest - 1)
            return max(1.0, 1.0 + slope * (tokens - 1))

        draft = self.seconds.get("draft")
        return StepCosts(draft_share if draft is None or step is None else draft / step, verify)


class LosslessDecoder(EagerDecoder):
    """Rows in lock-step windows, each accepted by its own length.

    Rows that got fewer tokens than others are moved to the right in the cache, so that all texts end in one column:
    then masks, windows and positions are those of a batch padded on the left, which every architecture knows.
    """

    def __init__(
        self, stack: Stack, plan: Plan, prompt: Prompt, new_tokens: int, repairs: Repairs, longest: int
    ) -> None:
        self.room = self._room(prompt.length + new_tokens + longest + 1)
        cache = PlannedCache([self.room] * stack.num_layers, stack.windows)
        super().__init__(stack, plan, cache, new_tokens, repairs)
        self.longest = longest
        self.is_busy = False
        self.batch = prompt.ids.shape[0]
        self.mask = torch.ones((self.batch, self.room), dtype=torch.long, device=prompt.ids.device)

    def _room(self, columns: int) -> int:
        return columns

    def fits(self, prompt: Prompt, new_tokens: int) -> bool:
        """Whether another request can be decoded in the same room."""
        return (
            self.batch == prompt.ids.shape[0]
            and new_tokens <= self.new_tokens
            and self._room(prompt.length + new_tokens + self.longest + 1) <= self.room
        )

    def prefill(self, prompt: Prompt) -> int:
        executed = super().prefill(prompt)
        self.mask.fill_(1)
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
        go_on: Callable[[float], bool] | None = None,
    ) -> torch.Tensor:
        """Tokens (batch, at most drafts) that a pass at this depth would say after `last`, T_indices of each row.

        Where `go_on` is given it is told how sure the window is so far (the least product of the picked tokens'
        probabilities of all rows), and may end it.
        """
        start, token = self.filled, last
        said: list[torch.Tensor] = []
        sure = torch.ones(self.batch, device=last.device)
        for step in range(drafts):
            logits = self._pass(token, self.next_position + step, depth)[:, -1]
            token = sampler.pick(logits, [index + 1 + step for index in indices], said).unsqueeze(1)
            said.append(token)
            if go_on is not None and step + 1 < drafts:
                sure = sure * logits.float().softmax(-1).gather(1, token).squeeze(1)
                if not go_on(float(sure.min())):
                    break
        self.cache.clock.filled = start  # drafts are taken back: the verification writes over them
        return torch.cat(said, dim=1)

    def verify(self, sampler: RowSampler, last: torch.Tensor, drafts: torch.Tensor, indices: list[int]) -> torch.Tensor:
        """What the full model says at every place of the window (batch, drafts + 1), given the drafts before it."""
        start = self.filled
        inputs = torch.cat([last, drafts], dim=1)
        steps = torch.arange(inputs.shape[1], device=inputs.device)
        logits = self._pass(inputs, self.next_position + steps, self.stack.num_layers, keep=inputs.shape[1])
        self.cache.clock.filled = start  # until `keep` says how much of it stays
        if sampler.is_plain_greedy:
            return logits.argmax(-1)
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

    def _pass(self, ids: torch.Tensor, positions: torch.Tensor, depth: int, keep: int = 1) -> torch.Tensor:
        """The model's own forward over some new columns; logits of the last `keep` of them."""
        self.go_to(depth)
        end = self.filled + ids.shape[1]
        logits = self.stack.run(self.layer_pass, ids, self.mask[:, :end], self.cache, positions, keep)
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
            return scores.argmax(-1)
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
        pace: Pace,
        lookup: bool = True,
    ) -> None:
        self.decoder = decoder
        self.prompt = prompt
        self.texts = [list(text) for text in texts]  # prompt and answer so far, by row
        self.answered = [0] * len(texts)
        self.active = [True] * len(texts)
        self.sampler = RowSampler(sampler)
        self.lookup = lookup
        self.pace = pace
        plan, longest = decoder.plan, decoder.longest
        self.depth = plan.schedule.final_depth
        costs = Costs(decoder.stack, plan, decoder.repairs)
        self.draft_share = costs.at(self.depth) / costs.full()
        self.shallow = Drafter(pace.costs(self.draft_share), longest=longest)
        self.found = Drafter(StepCosts(0.0), prior=0.6, longest=longest)
        # The account, by row. What every token of the last window came from, by place.
        self.drafted, self.accepted, self.verifications, self.layer_passes = ([0] * len(texts) for _ in range(4))
        self._sources: list[list[int | None]] = [[None] for _ in texts]

    def source_of(self, row: int, place: int) -> int | None:
        """What proposed a token of the last window: a depth, 0 for the text before, None for the full pass itself."""
        return self._sources[row][place]

    def windows(self, new_tokens: int) -> Iterator[list[list[int]]]:
        """By window, the tokens that each row got; a row that was ended from outside gets no more."""
        decoder, self.new_tokens = self.decoder, new_tokens
        with torch.no_grad():
            decoder.prefill(self.prompt)
            first = self.sampler.pick(decoder.logits, [0] * len(self.texts), [])
        yield self._take([[token] for token in first.tolist()])
        while any(self.active):
            with torch.no_grad():
                got = self._window()
            yield self._take(got)

    def _take(self, got: list[list[int]]) -> list[list[int]]:
        for row, tokens in enumerate(got):
            tokens = tokens[: self.new_tokens - self.answered[row]] if self.active[row] else []
            got[row] = tokens
            self.texts[row] += tokens
            self.answered[row] += len(tokens)
            self.sampler.record(row, tokens)
            if self.answered[row] >= self.new_tokens:
                self.active[row] = False
        return got

    def _window(self) -> list[list[int]]:
        decoder, device = self.decoder, self.decoder.mask.device
        last = torch.tensor([[text[-1]] for text in self.texts], device=device)
        indices = [count - 1 for count in self.answered]
        left = max(self.new_tokens - count for count, on in zip(self.answered, self.active, strict=True) if on)
        drafts, source = self._drafts(last, indices, min(left - 1, decoder.longest))
        width = 0 if drafts is None else drafts.shape[1]
        if drafts is None:
            drafts = last[:, :0]
        started = time.perf_counter()
        said = decoder.verify(self.sampler, last, drafts, indices)
        rows = said.tolist()  # waits for the device, once a window
        self.pace.saw(f"verify {width + 1}", time.perf_counter() - started)
        right = (drafts == said[:, :width]).long().cumprod(1).sum(1).tolist() if width else [0] * len(rows)
        kept = [right[row] + 1 if self.active[row] else 1 for row in range(len(rows))]
        most = max(kept)
        kept = [kept[row] if self.active[row] else most for row in range(len(rows))]
        decoder.keep(kept, self.active, decoder.longest + 1)
        self._learn(source, width, kept)
        return [tokens[:count] for tokens, count in zip(rows, kept, strict=True)]

    def _drafts(self, last: torch.Tensor, indices: list[int], most: int) -> tuple[torch.Tensor | None, Drafter | None]:
        """Drafts of whichever source pays, lookup first: it costs no pass."""
        if most < 1:
            return None, None
        if self.lookup and len(self.texts) == 1:
            again = found_again(self.texts[0], most)
            self.found.costs = StepCosts(0.0, self.pace.costs(self.draft_share).verify)
            wanted = min(self.found.window(), len(again)) if again else 0
            if wanted:
                return torch.tensor([again[:wanted]], device=last.device), self.found
        self.shallow.costs = self.pace.costs(self.draft_share)
        count = min(self.shallow.window(), most)
        if count == 0:
            return None, None
        on_cpu = last.device.type == "cpu"
        go_on = self.shallow.goes_on if on_cpu and count > 1 else None
        started = time.perf_counter()
        # The draft's own confidence ends a window earlier or later than the average would.
        limit = most if go_on is not None else count
        drafts = self.decoder.draft(self.sampler, last, indices, limit, self.depth, go_on)
        if on_cpu:
            self.pace.saw("draft", (time.perf_counter() - started) / drafts.shape[1])
        return drafts, self.shallow

    def _learn(self, source: Drafter | None, width: int, kept: list[int]) -> None:
        """Rows share a window, so the shortest acceptance decides what longer windows would bring."""
        active = [row for row, on in enumerate(self.active) if on]
        origin = None if source is None else 0 if source is self.found else self.depth
        passes = self.decoder.stack.num_layers + (width * self.depth if source is self.shallow else 0)
        for row in active:
            self.verifications[row] += 1
            self.layer_passes[row] += passes
            self.drafted[row] += width
            self.accepted[row] += kept[row] - 1
            self._sources[row] = [origin] * (kept[row] - 1) + [None]
        if source is not None:
            source.saw(width, min(kept[row] - 1 for row in active))


def drafting_plan(num_layers: int) -> Plan:
    """What drafts where nothing was calibrated: three quarters of the layers, dropped from the middle outwards."""
    core = min(2, (num_layers - 1) // 2)
    least = max(2 * core, 1)
    return Plan.constant(num_layers, max(least, -(-num_layers * 3 // 4)), core_head=core, core_tail=core)
