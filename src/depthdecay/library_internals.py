"""The one module that touches private names of torch, inductor and transformers (and one each of lm-eval's and gguf's).

Any release may drop one. So each is looked up on use, a missing one raises an error that names it, and
`tests/test_library_internals.py` tests each for what we need. transformers 5.17 to 5.22 and torch 2.11 to 2.13 have
them all. Only `openmp_threads`, which is for speed, differs by platform. vLLM's are in `integrations/vllm/`, which
supports specific versions only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from depthdecay.errors import MissingNameError
from depthdecay.patches import replaced

PREFILL = "_prefill"  # the model method in which generate runs the prompt, whole or in chunks
COMPILED_PART = "_orig_mod"  # where torch.compile's wrapper keeps the original module


def unfit(library: str, what: str) -> MissingNameError:
    """The error for a library version that depthdecay cannot run with; `what` says how it differs."""
    return MissingNameError(
        f"{library} {version(library)} {what}, but depthdecay relies on it; "
        f"install the version of {library} that constraints.txt names"
    )


def required(owner: Any, name: str, library: str) -> Any:
    """`owner.name`, or an error that says which library version lacks it."""
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
            raise  # a dependency of the module is missing, not the module
        raise unfit(library, f"has no module {module}") from None
    return required(owner, name, library)


# transformers: attention


def attention_name(config: Any) -> str | None:
    """The attention implementation that this configuration selects: 'sdpa' is torch's."""
    name: str | None = required(config, "_attn_implementation", "transformers")
    return name


@contextlib.contextmanager
def attention_named(config: Any, name: str) -> Iterator[None]:
    """While open, this configuration selects the attention implementation `name`.

    The public `set_attn_implementation` validates the name and changes other parts of the model permanently.
    """
    before = required(config, "_attn_implementation_internal", "transformers")
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def attention_function(name: str) -> Callable[..., Any] | None:
    """The function registered for the attention implementation `name`, or None."""
    found: Callable[..., Any] | None = _attention_functions().get(name)
    return found


def eager_attention(module: Any) -> Callable[..., Any]:
    """The function that a model's module runs for 'eager' attention; each modelling file has its own."""
    function: Callable[..., Any] = required(
        sys.modules[type(module).__module__], "eager_attention_forward", "transformers"
    )
    return function


@contextlib.contextmanager
def attention_registered(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """While open, models that select the attention `name` run `function`. The public `register` is permanent."""
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
    """Register `function` as the experts implementation `name`."""
    _imported("transformers.integrations.moe", "ExpertsInterface", "transformers").register(name, function)


@contextlib.contextmanager
def experts_named(config: Any, name: str) -> Iterator[None]:
    """While open, this configuration selects the experts implementation `name`.

    As with attention, the public setter validates the name and changes other parts of the model.
    """
    before = required(config, "_experts_implementation_internal", "transformers")
    config._experts_implementation_internal = name
    try:
        yield
    finally:
        config._experts_implementation_internal = before


def are_gated_experts(module: Any) -> bool:
    """Whether a module holds experts of the most common form, which transformers can run in several ways.

    That is a fused gate-and-up matrix and a down matrix, each (experts, rows, columns), and nothing else.
    """
    special = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    plain = getattr(module, "has_gate", False) and not any(getattr(module, name, False) for name in special)
    return plain and {name for name, _ in module.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}


def gated(experts: Any, products: Any) -> Any:
    """The experts' gated activation, applied to the concatenated gate and up products."""
    return required(experts, "_apply_gate", "transformers")(products)


# transformers: generate and its parts


def method(model: Any, name: str) -> Callable[..., Any]:
    """A method of a model that generate calls, such as `PREFILL`."""
    found: Callable[..., Any] = required(model, name, "transformers")
    return found


def completed_generation_config(model: Any, given: Any, **settings: Any) -> Any:
    """The settings generate would use: those given, then the model's own, then transformers' defaults."""
    config, _ = method(model, "_prepare_generation_config")(given, **settings)
    return config


def logits_processors(model: Any, generation_config: Any, prompt_ids: Any, own: Sequence[Any] | None) -> Any:
    """The logits processors generate would run for these settings, followed by the caller's own."""
    from transformers import LogitsProcessorList

    device = prompt_ids.device
    # Stores the special tokens in the settings as tensors, where the processors look for them.
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
    """Whether generate would give the model a `DynamicCache`; other models create their own state."""
    return bool(method(model, "_supports_default_dynamic_cache")())


def optimized_for_decoding(model: Any) -> contextlib.AbstractContextManager[None]:
    """While open, experts run the way generate runs them for single tokens."""
    context: contextlib.AbstractContextManager[None] = method(model, "_optimize_model_for_decode")()
    return context


# torch


def uncompiled(model: Any) -> Any:
    """The module inside torch.compile's wrapper; any other module unchanged."""
    # If dynamo was never imported, nothing is compiled, and importing it takes a second.
    if "torch._dynamo" not in sys.modules:
        return model
    wrapper = _imported("torch._dynamo", "OptimizedModule", "torch")
    return required(model, COMPILED_PART, "torch") if isinstance(model, wrapper) else model


def forward_hooks(module: Any) -> tuple[int, int]:
    """How many hooks are registered to run before and after a module's forward."""
    before, after = (required(module, name, "torch") for name in ("_forward_pre_hooks", "_forward_hooks"))
    return len(before), len(after)


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspace of each stream; exists in CUDA builds only."""
    import torch

    required(required(torch, "_C", "torch"), "_cuda_clearCublasWorkspaces", "torch")()


def vary_sizes(tensor: Any, dims: Sequence[int]) -> None:
    """Mark these dimensions as dynamic, so that the first compilation already serves any size."""
    _imported("torch._dynamo", "maybe_mark_dynamic", "torch")(tensor, list(dims))


def compilation_errors() -> type[Exception]:
    """What a compiled function's first call raises where it cannot be compiled, for example without a compiler."""
    found: type[Exception] = _imported("torch._dynamo.exc", "TorchDynamoException", "torch")
    return found


# inductor


def graph_pass_class() -> Any:
    """The base class for a pass over a traced graph; inductor does not cache graphs changed by any other pass."""
    return _imported("torch._inductor.custom_graph_pass", "CustomGraphPass", "torch")


def files_key(files: tuple[str, ...], extra: str) -> bytes:
    """The pass's key in inductor's cache: a hash of its source files and of `extra`."""
    key: bytes = _imported("torch._inductor.custom_graph_pass", "get_hash_for_files", "torch")(files, extra=extra)
    return key


@contextlib.contextmanager
def kernel_waits(write: Callable[[Any, Any], None]) -> Iterator[None]:
    """While open, `write(kernel, buffer)` inserts the wait into a generated kernel that may start early.

    It is called before each load and store, with the buffer of lines that will contain the access. `GDC_WAIT` is the
    line that waits; inductor keeps only the first one in a kernel.
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


@contextlib.contextmanager
def whole_reductions(most: int) -> Iterator[None]:
    """While open, generated kernels that reduce rows of up to `most` adjacent elements hold a whole row at once.

    By default inductor holds 1,024, and reads longer rows twice, in loops.
    """
    choices = _imported("torch._inductor.choices", "InductorChoices", "torch")
    name = "should_use_persistent_reduction"
    original = required(choices, name, "torch")
    wrapped = choices.__dict__[name]  # the staticmethod itself, for putting it back

    def holds_whole(features: Any, cooperative_reduction: bool) -> bool:
        size, hint = features.reduction_numel, features.get_reduction_hint()
        is_row = hint.name == "INNER" and not cooperative_reduction and size.is_number and size <= most
        return is_row or original(features, cooperative_reduction)

    setattr(choices, name, staticmethod(holds_whole))
    try:
        yield
    finally:
        setattr(choices, name, wrapped)


def _waiting_kernel() -> Any:
    """inductor's class of generated kernels, checked for what we use; it is slow to import."""
    kernel = _imported("torch._inductor.codegen.triton", "TritonKernel", "torch")
    for name in ("_enable_pdl_codegen", "GDC_WAIT"):
        required(kernel, name, "torch")
    return kernel


# gguf


@functools.cache
def gguf_reader_class() -> Any:
    """`gguf.GGUFReader`, three times as fast: a header with a vocabulary is read in a million small slices.

    It slices a memory map, whose slices are memory maps themselves; slices of a plain array cost a third.
    """
    import numpy as np

    reader = _imported("gguf", "GGUFReader", "gguf")
    required(reader, "_get", "gguf")

    class QuickReader(reader):  # type: ignore[misc,valid-type]
        data: Any

        def _get(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = np.asarray(self.data)
            return super()._get(*args, **kwargs)

    return QuickReader


@contextlib.contextmanager
def gguf_looked_up_once(read: Callable[[Any], Any]) -> Iterator[None]:
    """While open, transformers reads GGUF files with `read`, and makes its table of tensor names once per model.

    Otherwise it reads the header twice, and makes the table for every module of the model.
    """
    import gguf

    names = required(gguf, "get_tensor_name_map", "gguf")
    with replaced(gguf, "GGUFReader", read), replaced(gguf, "get_tensor_name_map", functools.cache(names)):
        yield


# lm-eval


def lm_eval_command_line() -> Any:
    """lm-eval's own command line, which parses and runs arguments."""
    return _imported("lm_eval._cli", "HarnessCLI", "lm_eval")()


# torch: threads


@functools.cache
def openmp_threads() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Get and set how many threads torch uses for operations of the calling thread; None where that is not known.

    `torch.set_num_threads` would also set it for every thread that starts later.
    """
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, AttributeError):  # another platform, or torch built without OpenMP
        return None
