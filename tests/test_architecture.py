"""The folders form layers: code imports from its own floor and those below. Exceptions are listed with a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import depthdecay

ROOT = Path(depthdecay.__file__).parent

# From the ground up, as docs/architecture.svg shows them.
FLOORS = (
    {"plan"},
    {"model"},
    {"runners", "cuda", "cpu"},
    {"speculative", "engine", "batching"},
    {"calibration", "evaluation", "bench"},
    {"cli", "serve", "integrations"},
)

# Imports that go up a floor: (module, what it imports).
EXCEPTIONS = {
    ("model.layers", "runners.contract"): "a pass over the model's layers uses the contract's types",
    ("cpu.compiled_stack", "speculative.short_head"): "drafts read their own rows of the quantized output matrix",
}


def _floor(module: str) -> int | None:
    folder = module.split(".")[0]
    return next((number for number, floor in enumerate(FLOORS) if folder in floor), None)


def _imports(file: Path) -> set[str]:
    """What a module imports from `depthdecay` at run time; imports for type checkers do not count."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    named = (node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {name.removeprefix("depthdecay.") for name in named if name is not None and name.startswith("depthdecay.")}


def test_every_folder_has_a_floor_and_few_files_lie_outside() -> None:
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set().union(*FLOORS)
    assert len(list(ROOT.glob("*.py"))) <= 12


def test_code_imports_from_its_own_floor_and_below() -> None:
    upwards = set()
    for file in ROOT.rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        own = _floor(module)
        for needed in _imports(file):
            above = _floor(needed)
            if own is not None and above is not None and above > own:
                upwards.add((module, needed))
    assert upwards == set(EXCEPTIONS)


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, str] = {}
    for file in ROOT.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                assert node.name not in found, f"{node.name} is in {found[node.name]} and in {file}"
                found[node.name] = str(file)
