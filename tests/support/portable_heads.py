"""Random draft heads in the form that other engines load, and what our own code drafts with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import depthdecay as dd
from depthdecay.model.layers import LayerPass, LayerStack
from depthdecay.speculative.draft_head import HEAD_FILE, DraftHead, HeadShape, portable_states
from depthdecay.speculative.head_text import HeadText, PlacedHead


def portable_head(model: Any, vocabulary: torch.Tensor, seed: int = 0) -> DraftHead:
    """Drawn with a variance large enough that every tensor matters: a wrong or swapped one changes the drafts."""
    torch.manual_seed(seed)
    stack = LayerStack.of(model)
    head = DraftHead.new(stack, HeadShape.of(stack, states=portable_states(stack.num_layers)), vocabulary)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return head.requires_grad_(False)


def save_with_plan(head: DraftHead, folder: Path, num_layers: int, file: str = HEAD_FILE, **plan: Any) -> Path:
    """A plan folder with the head; the file name decides whether it is the plan's own or for other engines."""
    head.save(folder / file)
    named = file if file == HEAD_FILE else None
    replace(dd.Plan.full(num_layers), draft_head=named, **plan).save(folder)
    return folder


@dataclass(frozen=True)
class Drafts:
    """What follows a prompt: the full model's token, then the drafts, each with its logits."""

    tokens: list[int]
    logits: list[torch.Tensor]  # over the draft vocabulary, one fewer than tokens
    states: torch.Tensor  # the head's input at the prompt's positions, concatenated


def our_drafts(head: DraftHead, model: Any, prompt: list[int], count: int = 3) -> Drafts:
    stack = LayerStack.of(model)
    placed = PlacedHead(head, stack)
    layer_pass = LayerPass(asked=placed.states)
    with torch.no_grad(), stack.routed(layer_pass):
        said = stack.model(input_ids=torch.tensor([prompt]), use_cache=False).logits
    states = {layer: state[0] for layer, state in layer_pass.states.items()}
    tokens, logits = [int(said[0, -1].argmax())], []
    text = HeadText(placed)
    with torch.no_grad():
        text.verified([*prompt[1:], tokens[0]], states)
        for _ in range(count):
            logits.append(text.draft(tokens[1:])[0])
            tokens.append(int(head.vocabulary[logits[-1].argmax()]))
    return Drafts(tokens, logits, torch.cat([states[layer] for layer in head.shape.states], dim=-1))
