"""Which model a plan was made for: its shape, and a sample of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from depthdecay.argument_checks import whole_number
from depthdecay.errors import DepthDecayError
from depthdecay.plan.schedule import MAX_LAYERS

# For normally distributed weights, 4-bit absmax blocks of up to 128 keep the cosine above 0.99 and bf16 above 0.99999,
# while another training run is near 0. A light fine-tune is within the quantization noise and counts as the same.
MIN_WEIGHT_COSINE = 0.97
# Rounding to a few bits changes a tensor's norm by a few per cent; a rescaled tensor counts as different.
MAX_NORM_RATIO = 1.25

_FIELDS = ("architecture", "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "name", "fingerprint")


@dataclass(frozen=True)
class ModelIdentity:
    """The shape of a model and, if sampled, some of its weights by tensor name."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    name: str | None = None
    fingerprint: dict[str, list[float]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, str) or not self.architecture:
            raise DepthDecayError(f"the model's architecture is {self.architecture!r}; expected a class name")
        whole_number("the model's num_layers", self.num_layers, 1, MAX_LAYERS)
        for size in ("hidden_size", "num_attention_heads", "vocab_size"):
            whole_number(f"the model's {size}", getattr(self, size), 1)
        if self.name is not None and not isinstance(self.name, str):
            raise DepthDecayError(f"the model's name is {self.name!r}; expected a string")
        if self.fingerprint is not None:
            if not _is_fingerprint(self.fingerprint):
                raise DepthDecayError("the model's fingerprint must map tensor names to lists of finite numbers")
            # Plain lists of floats, so that a plan survives a round trip through JSON unchanged.
            copied = {name: [float(value) for value in sample] for name, sample in self.fingerprint.items()}
            object.__setattr__(self, "fingerprint", copied)

    def __str__(self) -> str:
        shape = (
            f"{self.architecture}, {self.num_layers} layers, hidden size {self.hidden_size}, "
            f"{self.num_attention_heads} heads, vocabulary {self.vocab_size}"
        )
        return f"{self.name} ({shape})" if self.name else shape

    def shape_differences(self, other: ModelIdentity) -> list[str]:
        """The differences as short phrases, own value first; empty if the shapes agree."""
        pairs = (
            (f"{self.num_layers} layers", other.num_layers, self.num_layers),
            (f"architecture {self.architecture}", other.architecture, self.architecture),
            (f"hidden size {self.hidden_size}", other.hidden_size, self.hidden_size),
            (f"{self.num_attention_heads} attention heads", other.num_attention_heads, self.num_attention_heads),
            (f"vocabulary of {self.vocab_size}", other.vocab_size, self.vocab_size),
        )
        return [f"{own} against {theirs}" for own, theirs, mine in pairs if theirs != mine]

    def same_weights(self, other: ModelIdentity) -> bool | None:
        """Whether every tensor sampled in both agrees up to rounding; None if nothing can be compared."""
        mine, theirs = self.fingerprint or {}, other.fingerprint or {}
        pairs = [(mine[name], theirs[name]) for name in mine.keys() & theirs.keys()]
        comparable = [(a, b) for a, b in pairs if len(a) == len(b) and a]
        return all(_same_up_to_rounding(a, b) for a, b in comparable) if comparable else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelIdentity:
        if not isinstance(values, Mapping) or values.keys() != set(_FIELDS):
            raise DepthDecayError(f"the model's identity must be a mapping with the fields {', '.join(_FIELDS)}")
        return cls(**values)


def identity(model: Any, name: str | None = None) -> ModelIdentity:
    """The identity of a Hugging Face model, also if wrapped in a PEFT adapter, quantized or compiled."""
    from depthdecay.plan.fingerprint import base_model, weight_samples

    inner = base_model(model)
    shape = config_identity(inner.config.get_text_config(decoder=True), type(inner).__name__)
    return replace(shape, name=name, fingerprint=weight_samples(inner) or None)


def config_identity(config: Any, architecture: str) -> ModelIdentity:
    """The shape of a model from its configuration, without its weights."""
    return ModelIdentity(
        architecture=architecture,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
    )


def _is_fingerprint(value: Any) -> bool:
    def is_sample(sample: Any) -> bool:
        return isinstance(sample, (list, tuple)) and all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in sample
        )

    return isinstance(value, Mapping) and all(isinstance(k, str) and is_sample(v) for k, v in value.items())


def _same_up_to_rounding(a: list[float], b: list[float]) -> bool:
    norm_a, norm_b = math.hypot(*a), math.hypot(*b)
    if norm_a == 0 or norm_b == 0:
        return norm_a == norm_b
    cosine = math.fsum((x / norm_a) * (y / norm_b) for x, y in zip(a, b, strict=True))
    return cosine >= MIN_WEIGHT_COSINE and 1 / MAX_NORM_RATIO <= norm_a / norm_b <= MAX_NORM_RATIO
