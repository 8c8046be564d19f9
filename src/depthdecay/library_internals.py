"""The one module that touches private names of torch, inductor and transformers (and one of lm-eval's).

Any release may drop one. So each is looked up when it is used, a missing one is an error that names it, and
`tests/test_library_internals.py` holds each to what we need of it. None is optional: transformers 5.17 to 5.22 and
torch 2.11 to 2.13 have them all. vLLM's are in `integrations/vllm/`, which runs with one version only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from depthdecay.errors import MissingNameError

PREFILL = "_prefill"  # the method of a model in which generate reads the prompt, in one piece or several
COMPILED_PART = "_orig_mod"  # the name under which torch.compile keeps a module inside the one it puts around it


def unfit(library: str, what: str) -> MissingNameError:
    """The error for a version of a library that depthdecay cannot run on, by what is different in it."""
    return MissingNameError(
        f"{library} {version(library)} {what}, but depthdecay relies on it; "
        f"install the version of {library} that constraints.txt names"
    )


def required(owner: Any, name: str, library: str) -> Any:
    """`owner.name`, or an error that says which version of which library has no such name."""
    try:
        return getattr(owner, name)
    except AttributeError:
        whose = getattr(owner, "__name__", type(owner).__name__)
        raise unfit(library, f"has no {whose}.{name}") from None


def _imported(module: str, name: str, library: str) -> Any:
    try:
        owner = __import__(module, fromlist=[name])
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):
            raise  # what is missing is something that the module needs
        raise unfit(library, f"has no module {module}") from None
    return required(owner, name, library)


# transformers: attention


def attention_name(config: Any) -> str | None:
    """Which attention a model with this configuration asks for: 'sdpa' is torch's."""
    name: str | None = required(config, "_attn_implementation", "transformers")
    return name


@contextlib.contextmanager
def attention_named(config: Any, name: str) -> Iterator[None]:
    """While open, a model with this configuration asks for the attention `name`.

    The public `set_attn_implementation` checks the name and changes other parts of the model for good.
    """
    before = required(config, "_attn_implementation_internal", "transformers")
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def attention_function(name: str) -> Callable[..., Any] | None:
    """What models run that ask for the attention `name`; None where nothing is registered under it."""
    found: Callable[..., Any] | None = _attention_functions().get(name)
    return found


def eager_attention(module: Any) -> Callable[..., Any]:
    """What a module of a model runs that asks for the attention 'eager': each model's file has its own."""
    function: Callable[..., Any] = required(
        sys.modules[type(module).__module__], "eager_attention_forward", "transformers"
    )
    return function


@contextlib.contextmanager
def attention_registered(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While open, models that ask for the attention `name` run `function`. The public `register` is for good."""
    functions = _attention_functions()
    before = functions.get(name)
    functions[name] = function
    try:
        yield
    finally:
        if before is None:
            functions.pop(name, None)
        else:
            functions[name] = before


def _attention_functions() -> dict[str, Callable[..., Any]]:
    from transformers.modeling_utils import AttentionInterface

    functions: dict[str, Callable[..., Any]] = required(AttentionInterface, "_global_mapping", "transformers")
    return functions


# transformers: experts


def register_experts(name: str, function: Callable[..., Any]) -> None:
    """Let models that ask for experts named so run them by `function`."""
    _imported("transformers.integrations.moe", "ExpertsInterface", "transformers").register(name, function)


@contextlib.contextmanager
def experts_named(config: Any, name: str) -> Iterator[None]:
    """While open, a model with this configuration asks for the experts `name`.

    As for attention, the public way to say so checks the name and changes other parts of the model.
    """
    before = required(config, "_experts_implementation_internal", "transformers")
    config._experts_implementation_internal = name
    try:
        yield
    finally:
        config._experts_implementation_internal = before


def are_gated_experts(module: Any) -> bool:
    """Whether a module holds experts that transformers can run in several ways, of the most common form.

    A gate and an up matrix in one and a down matrix, each (experts, rows, columns), and nothing beside them.
    """
    special = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    plain = getattr(module, "has_gate", False) and not any(getattr(module, name, False) for name in special)
    return plain and {name for name, _ in module.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}


def gated(experts: Any, products: Any) -> Any:
    """What experts make of the products with their gate and up matrices, side by side."""
    return required(experts, "_apply_gate", "transformers")(products)


# transformers: generate and its parts


def method(model: Any, name: str) -> Callable[..., Any]:
    """A method of a model that generate calls, such as `PREFILL`."""
    found: Callable[..., Any] = required(model, name, "transformers")
    return found


def completed_generation_config(model: Any, given: Any, **settings: Any) -> Any:
    """The settings that generate would go by: those given, over the model's own, over transformers' defaults."""
    config, _ = method(model, "_prepare_generation_config")(given, **settings)
    return config


def logits_processors(model: Any, generation_config: Any, prompt_ids: Any, own: Sequence[Any] | None) -> Any:
    """The processors that generate would run for these settings, then the caller's own: a `LogitsProcessorList`."""
    from transformers import LogitsProcessorList

    device = prompt_ids.device
    # Writes the special tokens into the settings as tensors, where the processors look for them.
    method(model, "_prepare_special_tokens")(generation_config, True, device=device)
    return method(model, "_get_logits_processor")(
        generation_config=generation_config,
        input_ids_seq_length=prompt_ids.shape[1],
        encoder_input_ids=prompt_ids,
        logits_processor=LogitsProcessorList(own or []),
        device=str(device),
        model_kwargs={},
    )


def takes_dynamic_cache(model: Any) -> bool:
    """Whether generate would give the model a `DynamicCache`; others make a state of their own."""
    return bool(method(model, "_supports_default_dynamic_cache")())


def optimized_for_decoding(model: Any) -> contextlib.AbstractContextManager[None]:
    """While open, experts run as generate lets them run for single tokens."""
    context: contextlib.AbstractContextManager[None] = method(model, "_optimize_model_for_decode")()
    return context


# torch


def uncompiled(model: Any) -> Any:
    """The module inside what torch.compile puts around it; any other as it is."""
    # Where nobody has imported dynamo, nothing is compiled; to import it would take a second.
    if "torch._dynamo" not in sys.modules:
        return model
    wrapper = _imported("torch._dynamo", "OptimizedModule", "torch")
    return required(model, COMPILED_PART, "torch") if isinstance(model, wrapper) else model


def forward_hooks(module: Any) -> tuple[int, int]:
    """How many functions run before and after a module's forward because somebody has registered them."""
    before, after = (required(module, name, "torch") for name in ("_forward_pre_hooks", "_forward_hooks"))
    return len(before), len(after)


def clear_cublas_workspaces() -> None:
    """Free the memory that cuBLAS keeps for each stream; only builds for CUDA have it."""
    import torch

    required(required(torch, "_C", "torch"), "_cuda_clearCublasWorkspaces", "torch")()


def vary_sizes(tensor: Any, dims: Sequence[int]) -> None:
    """Let what is compiled for this tensor serve any size of these dimensions, from the first compilation on."""
    _imported("torch._dynamo", "maybe_mark_dynamic", "torch")(tensor, list(dims))


# inductor


def graph_pass_class() -> Any:
    """What a pass over a traced graph derives from: inductor caches nothing that other passes have changed."""
    return _imported("torch._inductor.custom_graph_pass", "CustomGraphPass", "torch")


def files_key(files: tuple[str, ...], extra: str) -> bytes:
    """What tells inductor's cache that a pass has changed: a hash of the files it is written in, and of `extra`."""
    key: bytes = _imported("torch._inductor.custom_graph_pass", "get_hash_for_files", "torch")(files, extra=extra)
    return key


@contextlib.contextmanager
def kernel_waits(write: Callable[[Any, Any], None]) -> Iterator[None]:
    """While open, `write(kernel, buffer)` puts the wait into a generated kernel that may start early.

    It is called ahead of each load and store, with the lines that the access will be among. The kernel's `GDC_WAIT` is
    the line that waits; inductor keeps only the first in a kernel.
    """
    kernel = _waiting_kernel()
    hook = "_handle_pdl_before_access"
    original = required(kernel, hook, "torch")

    def before_access(self: Any, buffer: Any, *_dependencies: Any, **_kwargs: Any) -> None:
        if self._enable_pdl_codegen():
            write(self, buffer)

    setattr(kernel, hook, before_access)
    try:
        yield
    finally:
        setattr(kernel, hook, original)


def _waiting_kernel() -> Any:
    """inductor's class of generated kernels, which takes long to import, with all that is asked of it."""
    kernel = _imported("torch._inductor.codegen.triton", "TritonKernel", "torch")
    for name in ("_enable_pdl_codegen", "GDC_WAIT"):
        required(kernel, name, "torch")
    return kernel


# lm-eval


def lm_eval_command_line() -> Any:
    """lm-eval's own command line, to parse words by and to run what they say."""
    return _imported("lm_eval._cli", "HarnessCLI", "lm_eval")()
