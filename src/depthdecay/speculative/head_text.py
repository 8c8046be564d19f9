"""A draft head for one text: its own KV cache, and the verified states that it still has to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from depthdecay.model.layers import LayerStack
from depthdecay.plan.plan import Plan
from depthdecay.speculative.draft_head import DraftHead

FirstLayers = Callable[[int, int], torch.Tensor]  # (token, position) to its state (1, hidden)

GROWTH = 256  # positions by which the cache grows at least
_BACKLOG = 6  # verified tokens to read before a draft, beyond which it follows a pause and not a window
LONGEST_READ = 1024  # positions of a prompt per pass, since attention scores are held for all heads


class PlacedHead:
    """A head together with a model: on its device, in its precision, with rows of its LM head."""

    def __init__(self, head: DraftHead, stack: LayerStack) -> None:
        head.shape.check(stack)
        matrix = stack.model.get_output_embeddings()
        self.stack = stack
        self.embedding = stack.model.get_input_embeddings()
        frequencies = head.frequencies  # kept in float32: 16 bits would garble the angles of large positions
        self.head = head.to(device=matrix.weight.device, dtype=matrix.weight.dtype)
        self.head.frequencies = frequencies.to(matrix.weight.device)
        self.weight = matrix.weight.detach()[self.head.vocabulary]
        self.bias = None if matrix.bias is None else matrix.bias.detach()[self.head.vocabulary]
        self.full_vocabulary = matrix.weight.shape[0]
        count = head.shape.first_layers
        self.first_layers = Plan.early_exit(stack.num_layers, max(1, count))  # the plan of the passes that it builds on

    @property
    def states(self) -> tuple[int, ...]:
        """Layers after which passes must return their states."""
        first = self.head.shape.first_layers
        return tuple(sorted({*self.head.shape.states, *([first - 1] if first else [])}))

    @property
    def nbytes(self) -> int:
        """Bytes that one draft reads."""
        return self.head.nbytes + self.weight.numel() * self.weight.element_size()

    def is_for(self, stack: LayerStack) -> bool:
        """Whether it is still on the model's device and in its precision."""
        weight = stack.model.get_output_embeddings().weight
        return weight.device == self.weight.device and weight.dtype == self.weight.dtype

    def text(self, first_layers: FirstLayers | None = None) -> HeadText:
        """Start a new text."""
        return HeadText(self, first_layers)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.head.norm(states), self.weight, self.bias)

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Spread the head's logits over the whole vocabulary, which is what samplers expect."""
        spread = logits.new_full((len(logits), self.full_vocabulary), float("-inf"))
        return spread.index_copy_(1, self.head.vocabulary, logits)


class HeadText:
    """One text. Position j holds token x_j, run with the full model's states at position j - 1.

    Positions after the last verified one are run again once their verified states are available.
    """

    def __init__(self, placed: PlacedHead, first_layers: FirstLayers | None = None) -> None:
        """`first_layers`: runs a token through the model's first layers, for a head that builds on them."""
        self.placed = placed
        self.head = placed.head
        self.first_layers = first_layers
        self.keys: torch.Tensor | None = None  # (1, heads, positions, size)
        self.values: torch.Tensor | None = None
        self.length = 1  # the next position to write keys at; position 0 has no preceding state
        self.tokens: list[int] = []  # from that position on, each with the verified state before it
        self.before: list[torch.Tensor] = []  # those states side by side: (tokens, states · hidden) each
        self.first: list[torch.Tensor] = []  # the first layers' output for those tokens, all but the last
        self.state: torch.Tensor | None = None  # the head's own, of the last draft

    def verified(self, tokens: Sequence[int], states: Mapping[int, torch.Tensor]) -> None:
        """Add verified tokens, each with the full model's states at the preceding position."""
        shape, count, dtype = self.head.shape, len(tokens), self.placed.weight.dtype
        self.before.append(torch.cat([states[layer][:count] for layer in shape.states], dim=-1))
        if shape.first_layers:
            known = 0 if self.tokens else 1  # whether the preceding token was already run, by its draft
            self.first.append(states[shape.first_layers - 1][known:count].to(dtype))
        self.tokens += tokens

    def read(self) -> None:
        """Catch up with the verified tokens, except the last, which the next draft starts with."""
        while len(self.tokens) > 1:
            self._step(min(len(self.tokens) - 1, LONGEST_READ))

    def catch_up(self) -> None:
        """Read a backlog of plain steps that is longer than what one window leaves."""
        if len(self.tokens) > _BACKLOG:
            self.read()

    def draft(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits (1, draft vocabulary) after this window's drafts so far; `tokens` excludes the last verified one."""
        if not tokens:
            while len(self.tokens) > LONGEST_READ:
                self._step(LONGEST_READ)
            self.state, logits = self._step(len(self.tokens), wants_logits=True)
        else:
            assert self.state is not None
            position = self.length + len(tokens) - 1
            self.state, logits = self._run(self._given(tokens[-1:], position), self.state, position, wants_logits=True)
        assert logits is not None
        return logits

    def _step(self, count: int, wants_logits: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the first verified tokens for good."""
        before = torch.cat(self.before)
        given = self._given(self.tokens[:count], self.length)
        state, logits = self._run_verified(given, before[:count], wants_logits)
        self.length += count
        self.tokens = self.tokens[count:]
        self.before = [before[count:]] if self.tokens else []
        return state[:, -1:], logits

    def _run_verified(
        self, given: torch.Tensor, states: torch.Tensor, wants_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`_run` for verified tokens, with the full model's states (tokens, states · hidden) before them."""
        before = self.head.joined(states.to(self.placed.weight.dtype))[None]
        return self._run(given, before, self.length, wants_logits)

    def _given(self, tokens: Sequence[int], position: int) -> torch.Tensor:
        """The head's input for consecutive tokens: embeddings, or the output of the model's first layers."""
        dtype = self.placed.weight.dtype
        if self.first_layers is None:
            ids = torch.tensor([tokens], device=self.placed.weight.device)
            embedded: torch.Tensor = self.placed.embedding(ids)
            return embedded.to(dtype)
        known = torch.cat(self.first) if self.first else None
        have = 0 if known is None else min(len(known), len(tokens))
        rows = [] if known is None else [known[:have]]
        self.first = [] if known is None or have == len(known) else [known[have:]]
        rows += [
            self.first_layers(token, position + place).to(dtype) for place, token in enumerate(tokens[have:], have)
        ]
        return torch.cat(rows)[None]

    def _run(
        self, given: torch.Tensor, before: torch.Tensor, position: int, wants_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's states over consecutive positions, and logits after the last one; writes keys and values."""
        head, device, count = self.head, before.device, given.shape[1]
        end = position + count
        self._make_room(end, before)
        assert self.keys is not None
        assert self.values is not None
        angles = head.angles(torch.arange(position, end, device=device)[None], before.dtype)
        query, key, value = head.project(given, before, angles)
        self.keys[:, :, position:end], self.values[:, :, position:end] = key, value
        mask = None
        if count > 1:
            places = torch.arange(1, end, device=device)
            mask = places[None, :] <= torch.arange(position, end, device=device)[:, None]
        seen = slice(1, end)
        mixed = functional.scaled_dot_product_attention(
            query, self.keys[:, :, seen], self.values[:, :, seen], mask, enable_gqa=True
        )
        state = head.finish(given, before, mixed)
        return state, self.placed.logits(state[:, -1]) if wants_logits else None

    def _make_room(self, positions: int, like: torch.Tensor) -> None:
        shape = self.head.shape
        held = 0 if self.keys is None else self.keys.shape[2]
        if positions <= held:
            return
        room = self.grown(held, positions)
        for name in ("keys", "values"):
            new = like.new_zeros((1, shape.key_value_heads, room, shape.head_size))
            old = getattr(self, name)
            if old is not None:
                new[:, :, :held] = old
            setattr(self, name, new)

    @staticmethod
    def grown(held: int, positions: int) -> int:
        return max(positions, held * 3 // 2) + GROWTH

    @property
    def cache_bytes(self) -> int:
        return 0 if self.keys is None else 2 * self.keys.numel() * self.keys.element_size()
