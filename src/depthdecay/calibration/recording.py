"""The full model's hidden states on given texts, with each layer callable on its own: the basis of calibration.

Texts are recorded in batches. The prompt's keys and values are computed once, at full depth, as in decoding; then all
generated tokens run in one teacher-forced pass, in which every layer's other arguments (mask, rotary embedding, cache)
are kept. So a layer can be run again, on its own, on the hidden states that a shallower model would give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from depthdecay.calibration.continuations import Continuation
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.model.kv_cache import LayerCache, PlannedCache, Prompt
from depthdecay.model.layers import LayerPass, LayerStack, primary_device


@dataclass
class RecordedBatch:
    """Some texts after their prefill. Column j has input T_j and predicts T_(j+1)."""

    inputs: torch.Tensor  # (rows, columns)
    targets: torch.Tensor  # (rows, columns): the full model's next token
    valid: torch.Tensor  # (rows, columns): within the text, before padding
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]  # each layer's arguments besides the state
    states: list[torch.Tensor]  # the full model's: before layer 0, …, after the last (rows, columns, hidden)


class Recording:
    """Batches of texts on one model."""

    def __init__(self, stack: LayerStack, batches: list[RecordedBatch], columns: int) -> None:
        self.stack = stack
        self.batches = batches
        self.columns = columns

    @classmethod
    def of(
        cls,
        stack: LayerStack,
        texts: Sequence[Continuation],
        *,
        rows: int = 32,
        progress: Callable[[int, int], None] = lambda done, total: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Recording:
        """`enough`: asked after each batch, whether the others are left out."""
        texts = [text for text in texts if len(text.tokens) > 1]  # a text of one token has no decode step
        if not texts:
            raise DepthDecayError("the model ends every answer at its first token; there is nothing to calibrate on")
        columns = max(len(text.tokens) for text in texts) - 1
        ordered = sorted(texts, key=lambda text: (len(text.prompt), text.prompt))  # little padding
        starts = range(0, len(ordered), rows)
        batches: dict[int, RecordedBatch] = {}
        done = 0
        for start in Random(0).sample(starts, len(starts)):  # so that a few batches have texts of all lengths
            batches[start] = record(stack, ordered[start : start + rows], columns)
            done += batches[start].inputs.shape[0]
            progress(done, len(ordered))
            if enough():
                break
        return cls(stack, [batches[start] for start in starts if start in batches], columns)

    @property
    def tokens(self) -> int:
        return sum(int(batch.valid.sum()) for batch in self.batches)

    @property
    def prompts(self) -> int:
        return sum(batch.inputs.shape[0] for batch in self.batches)

    @torch.no_grad()
    def run_layer(self, batch: RecordedBatch, index: int, state: torch.Tensor) -> torch.Tensor:
        """One layer on other states of the same texts."""
        args, kwargs = batch.calls[index]
        output = self.stack.layers[index](state, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def first_kept(self, layer: int) -> int:
        """The layer nearest before this one, or itself, whose input was kept."""
        return layer

    @torch.no_grad()
    def logits(self, batch: RecordedBatch, state: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Logits of final hidden states, a few rows at a time, since vocabularies are large."""
        vocabulary = self.stack.model.get_input_embeddings().weight.shape[0]
        room = _LOGIT_BYTES if state.device.type == "cuda" else _LOGIT_BYTES // 8
        rows = max(1, room // (4 * vocabulary * state.shape[1]))
        last = self.stack.num_layers - 1
        for start in range(0, state.shape[0], rows):
            part = slice(start, start + rows)

            def instead(index: int, _layer: Any, _forward: Any, args: Any, kwargs: Any, part: slice = part) -> Any:
                hidden = state[part] if index == last else (args[0] if args else kwargs["hidden_states"])
                return self.stack.answer(index, hidden)

            with self.stack.exclusive(), self.stack.routed(LayerPass(run_layer=instead)):
                logits = self.stack.model(input_ids=batch.inputs[part], use_cache=False).logits
            yield part, logits  # outside the context: callers may interleave two such iterations


_LOGIT_BYTES = 2**31


@torch.no_grad()
def record(
    stack: LayerStack, texts: Sequence[Continuation], columns: int, cache_layer: type[LayerCache] = LayerCache
) -> RecordedBatch:
    """Record some texts, padded to `columns`."""
    device = primary_device(stack.model)
    prompt = Prompt.pad([list(text.prompt) for text in texts], 0, device)
    tokens = torch.zeros((len(texts), columns + 1), dtype=torch.long)
    valid = torch.zeros((len(texts), columns), dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        valid[row, : len(text.tokens) - 1] = True
    tokens, valid = tokens.to(device), valid.to(device)
    cache = PlannedCache([prompt.length + columns] * stack.num_layers, stack.windows, cache_layer)
    calls: list[Any] = [None] * stack.num_layers
    states: list[Any] = [None] * (stack.num_layers + 1)

    def watch(index: int, _layer: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        state = args[0] if args else kwargs.pop("hidden_states")
        calls[index], states[index] = (args[1:], kwargs), state
        output = forward(state, *args[1:], **kwargs)
        states[index + 1] = output[0] if isinstance(output, tuple) else output
        return output

    with stack.exclusive():
        # Logits of one column only, here and below: those of a long prompt would fill the memory.
        stack.run(LayerPass(), prompt.ids, prompt.mask, cache, prompt.position_ids)
        # Not advanced again: layers that run again overwrite their earlier keys and values.
        cache.clock.filled = prompt.length
        mask = None
        if prompt.mask is not None:
            mask = torch.cat([prompt.mask, prompt.mask.new_ones((len(texts), columns))], dim=1)
        later = prompt.position_ids[:, -1:] + 1 + torch.arange(columns, device=device)
        stack.run(LayerPass(run_layer=watch), tokens[:, :-1], mask, cache, later)
    if not all(torch.isfinite(states[-1][row]).all() for row in range(len(texts))):
        raise ArgumentError(
            "the model's hidden states are not finite (NaN or infinity); try dtype fp32 or bf16", "dtype"
        )
    return RecordedBatch(tokens[:, :-1], tokens[:, 1:], valid, calls, states)
