"""Whether a token's logits are bitwise identical however many tokens run with it, and if not, why.

If they are, lossless answers match full depth bitwise: verifying several drafts gives the logits of single steps. Our
kernels for a few rows guarantee it. Anything they do not support runs on kernels whose summation order depends on the
number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from depthdecay.cuda.experts import are_plain
from depthdecay.cuda.kernels.split_attention import DTYPES, HEAD_SIZES
from depthdecay.library_internals import attention_name
from depthdecay.model.layers import LayerStack

UNCOMPILED = "layers are not compiled, so products run on cuBLAS, whose rounding depends on the number of tokens"
BATCHED = "several texts run in one batch, and its size changes how products round"


@dataclass
class Exactness:
    """What is known about one engine's compiled layers. Its decode steps and verifications share this verdict."""

    examined: bool = False
    tried: bool = False
    inexact: str | None = None  # why results may depend on the number of tokens; None if they do not

    def examine(self, stack: LayerStack) -> None:
        """Decide from the model's modules and config; done once."""
        if not self.examined:
            self.examined, self.inexact = True, why_inexact(stack)

    def tell(self, same_bits: bool) -> None:
        """Record the outcome of a trial run, which catches what the modules alone do not reveal."""
        self.tried = True
        if not same_bits:
            self.inexact = "a trial has shown that this model's logits depend on how many tokens run together"


def why_inexact(stack: LayerStack) -> str | None:
    """Why our kernels cannot run every product and attention of a pass; None if they can."""
    config = stack.config
    if stack.model.dtype not in DTYPES:
        return f"{str(stack.model.dtype).removeprefix('torch.')} products run on cuBLAS, whose rounding varies by shape"
    name = attention_name(config)
    if name == "sdpa" and stack.caps_scores:
        return "torch's SDPA ignores this model's attention softcap; load it with attn_implementation='eager'"
    if name != ("eager" if stack.caps_scores else "sdpa"):
        return f"this model's attention implementation is '{name}', which our kernel does not replace"
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size not in HEAD_SIZES:
        return f"our attention kernel supports head sizes {', '.join(map(str, HEAD_SIZES))}, not {size}"
    head = stack.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the LM head is a {type(head).__name__}, which our kernels do not support"
    for module in (head, *(module for layer in stack.layers for module in layer.modules())):
        reason = _why_unread(module)
        if reason is not None:
            return reason
    if not stack.takes_whole_masks:
        return "this model builds its attention masks itself, and treats tokens at equal positions differently"
    return None


def _why_unread(module: Any) -> str | None:
    """Why our kernels cannot multiply by a module's own matrices; None if they can, or if it has none."""
    from depthdecay.cuda.kernels.gemv import SKINNY_COLUMNS, is_even  # imports inductor

    matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    if not matrices:
        return None
    if are_plain(module):
        return None
    # A router is not a Linear but multiplies like one; the trial run verifies that.
    if type(module) is not nn.Linear and not type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
        return f"{type(module).__name__} multiplies by matrices our kernels do not support"
    (weight,) = matrices
    if not is_even(weight):
        rows, columns = weight.shape
        return f"a matrix of {rows} x {columns} does not divide into our kernels' blocks of {SKINNY_COLUMNS} columns"
    if weight.dtype not in DTYPES or not weight.is_contiguous():
        return f"a matrix is {weight.dtype} or not contiguous, which our kernels do not support"
    return None
