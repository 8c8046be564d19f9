"""Training a draft head: windows are unrolled as in drafting, and each draft is compared with the full model.

The first draft of a window follows verified states; the second is fed by the head's own output for the first, and so
on. In training, every position of a text begins a window at once: at the d-th draft, a position attends to the keys of
verified states up to d positions before itself, and after them to the keys of the window's own drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from depthdecay.calibration.divergence import rows_on, weighted_kl
from depthdecay.calibration.head_states import StatesOfTexts, TextStates, output_matrix
from depthdecay.model.devices import fast_precision
from depthdecay.model.layers import LayerStack
from depthdecay.speculative.draft_head import DraftHead, KeysAndValues

FADING = 0.8  # weight of a draft relative to the one before it: later ones are used less often


class HeadFit:
    """A head with the rows of the model's LM head that make up its vocabulary."""

    def __init__(self, stack: LayerStack, head: DraftHead) -> None:
        self.stack, self.head = stack, head
        matrix = output_matrix(stack)
        # Products in 16 bits are several times as fast as in 32. Parameters stay in 32 bits.
        self.device = matrix.weight.device.type
        self.dtype = fast_precision(matrix.weight.device)
        with torch.no_grad():
            self.rows = matrix.weight.detach()[head.vocabulary].to(self.dtype)
            self.bias = None if matrix.bias is None else matrix.bias.detach()[head.vocabulary].to(self.dtype)
        self.rows_at_once = rows_on(matrix.weight.device, len(self.rows))

    def _numbers(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def start_closed_form(self, texts: StatesOfTexts, batches: Sequence[int], ridge: float = 3e-3) -> None:
        """Initialize `fc` as the best linear prediction of the input of the model's final norm."""
        normal = products = None
        for number in batches:
            inputs, wanted = self._linear_problem(texts.batch(number, self.head.shape))
            normal = inputs.T @ inputs if normal is None else normal + inputs.T @ inputs
            products = inputs.T @ wanted if products is None else products + inputs.T @ wanted
        assert normal is not None
        assert products is not None
        scale = normal.diagonal()
        solved = torch.linalg.solve(normal + torch.diag(ridge * scale + 1e-6 * scale.mean()), products).T
        width = self.head.fc.weight.shape[1]
        with torch.no_grad():
            self.head.fc.weight.copy_(solved[:, :width])
            if self.head.join is not None:
                self.head.join.weight.copy_(solved[:, width:])

    def _linear_problem(self, batch: TextStates) -> tuple[torch.Tensor, torch.Tensor]:
        """For positions that have a predecessor: the head's input, and the state with the final norm undone."""
        places = batch.valid[:, 1:]
        given = batch.states[:, :-1][places].float()
        if self.head.join is not None:
            given = torch.cat([given, batch.tokens[:, 1:][places].float()], dim=-1)
        scale = self.head.norm.weight.detach().float()
        is_small = scale.abs() < 1e-3  # the norm has erased the state there
        wanted = (batch.said[:, 1:][places].float() / scale.masked_fill(is_small, 1.0)).masked_fill(is_small, 0.0)
        return given, wanted

    def windows(self, batch: TextStates, drafts: int) -> list[torch.Tensor]:
        """The head's states (rows, columns, hidden) for the first draft at every position, for the second, …"""
        head = self.head
        tokens = batch.tokens.to(self.dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        angles = head.angles(positions, tokens.dtype)
        kept: list[KeysAndValues] = []
        states: list[torch.Tensor] = []
        with self._numbers():
            before = _shifted(head.joined(batch.states.to(self.dtype)))
            for _ in range(drafts):
                query, key, value = head.project(tokens, before, angles)
                kept.append((key, value))
                states.append(head.finish(tokens, before, window_attention(query, kept)))
                before = _shifted(states[-1])
        return states

    def normed(self, states: Sequence[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
        """The input of the LM head, (drafts, places, hidden)."""
        return torch.stack([self.head.norm(state[places]).to(self.dtype) for state in states])

    def said(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits over the head's vocabulary."""
        return functional.linear(normed.to(self.dtype), self.rows, self.bias)

    def divergence(self, batch: TextStates, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean KL of drafts to the full model, where predictions count; later drafts count less."""
        judged = [_judged(batch.valid, draft) & batch.answers for draft in range(len(states))]
        shares = [FADING**draft for draft in range(len(states))]
        places = judged[0]
        weights = torch.stack(
            [
                share / sum(shares) * inside[places] / inside.sum().clamp(min=1)
                for share, inside in zip(shares, judged, strict=True)
            ]
        )
        normed, wanted = self.normed(states, places), batch.said[places]
        return weighted_kl(normed, weights, self.said, wanted, self.said, self.rows_at_once)

    def loss(self, batch: TextStates, drafts: int) -> torch.Tensor:
        return self.divergence(batch, self.windows(batch, drafts))

    @torch.no_grad()
    def judge(self, texts: StatesOfTexts, drafts: int) -> HeadFigures:
        """The accuracy of each draft of a window, on the answers of texts."""
        right = torch.zeros(drafts)
        positions = torch.zeros(drafts)
        windows: list[int] = []
        loss = 0.0
        for number in range(len(texts)):
            batch = texts.batch(number, self.head.shape)
            assert batch.likeliest is not None
            states = self.windows(batch, drafts)
            loss += float(self.divergence(batch, states))
            hits = []
            for draft, state in enumerate(states):
                places = _judged(batch.valid, draft) & batch.answers
                told = torch.cat([self.said(self.head.norm(part)).argmax(-1) for part in state.split(1)])
                hit = (self.head.vocabulary[told] == batch.likeliest) & places
                hits.append(hit)
                right[draft] += int(hit.sum())
                positions[draft] += int(places.sum())
            windows += _window_lengths(torch.stack(hits), batch.answers & _judged(batch.valid, 0))
        shares = (right / positions.clamp(min=1)).tolist()
        mean = sum(windows) / max(1, len(windows))
        return HeadFigures(loss / max(1, len(texts)), shares, mean, int(positions[0]))


@dataclass(frozen=True)
class HeadFigures:
    """Draft accuracy on text that was not trained on."""

    kl: float
    right: list[float]  # accuracy by position in the window, given that all before were right
    tokens_a_window: float  # with windows of that many drafts, the full model's own token included
    positions: int


def window_attention(query: torch.Tensor, kept: Sequence[KeysAndValues]) -> torch.Tensor:
    """Attention of the d-th draft at every position, with the keys of all drafts before it; d = len(kept) - 1.

    Position j attends to keys of verified states at 1 to j - d, and to the s-th draft's key at j - d + s. (Position 0
    has no state before it, and so no key.)
    """
    draft = len(kept) - 1
    keys, values = kept[0]
    rows, heads, columns, size = query.shape
    groups = keys.shape[1]
    grouped = query.reshape(rows, groups, heads // groups, columns, size) * size**-0.5
    place = torch.arange(columns, device=query.device)
    visible = (place[None, :] <= place[:, None] - draft) & (place[None, :] > 0)
    visible[:, 0] |= ~visible.any(dim=1)  # these positions do not count; without any key they would be NaN
    scores = torch.einsum("bghqd,bgkd->bghqk", grouped, keys)
    scores = scores.masked_fill(~visible, float("-inf"))
    own = []
    for number in range(1, draft + 1):
        key = _shifted(kept[number][0], draft - number, 2)
        own.append(torch.einsum("bghqd,bgqd->bghq", grouped, key).unsqueeze(-1))
    # In the scores' own type: autocast would write and read them once more in 32 bits.
    weights = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=scores.dtype)
    mixed = torch.einsum("bghqk,bgkd->bghqd", weights[..., :columns], values)
    for number in range(1, draft + 1):
        value = _shifted(kept[number][1], draft - number, 2)
        mixed = mixed + weights[..., columns + number - 1, None] * value[:, :, None]
    return mixed.reshape(rows, heads, columns, size)


def _shifted(tensor: torch.Tensor, by: int = 1, dim: int = 1) -> torch.Tensor:
    """The tensor shifted by so many positions, filled with zeros."""
    if by == 0:
        return tensor
    pad = [0, 0] * (tensor.dim() - dim - 1) + [by, 0]
    return functional.pad(tensor, pad).narrow(dim, 0, tensor.shape[dim])


def _judged(valid: torch.Tensor, draft: int) -> torch.Tensor:
    """Positions whose window begins after a verified state."""
    judged = valid.clone()
    judged[:, : draft + 1] = False
    return judged


def _window_lengths(hits: torch.Tensor, places: torch.Tensor) -> list[int]:
    """Tokens of each window, one after another as in decoding a text. `hits`: (drafts, rows, columns)."""
    lengths = []
    for row, columns in enumerate(places):
        spots = columns.nonzero().squeeze(1).tolist()
        right = hits[:, row].T.tolist()
        place = 0
        while place < len(spots):
            run = 0
            while run < len(hits) and place + run < len(spots) and right[spots[place + run]][run]:
                run += 1
            lengths.append(run + 1)
            place += run + 1
    return lengths


def frequent_tokens(counts: torch.Tensor, size: int, always: Sequence[int] = ()) -> torch.Tensor:
    """The most frequent tokens, in ascending order; the lowest ids fill the rest."""
    counts = counts.clone()
    counts[list(always)] = counts.max() + 1
    size = min(size, len(counts))
    # Ties, such as tokens that never occurred, in the order of their ids: tokenizers list frequent tokens first.
    order = torch.sort(counts, descending=True, stable=True).indices[:size]
    return order.sort().values
