"""Quantized weights without compiled code: runs the model with its dequantized weights."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn

from depthdecay.cpu.packed_weights import check_setting, widened_weights
from depthdecay.cpu.supported_models import Form, OtherForm, form_of
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack, primary_device
from depthdecay.model.weights_origin import WeightsOrigin
from depthdecay.patches import patched


class WidenedStack(LayerStack):
    """Quantized weights without compiled code: the model's own forward with dequantized weights."""

    widened: dict[str, torch.Tensor]
    head: nn.Linear
    head_weight: torch.Tensor

    @classmethod
    def over(cls, plain: LayerStack, form: Form, setting: str, origin: WeightsOrigin | None) -> WidenedStack:
        stack = cls(plain.model, plain.owner, plain.layers, plain.windows)
        names = {id(parameter): name for name, parameter in plain.model.named_parameters()}
        weights = widened_weights(form, setting, origin)
        stack.head, stack.head_weight = form.head, weights.pop("head", form.head.weight)
        linears = dict(form.matrices())
        stack.widened = {names[id(linears[name].weight)]: weight for name, weight in weights.items()}
        return stack

    def forward(self, **arguments: Any) -> Any:
        # The LM head may be tied to the embedding, which is not quantized. So its forward is replaced, not its weight.
        def said(state: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(state, self.head_weight, self.head.bias)

        with contextlib.nullcontext() if "forward" in self.head.__dict__ else patched(self.head, "forward", said):
            return torch.func.functional_call(self.model, self.widened, kwargs=arguments)


def widen_in_place(model: Any, setting: str, origin: WeightsOrigin | None = None) -> None:
    """Replace a model's weights by their dequantized values, for calibration, which needs the layers' own forward.

    A tied LM head stays as it is, since embeddings are not quantized.
    """
    check_setting(setting)
    plain = LayerStack.of(model)
    device = primary_device(plain.model)
    if device.type != "cpu":
        raise DepthDecayError(f"quantize={setting} needs the model on a CPU, but it is on {device}")
    try:
        form = form_of(plain)
    except OtherForm as reason:
        warnings.warn(f"{type(plain.model).__name__} is not quantized: {reason}", stacklevel=3)
        return
    weights = widened_weights(form, setting, origin)
    with torch.no_grad():
        for name, linear in form.matrices():
            if name in weights and linear.weight is not form.embedding.weight:
                linear.weight.copy_(weights[name])
