"""The package as it is installed: what the code reads beside itself must be in the wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import depthdecay as dd

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "depthdecay"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that was built of a copy: a build leaves folders behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return set(archive.namelist())


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
