"""vLLM's own kernels for norms, rotary embeddings and activations, in passes that its compiler does not see.

With the compiler on, vLLM writes these operations in plain PyTorch and leaves fusing them to it. A pass by depth runs
layers outside the compiled model, where each of them would be a handful of small kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm.config import CompilationMode
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform

_PROVIDERS = ("vllm_c", "native")


class FusedKernels:
    """`with kernels():` around layers of this model; it changes nothing where vLLM does not compile."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.needed = vllm_config.compilation_config.mode not in (None, CompilationMode.NONE)
        self._methods = dict(_kernel_methods(model)) if self.needed else {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self.needed:
            yield
            return
        before = {op: op._forward_method for op in self._methods}
        with ExitStack() as stack:
            for ir_op in _ir_ops():
                stack.enter_context(ir_op.set_priority([name for name in _PROVIDERS if name in ir_op.impls]))
            try:
                for op, method in self._methods.items():
                    op._forward_method = method
                yield
            finally:
                for op, method in before.items():
                    op._forward_method = method


def _kernel_methods(model: Any) -> Iterator[tuple[Any, Any]]:
    name = "forward_hip" if current_platform.is_rocm() else "forward_cuda"
    for module in model.modules():
        # One that has no kernel keeps what it runs.
        if isinstance(module, CustomOp) and type(module).forward_cuda is not CustomOp.forward_cuda:
            assert hasattr(module, "_forward_method")
            yield module, getattr(module, name)


def _ir_ops() -> list[Any]:
    """The operations that choose their kernel by priority, and not by the module's method."""
    from vllm.ir.op import IrOp

    return list(IrOp.registry.values())
