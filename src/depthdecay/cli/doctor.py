"""`depthdecay doctor`: which fast paths work on this machine and for this model, and why others do not."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from depthdecay.cli import options as opt
from depthdecay.cli.show import out_console, working
from depthdecay.errors import one_line

if TYPE_CHECKING:
    from depthdecay.model.layers import LayerStack

_LEAST_FREE = 2 * 10**9  # bytes for converted weights and compiled kernels
_EXTRAS = {"serve": "fastapi", "eval": "lm_eval", "plot": "matplotlib", "vllm": "vllm"}
_MARKS = {"fast": ("✓", "green"), "slow": ("✗", "red"), "note": ("·", "dim")}


@dataclass(frozen=True)
class Finding:
    """One line of output. `slow`: it would be faster without the obstacle that `detail` names."""

    verdict: Literal["fast", "slow", "note"]
    name: str
    detail: str


@opt.grouped()
def doctor(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Also check which fast paths support this model.")
    ] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.Json = False,
) -> None:
    """Show which fast paths work on this machine, and why others do not: compiler, CUDA graphs, compiled layers."""
    with working("checking …", quiet=as_json):
        findings = list(_machine())
        if model is not None:
            options = opt.ModelOptions(model, device, dtype, trust_remote_code=trust_remote_code)
            findings += _model(options, as_json)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
        return
    for finding in findings:
        out_console().print(
            Text.assemble(_MARKS[finding.verdict], f" {finding.name}", (f"  {finding.detail}", "dim")), soft_wrap=True
        )


def _machine() -> Iterator[Finding]:
    from depthdecay import __version__

    found = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
    yield Finding("note", "versions", f"depthdecay {__version__}, Python {platform.python_version()}, {found}")
    yield from _cpu()
    yield from _cuda()
    yield _cache()
    there = [name for name, module in _EXTRAS.items() if find_spec(module) is not None]
    missing = [name for name in _EXTRAS if name not in there]
    words = f"installed: {', '.join(there) or 'none'}" + (f"; not installed: {', '.join(missing)}" if missing else "")
    yield Finding("note", "extras", words)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _cpu() -> Iterator[Finding]:
    from depthdecay.cpu import kernel_library
    from depthdecay.cpu.threads import physical_cores

    features = kernel_library.processor_features()
    width = next((name for name in ("avx512f", "avx2", "asimd") if name in features), "no known vector extension")
    try:
        compiler = kernel_library.find_compiler()
        kernel_library.library()
        words = f"{os.path.basename(compiler)}, {physical_cores()} cores, {width}"
        yield Finding("fast", "compiled passes on the CPU", words)
    except kernel_library.Unavailable as reason:
        yield Finding("slow", "compiled passes on the CPU", f"{reason}; models on the CPU run with torch alone")


def _cuda() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        yield Finding("note", "CUDA", "no GPU, or no driver for it" if built else "this torch is a CPU build")
        return
    properties = torch.cuda.get_device_properties(0)
    generation = f"{properties.major}.{properties.minor}"
    yield Finding("fast", "CUDA graphs", f"{properties.name}, compute capability {generation}")
    if find_spec("triton") is None:
        yield Finding("slow", "compiled layers", "Triton is not installed; layers run uncompiled")
    elif properties.major < 8:
        yield Finding("slow", "compiled layers", f"our kernels need compute capability 8.0; this GPU has {generation}")
    elif shutil.which("cc") is None and shutil.which("gcc") is None and os.environ.get("CC") is None:
        yield Finding("slow", "compiled layers", "Triton needs a C compiler (gcc, or $CC) to launch its kernels")
    else:
        overlap = "kernels overlap" if properties.major >= 9 else "kernels do not overlap before capability 9.0"
        yield Finding("fast", "compiled layers", f"Triton {_version('triton')}; {overlap}")


def _cache() -> Finding:
    from depthdecay.files import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            return Finding("slow", "cache folder", f"{folder} is not writable; every start converts and compiles again")
    except OSError as error:
        return Finding("slow", "cache folder", f"{folder}: {one_line(error)}; every start converts and compiles again")
    words = f"{folder}, {free / 1e9:.0f} GB free"
    return Finding("fast" if free >= _LEAST_FREE else "slow", "cache folder", words)


def _model(options: opt.ModelOptions, quiet: bool) -> Iterator[Finding]:
    from depthdecay.model.layers import LayerStack, primary_device
    from depthdecay.plan.stored_plans import shipped_plan

    loaded = options.load(quiet=quiet)
    stack = LayerStack.of(loaded.model)
    device = primary_device(stack.model)
    dtype = str(stack.model.dtype).removeprefix("torch.")
    name = type(stack.model).__name__
    yield Finding("note", "model", f"{loaded.name}: {name}, {stack.num_layers} layers, {dtype} on {device}")
    yield _on_cuda(stack) if device.type == "cuda" else _on_cpu(stack)
    yield _exact(stack) if device.type == "cuda" else _exact_on_cpu(stack)
    shipped = shipped_plan(loaded.name)
    if shipped is None:
        words = "none is shipped for this model; `depthdecay calibrate` makes one, with `--lossless` a drafter"
        yield Finding("slow", "calibrated plan", words)
    else:
        yield Finding("fast", "calibrated plan", shipped.describe())


def _on_cpu(stack: LayerStack) -> Finding:
    reason = _why_not_compiled(stack)
    if reason is None:
        return Finding("fast", "compiled passes", "this architecture is supported")
    return Finding("slow", "compiled passes", f"{reason}; the model's own forward is used")


def _exact_on_cpu(stack: LayerStack) -> Finding:
    if _why_not_compiled(stack) is None:
        return Finding("fast", "bitwise lossless", "one text at a time, and with quantized weights in any batch")
    return Finding("note", "lossless up to near-ties", "passes are not compiled")


def _why_not_compiled(stack: LayerStack) -> str | None:
    from depthdecay.cpu.supported_models import OtherForm, form_of, hooked

    try:
        form_of(stack)
    except OtherForm as reason:
        return str(reason)
    return "the model has hooks or a patched forward" if hooked(stack) else None


def _on_cuda(stack: LayerStack) -> Finding:
    spread = len(set((getattr(stack.model, "hf_device_map", None) or {}).values())) > 1
    if spread:
        return Finding("slow", "graphs", "the model is split over several devices, so its passes are not captured")
    return Finding("fast", "graphs", "whole passes are captured, with compiled layers where supported")


def _exact(stack: LayerStack) -> Finding:
    from depthdecay.cuda.exactness import why_inexact

    reason = why_inexact(stack)
    if reason is None:
        words = "its parts allow it; a test before the first answer decides"
        return Finding("fast", "bitwise lossless", words)
    return Finding("note", "lossless up to near-ties", reason)
