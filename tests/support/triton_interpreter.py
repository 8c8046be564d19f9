"""Triton's interpreter made to run with newer versions of NumPy; import it ahead of the kernels."""

from __future__ import annotations

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _with_whole_numbers(tensor: object, scope: object) -> None:
    """Triton 3.6 makes loop bounds of arrays of one number, which newer versions of NumPy refuse."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]


interpreter._patch_lang_tensor = _with_whole_numbers
