"""Depth decay inside transformers' own generate(): a context manager over the user's model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationMode

from .errors import DepthDecayError
from .plan import Plan
from .plan_check import check_plan
from .stack import LayerPass, Stack, replaced

# Models inside `applied` now, and caches that hold tokens without keys in every layer. Weak: neither is kept alive.
_APPLIED: weakref.WeakSet[Any] = weakref.WeakSet()
_DECAYED: weakref.WeakSet[Cache] = weakref.WeakSet()


@dataclass
class Applied:
    """What `applied` yields: a running account of the layers that really ran."""

    plan: Plan
    depths: list[int] = field(default_factory=list)  # of the newest generation, one per token

    @property
    def layers_executed(self) -> int:
        return sum(self.depths)


@contextlib.contextmanager
def applied(model: Any, plan: Plan, *, allow_other_weights: bool = False) -> Iterator[Applied]:
    """While open, `model.generate` decodes by `plan`; afterwards the model is exactly as it was.

    The prompt runs all layers. Greedy decoding and sampling work, in batches, with dynamic, offloaded and static caches
    and with chunked prefill; what would silently give another result (beams, assisted decoding, no cache, going on from
    a decayed cache) is refused.
    """
    stack = Stack.of(model)
    lm = stack.model
    if lm in _APPLIED:
        raise DepthDecayError(
            "this model is inside depthdecay.applied already; leave that block before entering another"
        )
    check_plan(plan, lm, allow_other_weights=allow_other_weights)
    account = Applied(plan)
    driver = _Driver(stack, plan, account)
    _APPLIED.add(lm)
    try:
        with stack.routed(driver.layer_pass), contextlib.ExitStack() as undo:
            undo.enter_context(replaced(stack.owner, "forward", driver.wrap_forward(stack.owner.forward)))
            undo.enter_context(replaced(lm, "generate", driver.wrap_generate(lm.generate)))
            undo.enter_context(replaced(lm, "_prefill", driver.wrap_prefill(lm._prefill)))
            prepare = driver.wrap_prepare(lm.prepare_inputs_for_generation)
            undo.enter_context(replaced(lm, "prepare_inputs_for_generation", prepare))
            # A compiled call would freeze the depth of the step that it was traced at.
            undo.enter_context(replaced(lm, "get_compiled_call", lambda *_args, **_kwargs: lm.__call__))
            yield account
    finally:
        _APPLIED.discard(lm)


def is_applied(model: Any) -> bool:
    return model in _APPLIED


class _Driver:
    """Decides the depth of every pass of one model: prompts at full depth, then by token index."""

    def __init__(self, stack: Stack, plan: Plan, account: Applied) -> None:
        self.stack = stack
        self.plan = plan
        self.account = account
        self.layer_pass = LayerPass()
        self.in_prompt = False
        self.token_index: weakref.WeakKeyDictionary[Cache, int] = weakref.WeakKeyDictionary()
        self.last_dropped: weakref.WeakKeyDictionary[Cache, frozenset[int]] = weakref.WeakKeyDictionary()

    def wrap_generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def checked_generate(inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
            config, _ = self.stack.model._prepare_generation_config(generation_config, **kwargs)
            mode = config.get_generation_mode(kwargs.get("assistant_model"))
            if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or kwargs.get("custom_generate"):
                raise DepthDecayError(
                    f"depth decay works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}: "
                    "other modes run several tokens or hypotheses in one pass, which have no one depth"
                )
            if not config.use_cache:
                raise DepthDecayError("depth decay needs use_cache=True: without it every step would re-run all tokens")
            if generation_config is not None:
                kwargs["generation_config"] = generation_config
            return generate(inputs, **kwargs) if inputs is not None else generate(**kwargs)

        return checked_generate

    def wrap_prefill(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        def full_depth_prefill(*args: Any, **kwargs: Any) -> Any:
            # Tells a prompt's last chunk, which may be one token, from a decoding step.
            self.in_prompt = True
            try:
                return prefill(*args, **kwargs)
            finally:
                self.in_prompt = False

        return full_depth_prefill

    def wrap_prepare(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_with_live_lengths(*args: Any, **kwargs: Any) -> Any:
            # For static caches transformers builds the mask here, ahead of the forward pass.
            cache = kwargs.get("past_key_values")
            dropped = self.last_dropped.get(cache, frozenset()) if isinstance(cache, Cache) else frozenset()
            with _lengths_from_live_layers(cache, dropped):
                return prepare(*args, **kwargs)

        return prepare_with_live_lengths

    def wrap_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def planned_forward(*args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("past_key_values")
            if isinstance(cache, EncoderDecoderCache):
                raise DepthDecayError(
                    "depth decay works on decoder-only models, but was given an encoder-decoder cache"
                )
            index = self._next_token_index(cache, _query_length(args, kwargs))
            depth = self.plan.depth(index)
            dropped = frozenset(self.plan.dropped(depth))
            self.layer_pass.dropped, self.layer_pass.layers_executed = dropped, 0
            try:
                with _lengths_from_live_layers(cache, dropped):
                    output = forward(*args, **kwargs)
            finally:
                self.layer_pass.dropped = frozenset()
            self._account(index)
            if cache is None:
                # The model made its own cache for a prompt given without one; the next call will bring it back.
                cache = getattr(output, "past_key_values", None)
            if isinstance(cache, Cache):
                self.token_index[cache] = index
                self.last_dropped[cache] = dropped
                if depth < self.plan.num_layers:
                    _DECAYED.add(cache)
            return output

        return planned_forward

    def _next_token_index(self, cache: Cache | None, query_length: int) -> int:
        is_step = cache is not None and cache in self.token_index and query_length == 1 and not self.in_prompt
        if is_step:
            assert cache is not None
            return self.token_index[cache] + 1
        if cache is not None and cache in _DECAYED:
            raise DepthDecayError(
                "this cache holds tokens that were generated below full depth, so some layers have no keys and values "
                "for them; start again from the whole text with a new cache"
            )
        return 0

    def _account(self, index: int) -> None:
        if index == 0:
            self.account.depths.clear()
        self.account.depths.append(self.layer_pass.layers_executed)


def _query_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            return int(kwargs[name].shape[1])
    return int(args[0].shape[1])


@contextlib.contextmanager
def _lengths_from_live_layers(cache: Cache | None, dropped: frozenset[int]) -> Iterator[None]:
    """Masks are sized by the first layer of a kind; where that one is dropped, its cache stands still.

    So for one pass the lengths asked of a dropped layer are answered by a running layer of the same kind.
    """
    if cache is None or not dropped:
        yield
        return
    sliding = list(cache.is_sliding)
    running = [i for i in range(len(sliding)) if i not in dropped]

    def live(layer: int, same_kind: bool) -> int:
        candidates = (i for i in running if not same_kind or sliding[i] == sliding[layer])
        return layer if layer not in dropped else next(candidates, layer)

    sizes, length = cache.get_mask_sizes, cache.get_seq_length
    with (
        replaced(cache, "get_mask_sizes", lambda query_length, layer_idx: sizes(query_length, live(layer_idx, True))),
        replaced(cache, "get_seq_length", lambda layer_idx=0: length(live(layer_idx, False))),
    ):
        yield
