"""Which models the compiled pass supports: those with Llama-style layers.

A model is recognized by the names of its modules. Whether these do what their names suggest is then tested: its own
forward and the compiled pass must give the same logits on a few tokens (choose_stack.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from depthdecay.library_internals import forward_hooks
from depthdecay.model.layers import LayerStack

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_FLOATS = (torch.float32, torch.bfloat16)
# These depend on the length of the text, so a precomputed table of angles would be wrong.
_CHANGING_ANGLES = ("dynamic", "longrope")


class OtherForm(Exception):
    """Why a model is not supported."""


@dataclass(frozen=True)
class LayerForm:
    """One layer's modules, by role."""

    projections: dict[str, nn.Linear]
    attention_norm: nn.Module
    mlp_norm: nn.Module
    query_norm: nn.Module | None
    key_norm: nn.Module | None


@dataclass(frozen=True)
class Form:
    """The whole model's modules, by role."""

    layers: tuple[LayerForm, ...]
    embedding: nn.Embedding
    angles: nn.Module
    final_norm: nn.Module
    head: nn.Linear
    heads: int
    key_value_heads: int
    head_size: int
    scale: float
    epsilon: float
    dtype: torch.dtype

    def matrices(self) -> Iterator[tuple[str, nn.Linear]]:
        """Every matrix that a decode step reads, with a unique name."""
        for index, layer in enumerate(self.layers):
            for name in PROJECTIONS:
                yield f"{index}.{name}", layer.projections[name]
        yield "head", self.head


def form_of(stack: LayerStack) -> Form:
    """The model's modules; raises `OtherForm` with the first thing that is not as expected."""
    model, owner = stack.model, stack.owner
    config = model.config.get_text_config(decoder=True)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    angles: Any = getattr(owner, "rotary_emb", None)
    norm: Any = getattr(owner, "norm", None)
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in stack.layers]
    _expect(type(embedding) is nn.Embedding and embedding.max_norm is None, "its embedding is not a plain nn.Embedding")
    _expect(type(head) is nn.Linear, "its LM head is not a plain nn.Linear")
    _expect(isinstance(angles, nn.Module), "it has no rotary embedding shared by all layers")
    kind = getattr(angles, "rope_type", "default")
    _expect(kind not in _CHANGING_ANGLES, f"its rotary embedding is of type {kind}")
    layers = tuple(_layer(layer, index) for index, layer in enumerate(stack.layers))
    norms: list[Any] = [norm, *(part for layer in layers for part in (layer.attention_norm, layer.mlp_norm))]
    _expect(all(map(_is_norm, norms)), "its norms are not plain RMSNorm")
    epsilons = {float(part.variance_epsilon) for part in norms}
    attention = attentions[0]
    head_size = int(attention.head_dim)
    heads, shared = (layers[0].projections[name].out_features // head_size for name in ("query", "key"))
    sizes = {tuple(layer.projections[name].weight.shape for name in PROJECTIONS) for layer in layers}
    _expect(len(sizes) == 1 and len(epsilons) == 1, "its layers differ in size or in the norms' epsilon")
    _expect(heads % shared == 0 and head_size % 2 == 0, "its head size is odd, or its heads do not divide into groups")
    _expect(len({float(each.scaling) for each in attentions}) == 1, "its layers scale attention differently")
    _expect(getattr(config, "attn_logit_softcapping", None) is None, "its attention has a softcap")
    dtypes = {p.dtype for p in (*owner.parameters(), head.weight)}
    _expect(len(dtypes) == 1 and dtypes <= set(_FLOATS), f"its weights are {', '.join(sorted(map(str, dtypes)))}")
    _expect(
        all(p.device.type == "cpu" and p.is_contiguous() for p in owner.parameters()),
        "its weights are not all contiguous on the CPU",
    )
    epsilon, dtype = epsilons.pop(), dtypes.pop()
    return Form(
        layers, embedding, angles, norm, head, heads, shared, head_size, float(attention.scaling), epsilon, dtype
    )


def hooked(stack: LayerStack) -> bool:
    """Whether the model has hooks or a patched forward, which the compiled pass would not call."""
    return any(any(forward_hooks(module)) or "forward" in module.__dict__ for module in stack.model.modules())


def _layer(layer: nn.Module, index: int) -> LayerForm:
    parts: dict[str, Any] = dict(layer.named_children())
    expected = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    _expect(parts.keys() == expected, f"layer {index} consists of {', '.join(parts)}")
    attention, mlp = (dict(parts[name].named_children()) for name in ("self_attn", "mlp"))
    norms = {name: attention.pop(name, None) for name in ("q_norm", "k_norm")}
    _expect(
        attention.keys() == set(_ATTENTION.values()), f"layer {index}'s attention consists of {', '.join(attention)}"
    )
    _expect(mlp.keys() - {"act_fn"} == set(_MLP.values()), f"layer {index}'s MLP consists of {', '.join(mlp)}")
    _expect(isinstance(parts["mlp"].act_fn, nn.SiLU | SiLUActivation), f"layer {index}'s activation is not SiLU")
    projections = {name: attention[place] for name, place in _ATTENTION.items()}
    projections |= {name: mlp[place] for name, place in _MLP.items()}
    plain = all(type(part) is nn.Linear for part in projections.values())
    _expect(plain, f"layer {index} has projections that are not plain nn.Linear (adapters or quantized ones)")
    size = int(parts["self_attn"].head_dim)
    for norm in norms.values():
        _expect(
            norm is None or (_is_norm(norm) and norm.weight.shape == (size,)),
            f"layer {index} has another kind of q_norm or k_norm",
        )
    _expect((norms["q_norm"] is None) == (norms["k_norm"] is None), f"layer {index} has only one of q_norm and k_norm")
    return LayerForm(
        projections, parts["input_layernorm"], parts["post_attention_layernorm"], norms["q_norm"], norms["k_norm"]
    )


def _is_norm(norm: Any) -> bool:
    return type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise OtherForm(otherwise)
