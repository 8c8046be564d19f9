"""How tokens are picked inside windows that the device goes through by itself: greedily, or by a sampler's settings.

Everything that a pick needs lies on the device: the noise keys of the text by token index, and which tokens the text
has so far. The settings themselves are part of the graphs, so texts with other settings have graphs of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from depthdecay.engine.sampling import Sampler, gumbel_noise, processed, settings_alike

_PENALTY = "RepetitionPenaltyLogitsProcessor"


def settings_of(sampler: Sampler) -> tuple[Any, ...] | None:
    """What picks of this sampler are told apart by; None where graphs cannot do what it does."""
    if sampler.is_plain_greedy:
        return ()
    penalties = [processor for processor in sampler.processors if type(processor).__name__ == _PENALTY]
    if len(penalties) > 1 or any(penalty.prompt_ignore_length for penalty in penalties):
        return None
    blind = settings_alike(processor for processor in sampler.processors if processor not in penalties)
    if blind is None:
        return None
    places = tuple(place for place, processor in enumerate(sampler.processors) if processor in penalties)
    return (sampler.is_sampling, *blind, *places, *(penalty.penalty for penalty in penalties))


class ChainPick:
    """Picks for one text at a time. Tensors stay where they are, since graphs have captured them."""

    def __init__(self, vocabulary: int, room: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.keys = torch.zeros(room, dtype=torch.long, device=device)  # by position of the token that is picked behind
        self.has = torch.zeros(vocabulary + 1, dtype=torch.bool, device=device)  # tokens of the text; the last: nothing
        self.settings: tuple[Any, ...] = ()
        self.sampler: Sampler | None = None

    @property
    def changing(self) -> list[torch.Tensor]:
        return [self.has]

    @property
    def is_greedy(self) -> bool:
        return not self.settings

    @property
    def _penalises(self) -> bool:
        assert self.sampler is not None
        return any(type(processor).__name__ == _PENALTY for processor in self.sampler.processors)

    def prepare(self, sampler: Sampler) -> None:
        """For a text of this sampler's, whose settings graphs can follow."""
        settings = settings_of(sampler)
        assert settings is not None
        self.sampler, self.settings = sampler, settings

    def begin(self, text: torch.Tensor, token: int) -> None:
        """The text that was read, and the token behind it."""
        if self.is_greedy:
            return
        assert self.sampler is not None
        if self.sampler.keys is not None:
            # The token behind position p has the index p + 1 - prompt; what comes behind the last one is thrown away.
            first, keys = self.sampler.prompt_length - 1, self.sampler.keys[0]
            count = min(len(keys), len(self.keys) - first)
            self.keys[first : first + count] = keys[:count]
            self.keys[first + count :] = keys[-1]
        self.has.zero_()
        self.has[text] = True
        self.has[token] = True

    def draft(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor | None,
        ids: torch.Tensor,
        drafted: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """The token (1) behind a window's drafts so far, as the place of one of the logits; `rows`: their tokens."""
        has = self._with_window(ids, drafted)[:, :-1] if self._penalises else None
        if has is not None and rows is not None:
            has = has[:, rows]
        return self._pick(logits, has, position, rows)

    def verified(self, logits: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the full model says behind every token of a window (rows)."""
        has = None
        if self._penalises:
            has = self._with_window(ids, torch.arange(ids.shape[1], device=ids.device))[:, :-1]
        return self._pick(logits, has, positions, None)

    def take(self, ids: torch.Tensor, kept: torch.Tensor, last: torch.Tensor) -> None:
        """The text has the first tokens of a window now, and the one behind them."""
        if self.is_greedy or not self._penalises:
            return
        places = torch.arange(ids.shape[1], device=ids.device)
        self.has.index_fill_(0, torch.where(places < kept, ids[0], self.vocabulary), True)
        self.has.index_fill_(0, last, True)
        self.has[-1:].fill_(False)

    def _with_window(self, ids: torch.Tensor, upto: torch.Tensor) -> torch.Tensor:
        """By row, which tokens the text has with the window's own up to that place."""
        places = torch.arange(ids.shape[1], device=ids.device)
        own = torch.where(places <= upto.unsqueeze(1), ids, self.vocabulary)
        return self.has.expand(len(upto), -1).scatter(1, own, True)

    def _pick(
        self, logits: torch.Tensor, has: torch.Tensor | None, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.sampler is not None
        scores = processed(self.sampler.processors, self.sampler.history[:0], logits.float(), has)
        if self.sampler.keys is None:
            return scores.argmax(-1)
        return (scores + gumbel_noise(self.keys[positions], scores.shape[-1], rows)).argmax(-1)
