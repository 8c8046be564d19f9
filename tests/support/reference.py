"""Depth decay as plainly as possible: no cache, no graphs, none of the package's code that runs layers.

The whole text runs through the model again for every token. A hook after each layer keeps the layer's output where the
position runs it and restores its input elsewhere. That is exact because ladders are nested and depth never rises: a
position that runs a layer only attends to positions that ran it too.
"""

from __future__ import annotations

from typing import Any

import torch

from depthdecay.plan.plan import Plan


def decoder_layers(model: Any) -> Any:
    """The layers, found by each architecture's own names rather than by the package's rule."""
    for path in ("model.layers", "model.decoder.layers", "transformer.h", "gpt_neox.layers"):
        node = model
        for name in path.split("."):
            node = getattr(node, name, None)
        if node is not None:
            return node
    raise AssertionError(f"no layers found in {type(model).__name__}")


@torch.no_grad()
def reference_tokens(model: Any, plan: Plan, prompt: list[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """Greedy tokens and their depths."""
    text, depths = list(prompt), []
    for index in range(new_tokens):
        # Position p < len(prompt) is the prompt, at full depth; position len(prompt) + i - 1 is the pass of T_i.
        depth_of = [plan.num_layers] * len(prompt) + [plan.depth(i) for i in range(1, index + 1)]
        logits = logits_of(model, plan, text, depth_of)
        depths.append(plan.depth(index))
        text.append(int(logits.argmax()))
    return text[len(prompt) :], depths


def logits_of(model: Any, plan: Plan, text: list[int], depth_of: list[int]) -> torch.Tensor:
    handles = []
    for number, layer in enumerate(decoder_layers(model)):
        runs = torch.tensor([number in plan.layers(depth) for depth in depth_of])[None, :, None]

        def keep(_layer: Any, args: Any, kwargs: Any, output: Any, runs: torch.Tensor = runs) -> Any:
            before = args[0] if args else kwargs["hidden_states"]
            if isinstance(output, tuple):
                return (torch.where(runs, output[0], before), *output[1:])
            return torch.where(runs, output, before)

        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    try:
        return model(torch.tensor([text]), use_cache=False).logits[0, -1]
    finally:
        for handle in handles:
            handle.remove()
