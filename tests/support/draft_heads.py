"""Random draft heads, and the hidden states that they take as input."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import VOCABULARY

from depthdecay.model.layers import LayerPass, LayerStack
from depthdecay.speculative.draft_head import DraftHead, HeadShape


def random_head(model: Any, first_layers: int = 0, seed: int = 0, vocabulary: int = VOCABULARY) -> DraftHead:
    torch.manual_seed(seed)
    stack = LayerStack.of(model)
    head = DraftHead.new(stack, HeadShape.of(stack, first_layers=first_layers), torch.arange(vocabulary))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return head.requires_grad_(False)


def states_of(stack: LayerStack, tokens: list[int], layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
    layer_pass = LayerPass(asked=layers)
    with torch.no_grad(), stack.routed(layer_pass):
        stack.model(input_ids=torch.tensor([tokens]), use_cache=False)
    return {layer: state[0] for layer, state in layer_pass.states.items()}
