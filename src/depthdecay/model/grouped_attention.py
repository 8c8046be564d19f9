"""Attention while decoding, in place of transformers' own: heads that share keys, asked as if they were tokens.

transformers finds the function by its name, for all models of the process. So what stands there asks the module that
attends which function it has for now; modules are marked under their model's lock, and all others get the original.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from depthdecay.library_internals import attention_function, attention_name, attention_registered
from depthdecay.patches import SharedPatch, replaced_each

if TYPE_CHECKING:
    from depthdecay.model.layers import LayerStack

Attention = Callable[..., Any]
_MARK = "depthdecay_attention"


def is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for nothing beyond a softmax over the keys."""
    special = ("position_bias", "softcap", "s_aux")
    return not kwargs.get("dropout") and all(kwargs.get(name) is None for name in special)


def scaling_of(query: torch.Tensor, kwargs: dict[str, Any]) -> float:
    """What a call multiplies scores by; where it does not say, as torch does."""
    scaling = kwargs.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


@functools.cache
def grouped(original: Attention) -> Attention:
    """transformers' sdpa function, with the heads that share keys asked as if they were tokens.

    transformers copies keys and values for every head, which for a batch takes longer than the layer's matrices do.
    """

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        shares = query.shape[1] > key.shape[1] and query.shape[2] == 1
        if not (is_plain(kwargs) and shares and (mask is None or mask.shape[1] == 1)):
            return original(module, query, key, value, mask, **kwargs)
        batch, heads, _, size = query.shape
        folded = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
        found = functional.scaled_dot_product_attention(folded, key, value, mask, scale=kwargs.get("scaling"))
        return found.reshape(batch, 1, heads, value.shape[-1]), None

    return forward


@functools.cache
def _as_marked(original: Attention) -> Attention:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(module, _MARK, original)(module, *args, **kwargs)

    forward.__wrapped__ = original  # type: ignore[attr-defined]
    return forward


_DISPATCHED = SharedPatch(lambda: attention_registered("sdpa", _as_marked(attention_function("sdpa"))))


def grouped_attention(stack: LayerStack) -> contextlib.AbstractContextManager[None]:
    """While open, models that use torch's attention copy no keys for heads that share them."""
    return replaced_attention(stack, grouped)


@contextlib.contextmanager
def replaced_attention(stack: LayerStack, made: Callable[[Attention], Attention]) -> Iterator[None]:
    """While open, this model's attention is what is made of transformers' function; for one pass, under its lock."""
    if attention_name(stack.config) != "sdpa":
        yield
        return
    with stack.exclusive(), _DISPATCHED.made():
        dispatched: Any = attention_function("sdpa")
        own = made(dispatched.__wrapped__)
        with replaced_each(stack.attending, _MARK, itertools.repeat(own, len(stack.attending))):
            yield
