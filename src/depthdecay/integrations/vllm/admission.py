"""Check a request's depth settings in the front end: an error further down would end the engine for everybody.

A server that is asked for depth decay but runs a model without it is stopped here too.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import ARCHITECTURES
from depthdecay.integrations.vllm.settings import KEY, depth_of

_DONE = "_checks_depth_decay"


def install() -> None:
    """Wrap vLLM's input processor: its hooks for plug-ins see a request, but not the model."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from depthdecay.integrations.vllm.releases import watch_beam_search

    if getattr(InputProcessor, _DONE, False):
        return
    process_inputs = InputProcessor.process_inputs
    start = InputProcessor.__init__

    @wraps(start)
    def started(self: Any, vllm_config: Any, *more: Any, **named: Any) -> None:
        check_model(vllm_config.model_config)
        start(self, vllm_config, *more, **named)

    @wraps(process_inputs)
    def checked(self: Any, request_id: str, prompt: Any, params: Any, *more: Any, **named: Any) -> Any:
        try:
            _check(self, params, bool(named.get("resumable")))
        except DepthDecayError as error:
            raise VLLMValidationError(str(error), parameter=KEY) from None
        return process_inputs(self, request_id, prompt, params, *more, **named)

    def refuse_beams(model_config: Any) -> None:
        if model_config.architecture in ARCHITECTURES.values():
            raise VLLMValidationError(
                "beam search submits each token as the end of a new prompt, so every token would run all layers; leave "
                "use_beam_search out",
                parameter=KEY,
            )

    InputProcessor.__init__ = started
    InputProcessor.process_inputs = checked
    watch_beam_search(refuse_beams)
    setattr(InputProcessor, _DONE, True)


def check_model(model: Any) -> None:
    """Refuse depth decay for a model that would ignore it."""
    if model.architecture in ARCHITECTURES.values() or getattr(model.hf_config, KEY, None) is None:
        return
    ours = ARCHITECTURES.get(model.architecture)
    known = f'add "architectures": ["{ours}"] to --hf-overrides' if ours else f"known are {', '.join(ARCHITECTURES)}"
    raise DepthDecayError(f"the configuration has {KEY}, but {model.architecture} would ignore it; {known}")


def _check(processor: Any, params: Any, resumable: bool) -> None:
    config = processor.model_config.hf_config
    extra_args = getattr(params, "extra_args", None) or {}
    if processor.model_config.architecture not in ARCHITECTURES.values():
        if KEY in extra_args:
            raise DepthDecayError(
                f"this request has {KEY}, but the server runs {processor.model_config.architecture} without it"
            )
        return
    if resumable:
        raise DepthDecayError(
            "streaming input cannot be served with depth decay: text generated between pieces of a prompt lacks keys "
            "and values; send the whole prompt"
        )
    if not hasattr(processor, KEY):
        setattr(processor, KEY, depth_of(config))
    getattr(processor, KEY).plan_of(extra_args)
