"""Adapts Triton's interpreter to these tests; import it before the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _with_whole_numbers(tensor: object, scope: object) -> None:
    """Triton 3.6 uses one-element arrays as loop bounds, which newer versions of NumPy reject."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]


def _dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
    """In twice the bits: on some processors NumPy's products sum in an order that depends on the matrix's width."""
    found = np.matmul(a.data, b.data, dtype=np.float64) + d.data
    return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)


interpreter._patch_lang_tensor = _with_whole_numbers
interpreter.InterpreterBuilder.create_dot = _dot
