"""The package as installed: the wheel must contain the data files that the code reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import depthdecay as dd

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "depthdecay"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution and the wheel built from it; built in a copy, since a build leaves folders behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("built")
    shutil.copytree(REPOSITORY / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy / name)
    _build("sdist", copy, out)
    (file,) = out.glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(file) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    _build("wheel", source, out)
    return out


def _build(kind: str, source: Path, out: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return set(archive.namelist())


def test_an_installed_wheel_tells_its_version_and_what_is_fast(built: Path, tmp_path: Path) -> None:
    """In an environment with our dependencies but nothing from this checkout."""
    (file,) = built.glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=False)
    python = tmp_path / "clean" / "bin" / "python"
    words: dict[str, Any] = {"text": True, "capture_output": True, "check": True, "cwd": tmp_path}
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([str(python), "-c", find], **words).stdout.strip())
    install = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", str(site), str(file)]
    subprocess.run([sys.executable, "-m", "pip", "install", *install], **words)
    # A bare path, so that the .pth file through which tests find this checkout is not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, env=clean, **words)
    where = run([str(python), "-c", "import depthdecay; print(depthdecay.__file__)"]).stdout
    assert Path(where.strip()).is_relative_to(site)
    command = [str(python), str(site / "bin" / "depthdecay")]
    assert dd.__version__ in run([*command, "--version"]).stdout
    told = run([*command, "doctor"]).stdout
    assert "CUDA" in told
    assert f"depthdecay {dd.__version__}" in told


def test_every_file_of_the_package_is_in_the_wheel(wheel: set[str]) -> None:
    files = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert {"depthdecay/py.typed", "depthdecay/cpu/kernels.cpp", "depthdecay/serve/page.html"} <= files
    assert not files - wheel
    assert not {name for name in wheel - files if ".dist-info/" not in name}


def test_every_export_is_there_under_its_name() -> None:
    for name in dd.__all__:
        assert getattr(dd, name).__name__ == name
    assert set(dd.__all__) <= set(dir(dd))


def test_nothing_heavy_is_loaded_before_it_is_asked_for() -> None:
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys, depthdecay as dd; dd.Plan.full(4); assert not {heavy} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_version_is_told_alike_everywhere() -> None:
    import tomllib

    from depthdecay import __version__

    told = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    newest = next(
        line for line in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line[:3] == "## "
    )
    assert __version__ == told == newest.removeprefix("## ")
