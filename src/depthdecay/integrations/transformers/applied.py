"""Depth decay inside transformers' own generate(): a context manager over the user's model."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationMode

from depthdecay import library_internals as internals
from depthdecay.engine.plan_choice import warn_of_guess
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerPass, LayerStack, require_eval
from depthdecay.model.repairs import Repairs, repairs_for
from depthdecay.patches import patched, replaced
from depthdecay.plan.compatibility import check_plan
from depthdecay.plan.plan import Plan

# Caches with tokens that lack keys and values in some layers. Weak references, so that none is kept alive.
_DECAYED: weakref.WeakSet[Cache] = weakref.WeakSet()

_GOING_ON = (
    "this cache has tokens that were generated below full depth, so some layers have no keys and values for them; "
    "start again from the whole text with a new cache"
)


@dataclass
class Applied:
    """What `applied` yields: a running count of the layers that actually ran."""

    plan: Plan
    depths: list[int] = field(default_factory=list)  # of the newest generation, one per token

    @property
    def layers_executed(self) -> int:
        return sum(self.depths)


@contextlib.contextmanager
def applied(model: Any, plan: Plan, *, allow_other_weights: bool = False) -> Iterator[Applied]:
    """Within the block, `model.generate` decodes with `plan`; afterwards the model is exactly as it was.

    The prompt runs all layers. Greedy decoding and sampling work, in batches, with dynamic, offloaded and static caches
    and with chunked prefill. What would silently give a different result (beams, assisted decoding, no cache,
    continuing from a decayed cache) is refused.
    """
    stack = LayerStack.of(model)
    lm = stack.model
    require_eval(lm)
    check_plan(plan, lm, allow_other_weights=allow_other_weights)
    warn_of_guess(plan, stacklevel=3)
    account = Applied(plan)
    driver = _Driver(stack, plan, account, repairs_for(stack, plan))
    with stack.claimed(), stack.routed(driver.layer_pass), contextlib.ExitStack() as undo:
        # A separate outer model too: it may build masks before it calls the module that loops over the layers.
        for module in {id(module): module for module in (lm, stack.owner)}.values():
            undo.enter_context(patched(module, "forward", driver.wrap_forward(module)))
        for name, wrap in (
            ("generate", driver.wrap_generate),
            (internals.PREFILL, driver.wrap_prefill),
            ("prepare_inputs_for_generation", driver.wrap_prepare),
            ("generate_batch", _refuse_generate_batch),
            # A compiled call would keep the depth of the step in which it was traced.
            ("get_compiled_call", lambda _original: lambda *_args, **_kwargs: lm.__call__),
        ):
            undo.enter_context(patched(lm, name, wrap(internals.method(lm, name))))
        try:
            yield account
        finally:
            driver.seal_decayed_caches()
            if driver.generations:
                warnings.warn(
                    f"depthdecay.applied was left while other threads were generating ({driver.generations}): they "
                    "continue at full depth, or fail if layers have already been dropped",
                    stacklevel=3,
                )


def _refuse_generate_batch(_original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise DepthDecayError("depth decay does not support generate_batch, whose rows are at different positions")

    return refuse


class _PerThread(threading.local):
    in_prompt = False
    in_pass = False
    awaits_prompt = False  # generate has started but not yet prefilled the prompt


class _Driver:
    """Sets the depth of every pass of one model: full depth for prompts, then by token index."""

    def __init__(self, stack: LayerStack, plan: Plan, account: Applied, repairs: Repairs) -> None:
        self.stack = stack
        self.plan = plan
        self.account = account
        self.repairs = repairs
        self.layer_pass = LayerPass()
        self.lock = threading.RLock()  # passes of several threads take turns
        self.thread = _PerThread()
        self.token_index: weakref.WeakKeyDictionary[Cache, int] = weakref.WeakKeyDictionary()
        self.last_dropped: weakref.WeakKeyDictionary[Cache, frozenset[int]] = weakref.WeakKeyDictionary()
        self.generations = 0  # running now, in any thread
        self.newest: weakref.ref[Cache] | None = None  # the cache whose tokens are counted

    def wrap_generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(generate)

        def checked_generate(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs).arguments
            options = {**given.pop("kwargs", {}), **given}
            options.pop("inputs", None)
            given_config = options.pop("generation_config", None)
            config = internals.completed_generation_config(self.stack.model, given_config, **options)
            mode = config.get_generation_mode(options.get("assistant_model"))
            name = "a custom generate" if options.get("custom_generate") else mode.value.replace("_", " ")
            if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or options.get("custom_generate"):
                raise DepthDecayError(
                    f"depth decay works with greedy decoding and sampling, not with {name}: "
                    "other modes run several tokens or hypotheses in one pass, which have no single depth"
                )
            if not config.use_cache:
                raise DepthDecayError("depth decay needs use_cache=True: without it every step would re-run all tokens")
            if config.cache_implementation == "paged":
                raise DepthDecayError("depth decay does not support the paged cache; leave cache_implementation out")
            self.thread.awaits_prompt = True
            with self.lock:
                self.generations += 1
            try:
                return generate(*args, **kwargs)
            finally:
                self.thread.awaits_prompt = False
                with self.lock:
                    self.generations -= 1

        return checked_generate

    def wrap_prefill(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        def full_depth_prefill(*args: Any, **kwargs: Any) -> Any:
            # Distinguishes a prompt's last chunk, which may be one token, from a decode step.
            self.thread.in_prompt, self.thread.awaits_prompt = True, False
            try:
                return prefill(*args, **kwargs)
            finally:
                self.thread.in_prompt = False

        return full_depth_prefill

    def wrap_prepare(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_with_live_lengths(*args: Any, **kwargs: Any) -> Any:
            # For static caches transformers builds the mask here, before the forward pass.
            cache = kwargs.get("past_key_values")
            dropped = self.last_dropped.get(cache, frozenset()) if isinstance(cache, Cache) else frozenset()
            with _lengths_from_live_layers(cache, dropped):
                return prepare(*args, **kwargs)

        return prepare_with_live_lengths

    def wrap_forward(self, module: Any) -> Callable[..., Any]:
        forward, signature = module.forward, inspect.signature(module.forward)

        def planned_forward(*args: Any, **kwargs: Any) -> Any:
            if self.thread.in_pass:
                return forward(*args, **kwargs)
            if self.thread.awaits_prompt:
                # A later chunk of the prompt would look like a decode step and run below full depth.
                raise internals.unfit("transformers", f"no longer reads a prompt in {internals.PREFILL}")
            bound = signature.bind_partial(*args, **kwargs).arguments
            given = {**bound.get("kwargs", {}), **bound}
            with self.lock:
                self.thread.in_pass = True
                try:
                    return self._pass(forward, args, kwargs, given)
                finally:
                    self.thread.in_pass = False

        return planned_forward

    def _pass(self, forward: Callable[..., Any], args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
        """Run the outermost module's forward, at the depth of the token that it produces."""
        cache = given.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache):
            raise DepthDecayError("depth decay works on decoder-only models, but was given an encoder-decoder cache")
        index = self._next_token_index(cache, _query_length(given))
        depth = self.plan.depth(index)
        dropped = frozenset(self.plan.dropped(depth))
        self.layer_pass.dropped, self.layer_pass.repairs = dropped, self.repairs.at(depth)
        self.layer_pass.executed.clear()
        try:
            with _lengths_from_live_layers(cache, dropped):
                output = forward(*args, **kwargs)
        finally:
            self.layer_pass.dropped, self.layer_pass.repairs = frozenset(), {}
        if cache is None:
            # The model created a cache for a prompt given without one; the next call will pass it in.
            cache = getattr(output, "past_key_values", None)
        if isinstance(cache, Cache):
            self.token_index[cache] = index
            self.last_dropped[cache] = dropped
            if dropped:
                _DECAYED.add(cache)
        self._account(cache, index)
        return output

    def _next_token_index(self, cache: Cache | None, query_length: int) -> int:
        if cache is None:
            return 0
        if cache in self.token_index and query_length == 1 and not self.thread.in_prompt:
            return self.token_index[cache] + 1
        if cache in _DECAYED:
            if _holds_tokens(cache):
                raise DepthDecayError(_GOING_ON)
            _DECAYED.discard(cache)  # it was reset
        return 0

    def _account(self, cache: Any, index: int) -> None:
        if index == 0:
            self.newest = weakref.ref(cache) if isinstance(cache, Cache) else None
            self.account.depths.clear()
        elif self.newest is None or self.newest() is not cache:
            return  # a different text, decoded at the same time
        self.account.depths.append(self.layer_pass.layers_executed)

    def seal_decayed_caches(self) -> None:
        """After the block caches are no longer checked, so decayed ones must refuse further tokens themselves."""
        for cache in self.token_index:
            if cache in _DECAYED:
                _seal(cache)


def _seal(cache: Cache) -> None:
    def update_once_reset(*args: Any, **kwargs: Any) -> Any:
        if _holds_tokens(cache):
            raise DepthDecayError(_GOING_ON)
        cache.__dict__.pop("update", None)
        return cache.update(*args, **kwargs)

    cache.__dict__["update"] = update_once_reset


def _holds_tokens(cache: Cache) -> bool:
    return any(int(layer.get_seq_length()) > 0 for layer in cache.layers)


def _query_length(given: dict[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        if given.get(name) is not None:
            return int(given[name].shape[1])
    return 0


@contextlib.contextmanager
def _lengths_from_live_layers(cache: Cache | None, dropped: frozenset[int]) -> Iterator[None]:
    """Masks are sized by the first layer of a kind; if that one is dropped, its cache no longer grows.

    So for one pass, a dropped layer reports the lengths of a running layer of the same kind.
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
