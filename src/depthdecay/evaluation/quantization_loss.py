"""Quantization loss: next-token distributions of quantized weights compared with the model's, on its greedy text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from depthdecay.calibration.continuations import Continuation, continue_prompts, variety
from depthdecay.calibration.fidelity import compare
from depthdecay.cpu.choose_stack import open_stack
from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.model.repairs import Repairs
from depthdecay.plan.plan import Plan
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Part
from depthdecay.runners.kv_blocks import KVBlocks

NEW_TOKENS = 64


def measure_rounding(
    loaded: LoadedModel,
    settings: tuple[str, ...],
    prompts: int,
    new_tokens: int = NEW_TOKENS,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """For each setting, the mean KL (nats) and the share of positions where both would pick the same token."""
    plain = LayerStack.of(loaded.model)
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    limit = plain.context_limit()
    longest = None if limit is None else limit - new_tokens
    ids = variety(prompts, loaded.tokenizer, vocabulary=vocabulary, longest=longest, seed=0, besides=[])
    if not ids:
        raise DepthDecayError("fidelity is measured on the package's own prompts, which need a tokenizer")
    progress("the model answers prompts")
    texts = continue_prompts(Engine(loaded.model, compile=False), ids, new_tokens, batch=8)
    stacks = {
        setting: open_stack(loaded.model, quantize=setting, origin=loaded.origin, say=progress) for setting in settings
    }
    sums = {setting: torch.zeros(2, dtype=torch.float64) for setting in settings}
    tokens = 0
    for number, text in enumerate(texts, start=1):
        progress(f"text {number} of {len(texts)}")
        expected, targets = _logits(plain, text), torch.tensor([text.tokens])
        tokens += len(text.tokens)
        for setting, stack in stacks.items():
            figures = compare(expected, _logits(stack, text), targets)
            sums[setting] += figures[:2].sum((1, 2)).double()
    found = {
        setting: {"kl": float(total[0]) / tokens, "agreement": float(total[1]) / tokens}
        for setting, total in sums.items()
    }
    return {
        **{"model": loaded.shown_name, "against": str(loaded.model.dtype).removeprefix("torch.")},
        **{"prompts": len(texts), "tokens": tokens, "settings": found},
    }


def _logits(stack: LayerStack, text: Continuation) -> torch.Tensor:
    """The logits at every position of the answer, given the preceding text."""
    ids, layers = [*text.prompt, *text.tokens[:-1]], stack.num_layers
    blocks = KVBlocks.of_rows(stack.kept_shapes(), [[len(ids)] * layers])
    part = Part(0, 0, ids, layers, Plan.full(layers), wanted=len(text.tokens))
    return BlockRunner(stack, blocks, Repairs()).run([part]).logits.unsqueeze(0).float()
