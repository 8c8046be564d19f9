"""Rounded weights without compiled code: a model with the floats that its rounded weights stand for."""

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
    """Rounded weights without compiled code: the model's own forward, given what the rounded weights stand for."""

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
        # The head may be the embedding too, which is not rounded: it is replaced by what it does.
        def said(state: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(state, self.head_weight, self.head.bias)

        with contextlib.nullcontext() if "forward" in self.head.__dict__ else patched(self.head, "forward", said):
            return torch.func.functional_call(self.model, self.widened, kwargs=arguments)


def widen_in_place(model: Any, setting: str, origin: WeightsOrigin | None = None) -> None:
    """Give a model the weights that it has at a setting: calibration looks into layers, which compiled code hides.

    An output matrix that is the embedding too stays as it is: embeddings are not rounded.
    """
    check_setting(setting)
    plain = LayerStack.of(model)
    device = primary_device(plain.model)
    if device.type != "cpu":
        raise DepthDecayError(f"quantize={setting} is for models on a CPU, and this one is on {device}")
    try:
        form = form_of(plain)
    except OtherForm as reason:
        warnings.warn(f"{type(plain.model).__name__} stays in its own precision: {reason}", stacklevel=3)
        return
    weights = widened_weights(form, setting, origin)
    with torch.no_grad():
        for name, linear in form.matrices():
            if name in weights and linear.weight is not form.embedding.weight:
                linear.weight.copy_(weights[name])
