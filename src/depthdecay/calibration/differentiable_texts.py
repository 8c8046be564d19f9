"""Recorded texts that gradients can flow through, for training repair maps; read when a step needs them.

The layers are the model's own, run uncompiled, with frozen weights. The prompt's keys and values are constants; those
of the answer are concatenated to them in every pass. If a step's activations would fill the memory, layers are
recomputed in the backward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from depthdecay.calibration.continuations import Continuation
from depthdecay.calibration.recording import RecordedBatch, Recording, record
from depthdecay.model.devices import free_bytes
from depthdecay.model.kv_cache import LayerCache, PlannedCache
from depthdecay.model.layers import LayerPass, LayerStack, primary_device

_NUMBERS_A_LAYER = 40  # times the hidden size: the most values that backward needs per token and layer
_SHARE_OF_MEMORY = 0.25  # the most that recorded batches may take, and a step as well


class LayerBehindPrompt(LayerCache):
    """Stores only the prompt's keys and values; those of a later pass are concatenated, but not stored."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.clock.filled == 0:
            self.room = key_states.shape[2]
            return super().update(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        seen = slice(self._first_visible(), None)
        keys, values = (kept[seen].permute(1, 2, 0, 3) for kept in (self.keys, self.values))
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


@dataclass
class JudgedBatch(RecordedBatch):
    """A batch with the positions that a loss is taken at, precomputed: finding them would stall the device."""

    places: torch.Tensor  # flat indices of (row, column), row by row
    wanted: torch.Tensor  # (places, hidden): the full model's final hidden states there

    def judged(self, state: torch.Tensor) -> torch.Tensor:
        """A state (rows, columns, hidden) at these positions."""
        return state.flatten(0, 1).index_select(0, self.places)


class DifferentiableTexts(Recording):
    """Batches of texts by number, read again unless they fit in memory. Texts without a loss are left out.

    Of the full model's hidden states, those before the first dropped layer are kept, and those after the last layer
    where a loss is taken, from column `judged_from` on. `first`: the first layer that any column of any text drops; the
    columns of a short text may all drop later ones only.
    """

    def __init__(
        self, stack: LayerStack, texts: Sequence[Continuation], *, first: int, rows: int, judged_from: int = 0
    ) -> None:
        texts = [text for text in texts if len(text.tokens) - 1 > judged_from]
        super().__init__(stack, [], max((len(text.tokens) for text in texts), default=1) - 1)
        self.first = first
        self.judged_from = judged_from
        # Answers of similar length together, since every batch is padded to its longest.
        ordered = sorted(texts, key=lambda text: (len(text.tokens) // 16, len(text.prompt), text.prompt, text.tokens))
        self.texts = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
        self._free = free_bytes(primary_device(stack.model))
        self._kept: dict[int, JudgedBatch] = {}
        self._kept_bytes = 0.0

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, number: int) -> JudgedBatch:
        found = self._kept.get(number)
        if found is None:
            found = self._read(self.texts[number])
            size = _bytes_of(found)
            if self._kept_bytes + size <= _SHARE_OF_MEMORY * self._free:
                self._kept[number] = found
                self._kept_bytes += size
        return found

    def _read(self, texts: Sequence[Continuation]) -> JudgedBatch:
        found = record(self.stack, texts, max(len(text.tokens) for text in texts) - 1, LayerBehindPrompt)
        is_judged = found.valid.clone()
        is_judged[:, : self.judged_from] = False
        places = is_judged.flatten().nonzero().squeeze(1)
        wanted = found.states[-1].flatten(0, 1)[places]
        states = [state if index == self.first else state.new_empty(0) for index, state in enumerate(found.states)]
        for args, kwargs in found.calls[:1]:
            _forget_layers(self.first, (*args, *kwargs.values()))
        return JudgedBatch(found.inputs, found.targets, found.valid, found.calls, states, places, wanted)

    def first_kept(self, layer: int) -> int:
        return self.first

    def run_layer(self, batch: RecordedBatch, index: int, state: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and state.requires_grad and self._runs_again(state):
            return checkpoint(self._run, batch, index, state, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._run(batch, index, state)

    def _run(self, batch: RecordedBatch, index: int, state: torch.Tensor) -> torch.Tensor:
        args, kwargs = batch.calls[index]
        output = self.stack.layers[index](state, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def _runs_again(self, state: torch.Tensor) -> bool:
        held = state.numel() * state.element_size() * _NUMBERS_A_LAYER * self.stack.num_layers
        return held > _SHARE_OF_MEMORY * self._free


def logits_of(stack: LayerStack, states: torch.Tensor) -> torch.Tensor:
    """The logits of final hidden states (positions, hidden), each passed to the model's LM head as a one-token text."""
    last = stack.num_layers - 1

    def instead(index: int, _layer: Any, _forward: Any, args: Any, kwargs: Any) -> Any:
        hidden = states.unsqueeze(1) if index == last else (args[0] if args else kwargs["hidden_states"])
        return stack.answer(index, hidden)

    ids = torch.zeros((len(states), 1), dtype=torch.long, device=states.device)
    with stack.exclusive(), stack.routed(LayerPass(run_layer=instead)):
        logits: torch.Tensor = stack.model(input_ids=ids, use_cache=False).logits
    return logits.squeeze(1)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freezes all weights inside the block, which saves the memory of their gradients, and restores them afterwards."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def _forget_layers(count: int, arguments: Sequence[Any]) -> None:
    """Free the prompt's keys and values in the first layers: nothing is dropped there, so they never run again."""
    for cache in arguments:
        if isinstance(cache, PlannedCache):
            for layer in cache.planned[:count]:
                layer.keys = layer.values = torch.empty(0)


def _bytes_of(batch: JudgedBatch) -> float:
    """Bytes of hidden states and of the prompt's keys and values; masks and the like are shared by all layers."""
    states = batch.wanted.nbytes + sum(state.nbytes for state in batch.states)
    caches = {id(value): value for args, kwargs in batch.calls for value in (*args, *kwargs.values())}
    found = [value.nbytes for value in caches.values() if isinstance(value, PlannedCache)]
    return states + (sum(found) if found else math.inf)
