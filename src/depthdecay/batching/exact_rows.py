"""Batch-invariant answers: what they need, and a trial that checks them.

In an exact batch, kernels sum in an order that does not depend on the other rows. On CUDA these are the graphs of
`cuda/exact_layer_graphs`, and prompts are split into pieces by their own length alone (`batching/prompt_reading`). On a
CPU it is the compiled call that runs all passes of a quantized model (`cpu/compiled_rows`). Logits are processed in
groups of a fixed size (`engine/sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from depthdecay.batching.row import from_the_start
from depthdecay.cpu.compiled_stack import CompiledLayerStack
from depthdecay.engine.engine import Engine
from depthdecay.errors import DepthDecayError
from depthdecay.runners.block_runner import MOST_IN_STEPS
from depthdecay.runners.contract import Part

if TYPE_CHECKING:
    from depthdecay.batching.batcher import Batcher

ROWS_PICKED = 8  # rows whose logits are processed together
_TOKENS_COMPARED = 48  # of a text, where no graphs say how many rows a pass has


def require_exact(engine: Engine) -> None:
    """Raise where exactness cannot be guaranteed, before anything is compiled."""
    reason = why_inexact(engine)
    if reason is not None:
        raise DepthDecayError(f"answers cannot be exact here: {reason}")


def why_inexact(engine: Engine) -> str | None:
    """Why this model cannot be batch-invariant here; None where our kernels can run it."""
    if isinstance(engine.stack, CompiledLayerStack) and engine.stack.is_rounded:
        return None
    if not engine.uses_graphs:
        return (
            "only our kernels guarantee that, in graphs on CUDA and with quantized weights on a CPU, "
            f"and this model runs in another way on {engine.device}"
        )
    from depthdecay.cuda.exactness import UNCOMPILED

    if engine.compiled is None:
        return UNCOMPILED
    engine.compiled.exactness.examine(engine.stack)
    reason: str | None = engine.compiled.exactness.inexact
    return reason


def prove_exact(batcher: Batcher) -> None:
    """Compile and capture everything that steps need, then compare batched rows with the same rows alone."""
    batcher.runner.capture_ahead()
    depths = {batcher.stack.num_layers, *sorted(batcher.repairs.at_depth)[:1]}  # a depth with repair maps, if any
    if not all(_same_bits(batcher, depth) for depth in depths):
        raise DepthDecayError(
            "answers cannot be exact here: in a trial, this model's logits depended on the other rows of the batch"
        )


def _same_bits(batcher: Batcher, depth: int) -> bool:
    """Whether a text's logits are bitwise identical in one pass, and in passes of other widths with another text."""
    blocks, plan, layers = batcher.blocks, batcher.engine.drafting_plan, batcher.stack.num_layers
    vocabulary = batcher.stack.model.get_input_embeddings().weight.shape[0]
    graphs = batcher.runner.graphs
    together = _TOKENS_COMPARED if graphs is None else graphs.rows // 2  # the other half is for the other text
    tokens = min(together, MOST_IN_STEPS, batcher.max_positions)
    while not blocks.can_hold(needs := from_the_start(blocks.needs(batcher.engine.full_plan, tokens, 1))):
        tokens //= 2
    text, other = ([number * step % vocabulary for number in range(tokens)] for step in (31, 17))
    slots = [blocks.enter(needs)]
    if blocks.can_hold(needs):
        slots.append(blocks.enter(needs))

    def said(widths: Sequence[int], company: int) -> torch.Tensor:
        logits, at = [], 0
        for width in widths:
            parts = [Part(slots[0], at, text[at : at + width], depth, plan, wanted=width)]
            if company and len(slots) > 1:  # first, since it runs at full depth and parts come deepest first
                parts.insert(0, Part(slots[1], 0, other[:company], layers, plan, wanted=company))
            logits.append(batcher.runner.run(parts).logits[-width:])
            at += width
        return torch.cat(logits).view(torch.uint8)

    try:
        whole = said([tokens], 0)
        return all(torch.equal(said(widths, company), whole) for widths, company in _ways(tokens))
    finally:
        for slot in slots:
            blocks.leave(slot)


def _ways(tokens: int) -> list[tuple[list[int], int]]:
    """Pass widths over so many tokens, and rows of the other text: every graph size, and every position in it."""
    single, growing = [1] * min(16, tokens), [1]
    while sum(growing) < tokens:  # 1, 2, 3, 5, 9, 17, …: one more row than a graph holds
        growing.append(min(2 ** (len(growing) - 1) + 1, tokens - sum(growing)))
    rest = [tokens - len(single)] if tokens > len(single) else []
    return [(single + rest, 0), (growing, 0), (growing[::-1], min(7, tokens)), ([tokens], tokens)]
