"""How tokens are picked inside windows that run as CUDA graphs: greedily, or with a sampler's settings.

Everything a pick needs is on the device: the text's noise keys by token index, and the set of tokens in the text so
far. The settings are baked into the graphs, so texts with other settings need other graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from depthdecay.cuda.kernels.keyed_pick import Seen
from depthdecay.engine.keyed_draw import PENALTY, are_on_gpu
from depthdecay.engine.sampling import Sampler, before_draw, processed, settings_alike
from depthdecay.runners.keyed_noise import gumbel_noise


def settings_of(sampler: Sampler) -> tuple[Any, ...] | None:
    """A key for the settings that graphs depend on; None if graphs cannot do what the sampler does."""
    if sampler.is_plain_greedy:
        return ()
    penalties = [processor for processor in sampler.processors if type(processor).__name__ == PENALTY]
    if len(penalties) > 1 or any(penalty.prompt_ignore_length for penalty in penalties):
        return None
    blind = settings_alike(processor for processor in sampler.processors if processor not in penalties)
    if blind is None:
        return None
    places = tuple(place for place, processor in enumerate(sampler.processors) if processor in penalties)
    return (sampler.is_sampling, *blind, *places, *(penalty.penalty for penalty in penalties))


class ChainPick:
    """Picks for one text at a time. Tensors keep their addresses, since graphs have captured them."""

    def __init__(self, vocabulary: int, room: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.keys = torch.zeros(room, dtype=torch.long, device=device)  # by the position before the picked token
        self.has = torch.zeros(vocabulary + 1, dtype=torch.bool, device=device)  # tokens of the text; the last: dummy
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
        return any(type(processor).__name__ == PENALTY for processor in self.sampler.processors)

    def prepare(self, sampler: Sampler) -> None:
        """Prepare for a text with this sampler, whose settings graphs must support."""
        settings = settings_of(sampler)
        assert settings is not None
        self.sampler, self.settings = sampler, settings

    def begin(self, text: torch.Tensor, token: int) -> None:
        """Start from the text that was prefilled and the token after it."""
        if self.is_greedy:
            return
        assert self.sampler is not None
        if self.sampler.keys is not None:
            # The token after position p has the index p + 1 - prompt; tokens beyond the last key are discarded.
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
        """The token (1) after a window's drafts so far, as an index into the logits; `rows`: their token ids."""
        return self._pick(logits, ids, drafted, position, rows)

    def verified(self, logits: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The full model's pick after every token of a window (rows)."""
        return self._pick(logits, ids, torch.arange(ids.shape[1], device=ids.device), positions, None)

    def take(self, ids: torch.Tensor, kept: torch.Tensor, last: torch.Tensor) -> None:
        """Add the first tokens of a window, and the one after them, to the text."""
        if self.is_greedy or not self._penalises:
            return
        places = torch.arange(ids.shape[1], device=ids.device)
        self.has.index_fill_(0, torch.where(places < kept, ids[0], self.vocabulary), True)
        self.has.index_fill_(0, last, True)
        self.has[-1:].fill_(False)

    def _with_window(self, ids: torch.Tensor, upto: torch.Tensor) -> torch.Tensor:
        """Per row, the set of tokens in the text and in the window up to that position."""
        places = torch.arange(ids.shape[1], device=ids.device)
        own = torch.where(places <= upto.unsqueeze(1), ids, self.vocabulary)
        return self.has.expand(len(upto), -1).scatter(1, own, True)

    def _pick(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        upto: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """`upto` (rows): the place in the window, whose tokens are `ids`, that each row follows."""
        assert self.sampler is not None
        draw = self.sampler.draw if are_on_gpu(logits) else None
        by_kernel = draw is not None and draw.penalises
        has = None
        if self._penalises and not by_kernel:
            has = self._with_window(ids, upto)[:, :-1]
            has = has if rows is None else has[:, rows]
        nothing, keys = self.sampler.history[:0], self.keys[positions]
        if draw is not None:
            seen = Seen(self.has.unsqueeze(0), ids[0], upto) if by_kernel else None
            return draw.pick(before_draw(draw, nothing, logits, has), keys, rows, seen)
        scores = processed(self.sampler.processors, nothing, logits.float(), has)
        if self.sampler.keys is None:
            return scores.argmax(-1)
        return (scores + gumbel_noise(keys, scores.shape[-1], rows)).argmax(-1)
