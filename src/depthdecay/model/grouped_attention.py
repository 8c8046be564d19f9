"""Decode attention that replaces transformers' own: query heads that share keys are folded into the token dimension.

transformers looks the function up by name, for all models in the process. So the registered function dispatches on the
calling module: modules are marked under their model's lock, and all others get the original.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from depthdecay.library_internals import (
    attention_function,
    attention_name,
    attention_named,
    attention_registered,
    eager_attention,
)
from depthdecay.patches import SharedPatch, replaced_each

if TYPE_CHECKING:
    from depthdecay.model.layers import LayerStack

Attention = Callable[..., Any]
_MARK = "depthdecay_attention"


def is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether a call requests nothing beyond a softmax over the keys."""
    special = ("position_bias", "softcap", "s_aux")
    return not kwargs.get("dropout") and all(kwargs.get(name) is None for name in special)


def scaling_of(query: torch.Tensor, kwargs: dict[str, Any]) -> float:
    """The call's scale for scores, or torch's default."""
    scaling = kwargs.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


@functools.cache
def grouped(original: Attention) -> Attention:
    """transformers' sdpa function, with query heads that share keys folded into the token dimension.

    transformers copies keys and values for every head, which for a batch takes longer than the layer's matmuls.
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
_OWN_NAME = "depthdecay_marked"
_REGISTERED = SharedPatch(lambda: attention_registered(_OWN_NAME, _as_marked(_unmarked)))


def _unmarked(module: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(f"{type(module).__name__} called attention, but depthdecay has not marked it")


def grouped_attention(stack: LayerStack) -> contextlib.AbstractContextManager[None]:
    """While open, a model that uses torch's attention copies no keys for heads that share them."""
    return replaced_attention(stack, lambda original, _window: grouped(original))


@contextlib.contextmanager
def replaced_attention(stack: LayerStack, made: Callable[[Attention, int | None], Attention]) -> Iterator[None]:
    """While open, this model's attention is `made` from transformers' function and each layer's window.

    For one pass, under the model's lock.
    """
    if attention_name(stack.config) != "sdpa":
        yield
        return
    with stack.exclusive(), _DISPATCHED.made():
        dispatched: Any = attention_function("sdpa")
        with _marked(stack, functools.partial(made, dispatched.__wrapped__)):
            yield


@contextlib.contextmanager
def replaced_eager_attention(stack: LayerStack, made: Callable[[Attention, int | None], Attention]) -> Iterator[None]:
    """The same for a model that runs its own eager attention; the replacement must handle masks itself.

    The model meanwhile uses an attention name of ours, and transformers builds no masks for names it does not know.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(stack.exclusive())
        undo.enter_context(_REGISTERED.made())
        modules = [stack.model, *stack.owner.modules()]
        for config in {id(module.config): module.config for module in modules if hasattr(module, "config")}.values():
            undo.enter_context(attention_named(config, _OWN_NAME))
        eager = _with_bits(eager_attention(stack.attending[0]))
        undo.enter_context(_marked(stack, functools.partial(made, eager)))
        yield


@functools.cache
def _with_bits(eager: Attention) -> Attention:
    """A model's eager attention, which adds masks to scores, adapted to boolean masks."""

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        if mask is not None and mask.dtype == torch.bool:
            unseen = torch.finfo(query.dtype).min
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, unseen)
        return eager(module, query, key, value, mask, **kwargs)

    return forward


def _marked(stack: LayerStack, made: Callable[[int | None], Attention]) -> contextlib.AbstractContextManager[None]:
    """While open, each attention module of the model has the function made for its layer's window."""
    return replaced_each(stack.attending, _MARK, map(made, stack.attending_windows))
