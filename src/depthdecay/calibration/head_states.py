"""Training data of a draft head: the full model's hidden states on whole texts, computed once if they fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from depthdecay.errors import UnsupportedModelError
from depthdecay.model.devices import free_bytes, in_fast_precision
from depthdecay.model.layers import LayerPass, LayerStack, primary_device
from depthdecay.patches import patched
from depthdecay.speculative.draft_head import HeadShape

Text = tuple[Sequence[int], Sequence[int]]  # a prompt and the model's answer, as token ids

_LOGIT_BYTES = 2**28
_SHARE_OF_HOST = 0.4  # the share of free host memory that states may take


@dataclass
class TextStates:
    """Some texts, padded on the right. Column j is about token x_j and what the full model predicts after it."""

    tokens: torch.Tensor  # (rows, columns, hidden): the output of the model's first layers for each token
    states: torch.Tensor  # (rows, columns, states · hidden): the full model's
    said: torch.Tensor  # (rows, columns, hidden): the input of the LM head
    likeliest: torch.Tensor | None  # (rows, columns): the top token, if it is needed
    valid: torch.Tensor  # (rows, columns): within the text
    answers: torch.Tensor  # (rows, columns): where the prediction counts, such as in the answer


@dataclass
class _Read:
    """The same for all heads: states by the layer that outputs them."""

    ids: torch.Tensor
    states: dict[int, torch.Tensor]
    said: torch.Tensor
    likeliest: torch.Tensor | None
    valid: torch.Tensor
    answers: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.said.nbytes + sum(state.nbytes for state in self.states.values())

    def on(self, device: torch.device) -> _Read:
        """A copy on the device; itself if it is there already."""
        if self.said.device == device:
            return self
        parts: dict[str, Any] = {name: part for name, part in vars(self).items() if name != "states"}
        parts = {name: None if part is None else part.to(device) for name, part in parts.items()}
        return _Read(states={layer: state.to(device) for layer, state in self.states.items()}, **parts)


class StatesOfTexts:
    """Batches of texts of similar length, cut to the last `longest` tokens, which contain the answer.

    Computed once for heads of all `shapes`.
    """

    def __init__(
        self,
        stack: LayerStack,
        shapes: Sequence[HeadShape],
        texts: Sequence[Text],
        *,
        rows: int,
        most_tokens: int = 2**20,
        longest: int,
        room: int,
        to_learn_from: bool = False,
        told: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """`rows`, `most_tokens`: of a batch, with its padding.

        `room`: bytes that states may take on the device; the rest goes to host memory, as far as it fits.

        What does not fit there either is computed again whenever it is needed. `to_learn_from`: predictions within
        prompts count too, since nobody drafts there, but a head learns from them for nothing; and the top tokens, which
        only judging needs, are left out.
        """
        self.stack = stack
        self.to_learn_from = to_learn_from
        self.layers = tuple(sorted({layer for shape in shapes for layer in (*shape.states, *_entry(shape))}))
        self.dtype = torch.bfloat16 if stack.model.dtype == torch.float32 else stack.model.dtype
        ordered = sorted((_cut(text, longest) for text in texts), key=lambda text: len(text[0]) + len(text[1]))
        self.batches = _batches(ordered, rows, most_tokens)
        self.tokens = sum(len(prompt) + len(answer) for prompt, answer in ordered)
        self._kept: dict[int, _Read] = {}
        elsewhere = primary_device(stack.model).type != "cpu"
        rooms = [(room, False), (int(_SHARE_OF_HOST * free_bytes(torch.device("cpu"))), True)][: 1 + elsewhere]
        for number in range(len(self.batches)):
            read = self._read(self.batches[number])
            while rooms and rooms[0][0] < read.nbytes:
                rooms.pop(0)
            if not rooms:
                break
            left, on_host = rooms[0]
            rooms[0] = left - read.nbytes, on_host
            self._kept[number] = read.on(torch.device("cpu")) if on_host else read
            told(number + 1, len(self.batches))

    def __len__(self) -> int:
        return len(self.batches)

    def batch(self, number: int, shape: HeadShape) -> TextStates:
        """The batch as a head of this shape sees it."""
        read = self._batch(number)
        entered = [read.states[layer] for layer in _entry(shape)] or [self._embedded(read.ids)]
        return TextStates(
            entered[0],
            torch.cat([read.states[layer] for layer in shape.states], dim=-1),
            read.said,
            read.likeliest,
            read.valid,
            read.answers,
        )

    @torch.no_grad()
    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.stack.model.get_input_embeddings()(ids)
        return embedded.to(self.dtype)

    def token_counts(self, vocabulary: int) -> torch.Tensor:
        """How often each token occurs in the answers."""
        spoken = [token for batch in self.batches for _, answer in batch for token in answer]
        return torch.bincount(torch.tensor(spoken, dtype=torch.long), minlength=vocabulary)[:vocabulary]

    def _batch(self, number: int) -> _Read:
        kept = self._kept.get(number)
        return self._read(self.batches[number]) if kept is None else kept.on(primary_device(self.stack.model))

    @torch.no_grad()
    def _read(self, texts: Sequence[Text]) -> _Read:
        device = primary_device(self.stack.model)
        columns = max(len(prompt) + len(answer) for prompt, answer in texts)
        ids = torch.zeros((len(texts), columns), dtype=torch.long)
        valid = torch.zeros((len(texts), columns), dtype=torch.bool)
        answers = torch.zeros((len(texts), columns), dtype=torch.bool)
        for row, (prompt, answer) in enumerate(texts):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor([*prompt, *answer])
            valid[row, :end] = True
            answers[row, 0 if self.to_learn_from else max(0, len(prompt) - 1) : end] = True
        ids = ids.to(device)
        layer_pass = LayerPass(asked=self.layers)
        said = self._forward(ids, layer_pass)
        return _Read(
            ids,
            {layer: layer_pass.states[layer].to(self.dtype) for layer in self.layers},
            said.to(self.dtype),
            None if self.to_learn_from else likeliest_tokens(output_matrix(self.stack), said),
            valid.to(device),
            answers.to(device),
        )

    def _forward(self, ids: torch.Tensor, layer_pass: LayerPass) -> torch.Tensor:
        """Run the model without its LM head, and return the LM head's input."""
        head = output_matrix(self.stack)
        found: list[torch.Tensor] = []

        def seen(hidden: torch.Tensor) -> torch.Tensor:
            found.append(hidden)
            return hidden[..., :1]

        model = self.stack.model
        routed = self.stack.routed(layer_pass)
        with self.stack.exclusive(), routed, patched(head, "forward", seen), in_fast_precision(model):
            model(input_ids=ids, use_cache=False)
        return found[0]


def output_matrix(stack: LayerStack) -> nn.Linear:
    head: Any = stack.model.get_output_embeddings()
    if type(head) is not nn.Linear or not head.weight.is_floating_point():
        raise UnsupportedModelError(
            f"a draft head needs a plain linear LM head in the model; that of {type(stack.model).__name__} is not"
        )
    return head


def likeliest_tokens(head: nn.Linear, said: torch.Tensor) -> torch.Tensor:
    """The top tokens, a few columns at a time: logits over the whole vocabulary are large.

    Where products run in 16 bits, their top two are compared again in the model's own precision.
    """
    step = max(1, _LOGIT_BYTES // (head.weight.element_size() * head.weight.shape[0] * said.shape[0]))
    found = []
    for part in said.split(step, dim=1):
        with in_fast_precision(head):
            logits = head(part)
        if logits.dtype == part.dtype:
            found.append(logits.argmax(-1))
            continue
        likely = logits.topk(2).indices
        exact = torch.einsum("rch,rckh->rck", part, head.weight[likely])
        if head.bias is not None:
            exact = exact + head.bias[likely]
        found.append(likely.gather(-1, exact.argmax(-1, keepdim=True)).squeeze(-1))
    return torch.cat(found, dim=1)


def _entry(shape: HeadShape) -> tuple[int, ...]:
    """The layer whose output a head uses for tokens; empty if it uses their embeddings."""
    return (shape.first_layers - 1,) if shape.first_layers else ()


def _batches(ordered: Sequence[Text], rows: int, most_tokens: int) -> list[list[Text]]:
    """Texts in the order of their length; a batch has at most so many rows and tokens, or one text."""
    found: list[list[Text]] = []
    for text in ordered:
        length = len(text[0]) + len(text[1])
        if not found or len(found[-1]) == rows or (len(found[-1]) + 1) * length > most_tokens:
            found.append([])
        found[-1].append(text)
    return found


def _cut(text: Text, longest: int) -> Text:
    prompt, answer = text
    answer = answer[:longest]
    return prompt[len(prompt) - min(len(prompt), longest - len(answer)) :], answer
