"""Depth decay inside vLLM, as a plug-in: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import importlib.util
import logging

from depthdecay.errors import DepthDecayError, install

# The plug-in uses vLLM's internals, which change between releases, so these are the tested ones. `releases` has their
# differences. The first is what the extra installs.
VLLM_VERSIONS = ("0.32.0", "0.26.0")

_STOCK = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ARCHITECTURES = {stock: f"DepthDecay{stock}" for stock in _STOCK}


def is_installed() -> bool:
    """A package with code; a mere folder of that name on Python's path does not count."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def check_version() -> None:
    """Refuse a release of vLLM that the plug-in does not support."""
    if not is_installed():
        raise DepthDecayError(f"vLLM is not installed; {install('vllm')}")
    import vllm

    found = str(vllm.__version__)
    # Builds for other devices append to the version, as in 0.32.0+cpu; the code is the same.
    if found.partition("+")[0] not in VLLM_VERSIONS:
        raise DepthDecayError(
            f"depth decay inside vLLM is for vLLM {' or '.join(VLLM_VERSIONS)}, but this is {found}; {install('vllm')}"
        )


def register() -> None:
    """Register the models. In another release, only warn: other models in the same vLLM must not be affected."""
    try:
        check_version()
    except DepthDecayError as error:
        logging.getLogger("vllm.depthdecay").warning("depthdecay is not registered: %s", error)
        return
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from depthdecay.integrations.vllm import admission, metrics
    from depthdecay.integrations.vllm.refusals import DepthDecayModelConfig

    for name in ARCHITECTURES.values():
        ModelRegistry.register_model(name, f"depthdecay.integrations.vllm.models:{name}")
        MODELS_CONFIG_MAP[name] = DepthDecayModelConfig
    admission.install()
    metrics.install()
