"""What a request says about depth is checked where it comes in: later an error would end the engine for everybody."""

from __future__ import annotations

from functools import wraps
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.vllm import ARCHITECTURES
from depthdecay.vllm.settings import KEY, server_depth

_DONE = "_checks_depth_decay"


def install() -> None:
    """Wrap vLLM's input processor: its hooks for plug-ins see a request, but not which model it is for."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    if getattr(InputProcessor, _DONE, False):
        return
    process_inputs = InputProcessor.process_inputs

    @wraps(process_inputs)
    def checked(self: Any, request_id: str, prompt: Any, params: Any, *more: Any, **named: Any) -> Any:
        try:
            _check(self, params, bool(named.get("resumable")))
        except DepthDecayError as error:
            raise VLLMValidationError(str(error), parameter=KEY) from None
        return process_inputs(self, request_id, prompt, params, *more, **named)

    InputProcessor.process_inputs = checked
    setattr(InputProcessor, _DONE, True)


def _check(processor: Any, params: Any, resumable: bool) -> None:
    config = processor.model_config.hf_config
    extra_args = getattr(params, "extra_args", None) or {}
    if processor.model_config.architecture not in ARCHITECTURES.values():
        if KEY in extra_args:
            raise DepthDecayError(
                f"this request asks for {KEY}, but the server runs {processor.model_config.architecture} without it"
            )
        return
    if resumable:
        raise DepthDecayError(
            "a request whose prompt comes in pieces cannot be served with depth decay: what was generated between them "
            "lacks keys and values"
        )
    if not hasattr(processor, KEY):
        setattr(processor, KEY, server_depth(getattr(config, KEY, None), config.num_hidden_layers))
    getattr(processor, KEY).plan_of(extra_args)
