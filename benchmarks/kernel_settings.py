"""Settings of our kernels that a benchmark may vary, as words such as gemv.AHEAD=4,gemv.15360x5120=64/4/5/1/256.

The second is the tiling of one product, by its rows in all and its columns: weight rows per program, warps, stages,
parts and columns per load (`gemv.Tiling`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from depthdecay.cuda.kernels import dependent_launch, gated_product, gemv, host_copy, split_attention
from depthdecay.patches import patched, replaced

MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (dependent_launch, gated_product, gemv, host_copy, split_attention)
}
OURS = "ours"  # nothing varied
_PRODUCT = re.compile(r"gemv\.(\d+)x(\d+)")


@dataclass
class KernelSettings:
    constants: dict[str, Any] = field(default_factory=dict)
    tilings: dict[tuple[int, int], gemv.Tiling] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)  # not of our kernels

    @classmethod
    def of(cls, words: str) -> KernelSettings:
        found = cls()
        for pair in words.split(",") if words != OURS else ():
            name, _, text = pair.partition("=")
            product, (module, _, constant) = _PRODUCT.fullmatch(name), name.partition(".")
            if product:
                rows, columns = map(int, product.groups())
                found.tilings[rows, columns] = gemv.Tiling(*map(int, text.split("/")))
            elif module not in MODULES:
                found.others[name] = value_of(text)
            elif hasattr(MODULES[module], constant):
                found.constants[name] = value_of(text)
            else:
                raise SystemExit(f"{module} has no constant {constant}")
        return found

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """What is compiled or captured inside has these settings."""
        with contextlib.ExitStack() as undo:
            if self.tilings:
                undo.enter_context(patched(gemv, "tiling", self._tiling_after(gemv.tiling)))
            for name, value in self.constants.items():
                module, _, constant = name.partition(".")
                undo.enter_context(replaced(MODULES[module], constant, value))
            yield

    def _tiling_after(self, plain: Any) -> Any:
        def tiling(weights: Sequence[torch.Tensor]) -> gemv.Tiling:
            size = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
            return self.tilings[size] if size in self.tilings else plain(weights)

        return tiling


def value_of(text: str) -> Any:
    """As JSON has it: numbers, true, false; other words stay words."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text
