"""A sample of a model's weights that survives rounding: fixed positions in a few fixed tensors."""

from __future__ import annotations

import re
from typing import Any

from depthdecay.library_internals import COMPILED_PART, uncompiled

SAMPLES = 64
# A Weyl sequence covers a tensor aperiodically. Equal steps would sample a single column wherever the row length
# divides the step, and that column can be dead.
_GOLDEN = 0x9E3779B97F4A7C15

_ADAPTER = re.compile(r"(^|\.)(lora_|ia3_|oft_|vera_|hada_|lokr_|prompt_encoder|modules_to_save)")
_WRAPPER = re.compile(rf"(^|\.)({COMPILED_PART}|base_layer|original_module)(?=\.)")
_LAYER = re.compile(r"^(.*?\.)(\d+)\.(.+)$")
_ATTENTION = re.compile(r"attn|attention")
_MLP = re.compile(r"mlp|ffn|feed_forward|experts|moe|(^|\.)(fc|dense|w)_?\d")


def weight_samples(model: Any) -> dict[str, list[float]]:
    """64 values with four digits per tensor, from the embedding and the first, middle and last layer, by tensor name.

    Packed tensors are skipped, so a quantized copy has fewer samples but none that would differ.
    """
    tensors = _named_tensors(model)
    samples = {name: sample_tensor(tensors[name]) for name in _chosen(sorted(tensors))}
    return {name: sample for name, sample in samples.items() if sample}


def base_model(model: Any) -> Any:
    """The Hugging Face model inside the wrappers of torch.compile or PEFT."""
    model = uncompiled(model)
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _named_tensors(model: Any) -> dict[str, Any]:
    tensors = {}
    for name, tensor in base_model(model).named_parameters():
        if not _ADAPTER.search(name):
            tensors[_WRAPPER.sub("", name).removeprefix(".")] = tensor
    return tensors


def _chosen(names: list[str]) -> list[str]:
    """Chosen by name alone, packed or not, so that every copy of a model chooses the same."""
    layers: dict[str, dict[int, list[str]]] = {}
    outside = []
    for name in names:
        match = _LAYER.match(name)
        if match:
            layers.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
        else:
            outside.append(name)
    chosen = [name for name in outside if name.endswith("weight")][:4]
    if layers:
        # The decoder is the longest list; there may also be an image tower or a list of heads.
        stack = max(layers.values(), key=len)
        indices = sorted(stack)
        for index in sorted({indices[0], indices[len(indices) // 2], indices[-1]}):
            weights = [name for name in stack[index] if not name.endswith("bias")]
            inner = {name: _LAYER.sub(r"\3", name) for name in weights}
            norms = [name for name in weights if re.search(r"norm|ln_", inner[name])]
            for kind in (_ATTENTION, _MLP):
                chosen += [name for name in weights if kind.search(inner[name]) and name not in norms][:1]
            chosen += norms[:1]
    return chosen


def sample_tensor(tensor: Any) -> list[float]:
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
    # An 8-bit float counts as packed too: its scale is stored elsewhere.
    if not plain or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return []
    size = tensor.numel()
    if size == 0:
        return []
    places = [((step * _GOLDEN & (2**64 - 1)) * size) >> 64 for step in range(1, SAMPLES + 1)]
    flat = tensor.detach().reshape(-1)
    values = flat[torch.tensor(places, device=flat.device)].double().cpu()
    return [float(f"{value:.4g}") for value in values.tolist()] if bool(values.isfinite().all()) else []
