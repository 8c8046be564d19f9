"""A Hugging Face causal language model as a stack of decoder layers, without any modelling code of our own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from depthdecay.errors import DepthDecayError, UnsupportedModelError
from depthdecay.library_internals import attention_name, takes_dynamic_cache
from depthdecay.patches import Patch, patched, replaced_each
from depthdecay.runners.contract import PLAIN, Ask

Forward = Callable[..., Any]

# One lock per model: a running pass replaces the forward of the layers, so passes of one model take turns.
_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
# Models that a block of the user's code holds exclusively.
_CLAIMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class LayerPass:
    """One pass through the stack: which layers it skips, and which ran (recorded, never estimated)."""

    dropped: frozenset[int] = frozenset()
    # What replaces dropped layers, keyed by the first layer of each run.
    repairs: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    executed: list[int] = field(default_factory=list)
    asked: tuple[int, ...] = ()  # layers whose output hidden states are requested
    states: dict[int, torch.Tensor] = field(default_factory=dict)  # by requested layer
    # Replaces a layer's forward, for example with a compiled one; called with (index, layer, forward, args, kwargs).
    run_layer: Callable[..., Any] | None = None

    @property
    def layers_executed(self) -> int:
        return len(self.executed)

    def noted(self) -> LayerPass:
        """A copy of the records so far, which the next pass with this object overwrites."""
        return replace(self, executed=list(self.executed), states=dict(self.states))


@dataclass(frozen=True)
class KeptShape:
    """What one layer caches per position: keys and values, each as (heads, size)."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        numbers = self.key[0] * self.key[1] + self.value[0] * self.value[1]
        return numbers * torch.empty((), dtype=self.dtype).element_size()


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate x) * up x), where x is the normalised hidden state times the norm's weight."""

    gate: torch.Tensor  # (neurons, hidden)
    up: torch.Tensor  # (neurons, hidden)
    down: torch.Tensor  # (hidden, neurons)
    norm: torch.Tensor


@dataclass
class LayerStack:
    """The decoder layers of one model. Only this class may bypass them."""

    model: PreTrainedModel
    owner: nn.Module  # the module whose forward loops over the layers
    layers: tuple[nn.Module, ...]
    windows: tuple[int | None, ...]  # each layer's sliding window, None for full attention
    _tuple_lengths: dict[int, int] = field(default_factory=dict)
    _shapes: dict[tuple[torch.device, torch.dtype], list[KeptShape]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> LayerStack:
        """Find the decoder layers of any decoder-only model; reject models that depth decay would run incorrectly."""
        lm = unwrap(model)
        config = lm.config.get_text_config(decoder=True)
        name = type(lm).__name__
        if getattr(lm.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{name} is an encoder-decoder model; depth decay works on decoder-only models")
        if not lm.can_generate():
            raise UnsupportedModelError(f"{name} is not a causal language model: it has no generate()")
        num_layers = getattr(config, "num_hidden_layers", None)
        if not isinstance(num_layers, int) or num_layers < 1:
            raise UnsupportedModelError(f"{name}'s configuration does not say how many decoder layers it has")
        windows = _attention_windows(lm, num_layers)
        owner, layers = _find_layers(lm, num_layers)
        return cls(lm, owner, layers, windows)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @functools.cached_property
    def attending(self) -> tuple[nn.Module, ...]:
        """The modules that know their layer's index, which include those that call transformers' attention."""
        return tuple(module for layer in self.layers for module in layer.modules() if _has_index(module))

    @functools.cached_property
    def attending_windows(self) -> tuple[int | None, ...]:
        """The window of each of these modules."""
        pairs = zip(self.layers, self.windows, strict=True)
        return tuple(window for layer, window in pairs for module in layer.modules() if _has_index(module))

    @functools.cached_property
    def config(self) -> Any:
        """The language model's configuration, also if it is part of a larger model."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def caps_scores(self) -> bool:
        """Whether attention soft-caps its scores, as in Gemma 2."""
        return getattr(self.config, "attn_logit_softcapping", None) is not None

    @property
    def takes_whole_masks(self) -> bool:
        """Whether the model's forward passes a four-dimensional mask through to its attention unchanged.

        Models do so if they build masks with transformers' common functions and derive nothing else from the padding,
        as learnt positions and ALiBi biases do. Eager attention adds masks to its scores; it is replaced only where
        scores are capped, which torch's attention cannot do.
        """
        config = self.config
        common = hasattr(sys.modules[type(self.owner).__module__], "create_causal_mask")
        rotary = hasattr(self.owner, "rotary_emb") and not getattr(config, "alibi", False)
        known = "eager" if self.caps_scores else "sdpa"
        return common and rotary and attention_name(config) in ("sdpa", known)

    @property
    def has_compiled_pass(self) -> bool:
        """Whether passes on a CPU can be one compiled call."""
        return False

    def kept_shapes(self) -> list[KeptShape]:
        """What each layer caches, found with a pass over one token on first use."""
        place = primary_device(self.model), self.model.dtype
        if place not in self._shapes:
            ids = torch.zeros((1, 1), dtype=torch.long, device=place[0])
            cache = _Watched(config=self.config)
            with torch.no_grad():
                self.run(LayerPass(), ids, None, cache, torch.zeros_like(ids))
            self._shapes[place] = [cache.found[layer] for layer in range(self.num_layers)]
        return self._shapes[place]

    @contextlib.contextmanager
    def routed(self, layer_pass: LayerPass) -> Iterator[LayerPass]:
        """While open, layers in `layer_pass.dropped` pass their input on; the pass may be changed between calls.

        Every layer keeps its position and index, by which mixed models choose mask and rotary embedding.
        """
        routes = [Patch(self._route(i, layer, layer_pass), layer.forward) for i, layer in enumerate(self.layers)]
        with replaced_each(self.layers, "forward", routes):
            yield layer_pass

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """For one pass: other threads wait, and a model claimed by a block is rejected."""
        with _LOCKS.setdefault(self.model, threading.RLock()):
            if self.model in _CLAIMED:
                raise DepthDecayError(
                    "this model is inside depthdecay.applied; leave that block before using an Engine"
                )
            yield

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """For a block of the user's code: no one else may route this model's layers."""
        with _LOCKS.setdefault(self.model, threading.RLock()):
            if self.model in _CLAIMED:
                raise DepthDecayError(
                    "this model is already inside depthdecay.applied; leave that block before entering another"
                )
            _CLAIMED.add(self.model)
        try:
            yield
        finally:
            _CLAIMED.discard(self.model)

    def run(
        self,
        layer_pass: LayerPass,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        position_ids: torch.Tensor,
        keep: int = 1,
        ask: Ask = PLAIN,
    ) -> torch.Tensor:
        """The model's own forward over new tokens, with its layers routed; logits of the last `keep` of them.

        With `ask.short`, the logits cover only those rows of the LM head.
        """
        # By index, so that the LM head gets a dense tensor: for a slice of a batch in bf16, torch on a CPU first copies
        # the whole LM head once a row.
        kept = torch.arange(ids.shape[1] - keep, ids.shape[1]) if self._slices_cost(ids, keep) else keep
        arguments: dict[str, Any] = {"position_ids": position_ids, "logits_to_keep": kept}
        # Older architectures lack one or the other.
        arguments = {name: value for name, value in arguments.items() if name in self.forward_arguments}
        shortened: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not ask.logits:
            shortened = patched(self.model.get_output_embeddings(), "forward", lambda hidden: hidden[..., :1])
        elif ask.short is not None:
            shortened = ask.short.in_place()
        layer_pass.asked, layer_pass.states = ask.states, {}
        with self.exclusive(), self.routed(layer_pass), shortened:
            self._require_all_layers()
            arguments |= {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
            output = self.forward(**arguments)
        logits: torch.Tensor = output.logits[:, -keep:]
        return logits

    @staticmethod
    def _slices_cost(ids: torch.Tensor, keep: int) -> bool:
        return ids.device.type == "cpu" and len(ids) > 1 and keep < ids.shape[1]

    def _require_all_layers(self) -> None:
        """Models loop over as many layers as their configuration currently says."""
        said = self.config.num_hidden_layers
        if said != self.num_layers:
            raise DepthDecayError(
                f"the model's configuration now says {said} layers, but {self.num_layers} when this engine was created "
                "(transformers' early exit leaves it so when it fails); restore config.num_hidden_layers"
            )

    def forward(self, **arguments: Any) -> Any:
        return self.model(**arguments)

    @functools.cached_property
    def forward_arguments(self) -> frozenset[str]:
        """The parameter names of the model's forward."""
        return frozenset(inspect.signature(type(self.model).forward).parameters)

    def _route(self, index: int, layer: nn.Module, layer_pass: LayerPass) -> Forward:
        forward = layer.forward  # may be an accelerate hook's, so multi-GPU models keep working

        def routed_forward(*args: Any, **kwargs: Any) -> Any:
            if index in layer_pass.dropped:
                hidden = args[0] if args else kwargs["hidden_states"]
                if index in layer_pass.repairs:
                    hidden = layer_pass.repairs[index](hidden)
                output = self.answer(index, hidden)
            else:
                layer_pass.executed.append(index)
                if layer_pass.run_layer is None:
                    output = forward(*args, **kwargs)
                else:
                    output = layer_pass.run_layer(index, layer, forward, args, kwargs)
                if isinstance(output, tuple):
                    self._tuple_lengths[index] = len(output)
            if index in layer_pass.asked:
                layer_pass.states[index] = output[0] if isinstance(output, tuple) else output
            return output

        return routed_forward

    def answer(self, index: int, hidden: torch.Tensor) -> Any:
        """A hidden state in the form this layer returns: some return tuples, which is learnt when they first run."""
        length = self._tuple_lengths.get(index, 0)
        return (hidden,) + (None,) * (length - 1) if length else hidden

    def examples(self) -> list[torch.Tensor]:
        """An empty tensor with each layer's device and compute dtype; packed weights do not count."""
        dtype = self.model.dtype
        found = []
        for layer in self.layers:
            floats = (p for p in layer.parameters() if p.is_floating_point() and p.element_size() > 1)
            parameter = next(floats, None)
            device = next(layer.parameters()).device if parameter is None else parameter.device
            kind = dtype if parameter is None else parameter.dtype
            found.append(torch.empty(0, device=device, dtype=kind))
        return found

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    def gated_mlp(self, index: int) -> GatedMLP | None:
        """The layer's gated MLP if it is built as in Llama; None for any other kind."""
        layer = self.layers[index]
        mlp, norm = getattr(layer, "mlp", None), getattr(layer, "post_attention_layernorm", None)
        parts: list[Any] = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        is_silu = isinstance(getattr(mlp, "act_fn", None), nn.SiLU | SiLUActivation)
        plain = type(norm).__name__.endswith("RMSNorm") and not hasattr(layer, "pre_feedforward_layernorm")
        known = all(type(part) is nn.Linear and part.bias is None for part in parts)
        if norm is None or not (is_silu and plain and known):
            return None
        gate, up, down = (part.weight for part in parts)
        return GatedMLP(gate, up, down, norm.weight)

    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of weights that one token reads in each layer (of experts, only those it is routed to)."""
        config = self.config
        return tuple(_weight_bytes(layer, config) for layer in self.layers)

    def head_bytes(self) -> int:
        """Bytes read at every depth besides the layers: the LM head. Of the input embedding, only one row is read."""
        head = self.model.get_output_embeddings()
        return _weight_bytes(head, self.model.config) if head is not None else 0

    def context_limit(self) -> int | None:
        """The maximum number of positions, or None if the model sets no limit."""
        config = self.config
        limit = getattr(config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None


class _Watched(DynamicCache):
    """A cache that records the shapes it is given."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.found: dict[int, KeptShape] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        key, value = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        self.found[layer_idx] = KeptShape(key, value, keys.dtype, keys.device)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(lm, PreTrainedModel):
        raise UnsupportedModelError(f"expected a transformers causal language model, got {type(model).__name__}")
    return lm


def _find_layers(lm: PreTrainedModel, num_layers: int) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The one list of `num_layers` modules with attention, and the module that owns it."""
    found: list[tuple[nn.Module, nn.ModuleList]] = []
    for owner in lm.modules():
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers and all(map(_attends, child)):
                found.append((owner, child))
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(lm).__name__} has {len(found)} lists of {num_layers} attention layers; "
            "depth decay needs exactly one, and an architecture in which every layer has attention"
        )
    owner, layers = found[0]
    return owner, tuple(layers)


def _attends(layer: nn.Module) -> bool:
    return any(map(_has_index, layer.modules()))


def _has_index(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int)


def _attention_windows(lm: PreTrainedModel, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, from the cache that transformers itself would build; other kinds of state are rejected."""
    config = lm.config.get_text_config(decoder=True)
    name = type(lm).__name__
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"{name} shares keys and values between layers ({config.num_kv_shared_layers} of them read another's), "
            "so its layers cannot be dropped one by one"
        )
    if not takes_dynamic_cache(lm):
        raise UnsupportedModelError(f"{name} keeps its own state instead of keys and values (recurrent or state-space)")
    try:
        cache_layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(f"{name} has a kind of layer that is not supported: {error}") from error
    windows: list[int | None] = []
    for index, cache_layer in enumerate(cache_layers):
        if type(cache_layer) is DynamicSlidingWindowLayer and "chunked" not in _layer_type(config, index):
            windows.append(int(cache_layer.sliding_window))
        elif type(cache_layer) is DynamicLayer:
            windows.append(None)
        else:
            kind = _layer_type(config, index) or type(cache_layer).__name__
            raise UnsupportedModelError(
                f"{name}'s layer {index} is of kind '{kind}'; depth decay handles full and sliding-window attention "
                "(no recurrent, state-space, chunked or indexed layers)"
            )
    if len(windows) != num_layers:
        raise UnsupportedModelError(f"{name} caches keys and values in only {len(windows)} of its {num_layers} layers")
    return tuple(windows)


def _layer_type(config: Any, index: int) -> str:
    types = getattr(config, "layer_types", None)
    return str(types[index]) if types else ""


def _weight_bytes(module: nn.Module, config: Any) -> int:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = 0.0
    for parameter in module.parameters():
        share = 1.0
        if experts and chosen and parameter.dim() == 3 and parameter.shape[0] == experts:
            share = chosen / experts
        total += parameter.numel() * parameter.element_size() * share
    return int(total)


def require_eval(model: nn.Module) -> None:
    if model.training:
        raise DepthDecayError("the model is in training mode, where dropout is active; call model.eval() first")


def primary_device(model: PreTrainedModel) -> torch.device:
    """The device for inputs: that of the input embedding (a model may be spread over several)."""
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    return weight.device if weight is not None and weight.device.type != "meta" else model.device
