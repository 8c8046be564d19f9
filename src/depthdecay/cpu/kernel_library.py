"""The compiled pass: kernels.cpp, built once per machine, cached on disk, and called through ctypes.

The interface is plain C. Neither Python nor torch headers are needed, so any C++ compiler works, in seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

from depthdecay.errors import one_line
from depthdecay.files import cache_folder, made_aside, write_whole

SOURCE = Path(__file__).with_name("kernels.cpp")
OFF = "DEPTHDECAY_KERNELS"  # if 0, nothing is compiled or loaded
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-w")
# Flags for this processor's instruction set, tried in order: not every compiler knows them all. The last is none.
_WIDE = ("-march=native", "-mprefer-vector-width=512")
_TUNED: tuple[tuple[str, ...], ...] = (_WIDE, ("-march=native",), ("-mcpu=native",), ())
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_SECONDS = 300


class Unavailable(Exception):
    """Why there is no compiled pass here; the caller continues without it."""


class Matrix(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("columns", c_int64), ("kind", c_int64)]


class Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        ("window", c_int64),
    ]


class Map(Structure):
    _fields_ = [(name, Matrix) for name in ("down", "up", "gate", "lift", "out")]


class Segment(Structure):
    _fields_ = [("first", c_int64), ("count", c_int64), ("map", POINTER(POINTER(Map)))]


class ModelStruct(Structure):
    alive: list[Any]  # what its pointers point to

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "heads", "key_value_heads", "head_size", "neurons", "layers")),
        ("epsilon", c_float),
        ("scale", c_float),
        ("layer", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("head", Matrix),
        ("embedding", Matrix),
        ("join", Matrix),
        ("beside_norm", c_void_p),
    ]


class Pass(Structure):
    _fields_ = [
        ("tokens", c_int64),
        ("batch", c_int64),
        ("ids", c_void_p),
        *((name, POINTER(c_int64)) for name in ("row", "column")),
        *((name, c_void_p) for name in ("cosine", "sine", "state")),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("table", c_void_p),
        ("most", c_int64),
        ("block", c_int64),
        ("halves", c_int64),
        ("running", POINTER(c_int64)),
        ("segment", POINTER(Segment)),
        ("segments", c_int64),
        ("wanted", POINTER(c_int64)),
        ("logits_wanted", c_int64),
        ("logits", c_void_p),
        ("best", POINTER(c_int64)),
        ("share", POINTER(c_float)),
        ("threads", c_int64),
        ("beside", c_void_p),
        ("joined", c_void_p),
        ("saved", POINTER(c_void_p)),
    ]


class WindowStruct(Structure):
    _fields_ = [
        *((name, POINTER(ModelStruct)) for name in ("model", "head")),
        *((name, POINTER(Pass)) for name in ("verification", "read")),
        *((name, POINTER(c_int64)) for name in ("ids", "columns", "read_columns", "running")),
        ("segment", POINTER(Segment)),
        ("vocabulary", c_void_p),
        *((name, c_int64) for name in ("length", "given", "most")),
        ("unread", POINTER(c_int64)),
        *((name, c_int64) for name in ("unread_count", "unread_room", "read_count")),
        ("unread_states", c_void_p),
        ("states", POINTER(c_int64)),
        ("states_count", c_int64),
        *((name, POINTER(c_float)) for name in ("bounds", "likelihoods")),
        ("bounds_count", c_int64),
        *((name, c_float) for name in ("next_pays_above", "verified_above")),
        *((name, c_int64) for name in ("drafted", "verified", "accepted")),
        ("shares", POINTER(c_float)),
        *((name, c_double) for name in ("draft_seconds", "verify_seconds")),
    ]


class Library:
    """The loaded code."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            code = ctypes.CDLL(str(file))
            code.depthdecay_sizes.restype = c_int64
            sizes = code.depthdecay_sizes()
            code.depthdecay_pass.argtypes = [POINTER(ModelStruct), POINTER(Pass)]
            code.depthdecay_pass.restype = c_int64
            code.depthdecay_window.argtypes = [POINTER(WindowStruct)]
            code.depthdecay_window.restype = None
        except (OSError, AttributeError) as error:
            raise Unavailable(f"the compiled pass cannot be loaded: {one_line(error)}") from error
        expected = 0
        for structure in (ModelStruct, Layer, Pass, WindowStruct):
            expected = expected * 1000 + ctypes.sizeof(structure)
        if sizes != expected:
            raise Unavailable("the compiled pass has a different struct layout")
        self.run = code.depthdecay_pass
        self.run_window = code.depthdecay_window


_loaded: list[Library] = []  # at most one per process


def library(say: Callable[[str], None] = lambda message: None) -> Library:
    """The compiled pass for this machine, cached or built now. Raises `Unavailable` with the reason."""
    if not _loaded:
        _loaded.append(_found_or_built(say))
    return _loaded[0]


def _found_or_built(say: Callable[[str], None]) -> Library:
    if os.environ.get(OFF) == "0":
        raise Unavailable(f"{OFF}=0 switches compiled code off")
    if sys.byteorder != "little":
        raise Unavailable("packed weights need a little-endian processor")
    compiler = find_compiler()
    file = cache_folder() / "kernels" / f"{_key(compiler)}.so"
    if _is_whole(file):
        try:
            return Library(file)
        except Unavailable:
            pass  # rebuilt below
    say("compiling the code for this CPU (once) …")
    build(compiler, file)
    return Library(file)


def find_compiler() -> str:
    """$CXX, or the first compiler found under the usual names."""
    for name in (os.environ.get("CXX"), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise Unavailable("there is no C++ compiler (c++, g++ or clang++)")


def build(compiler: str, file: Path) -> None:
    """Compile to a temporary file and rename, so other processes never see a partial library."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with made_aside(file) as made:
            _compile(compiler, made)
            write_whole(_digest_file(file), _digest(made))
    except OSError as error:
        raise Unavailable(f"the compiled pass cannot be written to {file.parent}: {one_line(error)}") from error


def _is_whole(file: Path) -> bool:
    """Checked before loading: a truncated library would crash the process with a signal, at every start."""
    try:
        return _digest_file(file).read_text(encoding="ascii") == _digest(file)
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _compile(compiler: str, made: Path) -> None:
    said, code = "", 0
    for tuned in _TUNED:
        done = _run([compiler, *_FLAGS, *tuned, str(SOURCE), "-o", str(made)])
        if done.returncode == 0:
            return
        said, code = said or done.stderr.strip(), done.returncode
    reason = one_line(said) if said else f"it exited with code {code} and no output"
    raise Unavailable(f"the compiler {compiler} cannot compile the pass: {reason}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the compiler {Path(command[0]).name} cannot be run: {one_line(error)}") from error


def _key(compiler: str) -> str:
    """Cache key of source, compiler and processor: a home folder may be shared by different machines."""
    parts = (SOURCE.read_text(encoding="utf-8"), _run([compiler, "--version"]).stdout, repr(_FLAGS), repr(_TUNED))
    return hashlib.sha256("\0".join((*parts, processor_features())).encode()).hexdigest()[:24]


def processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()} {flags}"
