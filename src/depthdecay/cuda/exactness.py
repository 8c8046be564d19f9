"""Whether a token's logits have the same bits however many tokens run with it, and where not, why.

Then lossless answers are the full model's own to the last bit: a verification of several drafts says what single steps
would have said. Our kernels for a few rows promise it; what they do not fit runs by others, which choose the order of
their sums by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from depthdecay.cuda.experts import are_plain
from depthdecay.cuda.kernels.split_attention import HEAD_SIZES
from depthdecay.library_internals import attention_name
from depthdecay.model.layers import LayerStack

UNCOMPILED = "layers are not compiled, so that cuBLAS multiplies, which rounds by how many tokens run together"
BATCHED = "several texts run together, and how many there are changes how products round"


@dataclass
class Exactness:
    """What is known of one engine's compiled layers. Steps and verifications of one engine go by the same verdict."""

    examined: bool = False
    tried: bool = False
    inexact: str | None = None  # why bits may differ; None where they don't

    def examine(self, stack: LayerStack) -> None:
        """By what the model is made of; done once."""
        if not self.examined:
            self.examined, self.inexact = True, why_inexact(stack)

    def tell(self, same_bits: bool) -> None:
        """What a trial has shown: what a model is made of does not say all that its layers do."""
        self.tried = True
        if not same_bits:
            self.inexact = "a trial has shown that this model's logits depend on how many tokens run together"


def why_inexact(stack: LayerStack) -> str | None:
    """Why our kernels cannot run all that a pass multiplies and attends; None where they can."""
    config = stack.config
    if stack.model.dtype not in (torch.bfloat16, torch.float16):
        return f"products in {str(stack.model.dtype).removeprefix('torch.')} run by cuBLAS, which rounds by their shape"
    name = attention_name(config)
    if name == "sdpa" and stack.caps_scores:
        return "torch's attention leaves out the cap on this model's scores; load it with attn_implementation='eager'"
    if name != ("eager" if stack.caps_scores else "sdpa"):
        return f"this model's attention is '{name}', which our kernel does not stand in for"
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size not in HEAD_SIZES:
        return f"our attention kernel takes heads of {', '.join(map(str, HEAD_SIZES))} numbers, not of {size}"
    head = stack.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the output matrix is in a {type(head).__name__}, which our kernels do not read"
    for module in (head, *(module for layer in stack.layers for module in layer.modules())):
        reason = _why_unread(module)
        if reason is not None:
            return reason
    if not stack.takes_whole_masks:
        return "this model makes the masks of its attention itself, and tells equal positions apart"
    return None


def _why_unread(module: Any) -> str | None:
    """Why our kernels cannot multiply by a module's own matrices; None where they can, or where it has none."""
    from depthdecay.cuda.kernels.gemv import SKINNY_COLUMNS, is_even  # imports inductor

    matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    if not matrices:
        return None
    if are_plain(module):
        return None
    # A router has no Linear, but multiplies like one; a trial holds it to that.
    if type(module) is not nn.Linear and not type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
        return f"{type(module).__name__} multiplies by matrices that our kernels do not read"
    (weight,) = matrices
    if not is_even(weight):
        rows, columns = weight.shape
        return f"a matrix of {rows} x {columns} does not divide into our kernels' blocks of {SKINNY_COLUMNS} columns"
    if weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous():
        return f"a matrix is in {weight.dtype}, or not in one piece, which our kernels do not read"
    return None
