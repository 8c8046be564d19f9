"""The kinds of `depthdecay bench` and the options each takes; an option without effect is refused."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from depthdecay.errors import DepthDecayError

_EVERYWHERE = frozenset({"device", "json_file"})
_PLAN = frozenset({"plan", "alpha", "speedup", "over"})


@dataclass(frozen=True)
class Kind:
    """A kind of benchmark: its name, the options that select it, and those it takes besides the common ones."""

    name: str
    asked_by: str
    takes: frozenset[str]


SPEED = Kind(
    "methods",
    "--shape, --methods, --dtype, --batch or a GPU",
    _PLAN | {"shape", "model", "dtype", "new_tokens", "prompt_tokens", "batch", "rounds", "methods", "compile"},
)
PRECISIONS = Kind(
    "CPU precisions",
    "a --model on a CPU without --methods, --dtype or --batch",
    # --batch can only be 1 here, which is what runs.
    _PLAN | {"model", "quantize", "threads", "new_tokens", "prompt_tokens", "batch", "rounds"},
)
LOSSLESS = Kind(
    "lossless mode",
    "--mode lossless and --prompts",
    frozenset({"mode", "model", "dtype", "plan", "prompts", "task", "limit", "compared", "peers", "assistant"})
    | {"temperature", "new_tokens", "compile", "quantize"},
)
PASSES = Kind(
    "a shape's passes",
    "--mode lossless and --shape",
    frozenset({"mode", "shape", "dtype", "prompt_tokens", "compile"}),
)
KINDS = (SPEED, PRECISIONS, LOSSLESS, PASSES)


def refuse_ignored(context: typer.Context, kind: Kind) -> None:
    """Refuse the first option given that this kind of benchmark would ignore."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name in kind.takes | _EVERYWHERE or source is None or source.name in ("DEFAULT", "DEFAULT_MAP"):
            continue
        fitting = ", or with ".join(other.asked_by for other in KINDS if name in other.takes)
        raise DepthDecayError(f"{parameter.opts[0]} has no effect in a benchmark of {kind.name}; use it with {fitting}")
