"""Makes Triton's interpreter work with newer versions of NumPy; import it before the kernels."""

from __future__ import annotations

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _with_whole_numbers(tensor: object, scope: object) -> None:
    """Triton 3.6 uses one-element arrays as loop bounds, which newer versions of NumPy reject."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]


interpreter._patch_lang_tensor = _with_whole_numbers
