"""Chooses the fastest way to run a model on a CPU: compiled code if its logits match the model's, else the model."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from depthdecay.cpu import kernel_library as native
from depthdecay.cpu.compiled_rows import CompiledRows
from depthdecay.cpu.compiled_stack import CompiledLayerStack
from depthdecay.cpu.dequantized_stack import WidenedStack
from depthdecay.cpu.packed_weights import QUANTIZED, check_setting, rounded
from depthdecay.cpu.supported_models import Form, OtherForm, form_of, hooked
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack, primary_device
from depthdecay.model.repairs import Repairs
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.plan.plan import Plan
from depthdecay.runners.contract import Part
from depthdecay.runners.forward import ForwardRunner
from depthdecay.runners.kv_blocks import KVBlocks

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # relative to the largest logit of the model's own forward


def open_stack(
    model: Any,
    *,
    quantize: str | None = None,
    origin: WeightsOrigin | None = None,
    fast: bool | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> LayerStack:
    """The model's layers with the fastest passes available: compiled on a CPU if supported, else the model's own.

    `quantize` sets the weights' format (none, int8, int4). Unsupported models run unquantized; a warning says why.
    """
    check_setting(quantize)
    plain = LayerStack.of(model)
    setting = quantize if quantize in QUANTIZED else None
    device = primary_device(plain.model)
    if device.type != "cpu":
        if setting is not None:
            raise DepthDecayError(f"quantize={quantize} needs the model on a CPU, but it is on {device}")
        return plain
    if fast is False and setting is None:
        return plain
    try:
        form = form_of(plain)
        if hooked(plain):
            raise OtherForm("it has hooks or a patched forward")
    except OtherForm as reason:
        if setting is not None or fast:
            _warn(f"{type(plain.model).__name__} runs uncompiled and in its own precision: {reason}")
        return plain
    return _fast_stack(plain, form, setting, origin, fast, say)


def _fast_stack(
    plain: LayerStack,
    form: Form,
    setting: str | None,
    origin: WeightsOrigin | None,
    fast: bool | None,
    say: Callable[[str], None],
) -> LayerStack:
    code = None if fast is False else _code(say)
    if code is None:
        if setting is None or rounded(form, setting, origin, say).is_exact:
            return plain
        return WidenedStack.over(plain, form, setting, origin)
    trial = CompiledLayerStack(plain.model, plain.owner, plain.layers, plain.windows)
    trial.prepare(code, form, None)
    difference = _difference(trial)
    if not difference < _TOLERANCE[form.dtype]:
        if setting is not None or fast:
            _warn(
                f"{type(plain.model).__name__} runs uncompiled and in its own precision: the compiled pass does not "
                f"match it (logits differ by {difference:.2g} of the largest)"
            )
        return plain
    if setting is not None:
        trial.prepare(code, form, rounded(form, setting, origin, say))
    return trial


@torch.no_grad()
def _difference(stack: CompiledLayerStack) -> float:
    """How far a compiled pass is from the model's own forward, over embedding, first and last layer, and LM head."""
    layers, vocabulary = stack.num_layers, stack.form.embedding.num_embeddings
    count = min(5, vocabulary)
    ends = Plan.constant(layers, min(2, layers), drop_order=list(range(1, layers - 1)))
    part = Part(0, 0, [token * (vocabulary // count) for token in range(count)], min(2, layers), ends, count)
    said = []
    for way in (ForwardRunner, CompiledRows):
        blocks = KVBlocks.of_rows(stack.kept_shapes(), [[count] * layers])
        said.append(way(stack, blocks, Repairs()).run([part]).logits.float())
    return float((said[0] - said[1]).abs().max() / said[0].abs().max())


def _code(say: Callable[[str], None]) -> native.Library | None:
    try:
        return native.library(say)
    except native.Unavailable as reason:
        _warn_once(f"without compiled code, decoding on the CPU is several times slower: {reason}")
        return None


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


@functools.cache
def _warn_once(message: str) -> None:
    _warn(message)
