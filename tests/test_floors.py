"""The floors of the house: no import runs upward, none is relative, none is by a bare name."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT: dict[str, set[str]] = {
    "invariants": {"invariants"},
    "kernels": {"kernels"},
    "engine": {"engine", "invariants", "kernels"},
    "stateful_tests": {"stateful_tests", "engine", "invariants", "kernels"},
    "fuzz": {"fuzz", "stateful_tests", "engine", "invariants", "kernels"},
    "tests": {"fuzz", "stateful_tests", "engine", "invariants", "kernels"},
    "benchmarks": {"fuzz", "stateful_tests", "engine", "invariants", "kernels"},
}
"""Top folder: the folders below it, and itself.  ``tests`` and ``benchmarks`` are not packages."""


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, also of those inside functions and of dynamic ones.

    A relative import is named with its leading dots.  Imports in text are text.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            target = node.args[0]
            if name in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def complaints(root: Path) -> list[str]:
    """What is wrong with the imports of the folders that stand under ``root``."""
    return [
        f"{path.relative_to(root)}:{line}: {complaint}"
        for folder in MAY_IMPORT
        for path in sorted((root / folder).rglob("*.py"))
        for line, name in imports_of(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if (complaint := complaint_about(folder, name))
    ]


def complaint_about(folder: str, name: str) -> str | None:
    first, *rest = name.split(".")
    if not first:
        return f"relative import {name}"
    if first in MAY_IMPORT:
        return f"bare import {name}: it is called kvproof.{name}"
    if first != "kvproof":
        return None
    if not rest:
        return "import of kvproof as a whole: it is a namespace, name the folder"
    if rest[0] not in MAY_IMPORT[folder]:
        return f"{folder} imports {name}, which is not below it"
    return None


def test_no_import_runs_upward() -> None:
    assert complaints(ROOT) == []


def test_the_floors_are_where_they_are_looked_for() -> None:
    """Silence about a folder that is not there would say nothing."""
    for folder in ("invariants", "kernels", "engine", "stateful_tests", "fuzz", "tests"):
        names = [name for path in (ROOT / folder).rglob("*.py") for name in _names(path)]
        assert len(names) > 20, folder
        if folder == "kernels":  # beside the others: it runs alone on a machine with a GPU
            assert any(name.startswith("kvproof.kernels.") for name in names)
        elif folder != "invariants":
            assert any(name.startswith("kvproof.invariants.") for name in names), folder


def packages_of(root: Path, folders: set[str]) -> set[str]:
    """Dotted names of the packages that stand in the folders: whatever has an ``__init__.py``."""
    inits = [path for folder in folders for path in (root / folder).rglob("__init__.py")]
    return {".".join(("kvproof", *path.parent.relative_to(root).parts)) for path in inits}


def test_every_package_is_installed() -> None:
    """A link to the checkout imports what is not listed; an installed kvproof does not."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {*MAY_IMPORT} - {"tests", "benchmarks"}
    assert setuptools["package-dir"] == {f"kvproof.{folder}": folder for folder in folders}
    assert {*setuptools["packages"]} == packages_of(ROOT, folders)


def test_a_package_that_is_not_listed_is_seen(tmp_path: Path) -> None:
    (tmp_path / "engine" / "tiers").mkdir(parents=True)
    for folder in ("engine", "engine/tiers"):
        (tmp_path / folder / "__init__.py").touch()
    found = packages_of(tmp_path, {"engine", "fuzz"})
    assert found == {"kvproof.engine", "kvproof.engine.tiers"}


def _names(path: Path) -> list[str]:
    return [name for _, name in imports_of(ast.parse(path.read_text(encoding="utf-8")))]


@pytest.mark.parametrize(
    ("folder", "source", "complaint"),
    [
        ("invariants", "from kvproof.engine.pool import BlockPool", "invariants imports"),
        ("invariants", "import kvproof.kernels", "invariants imports"),
        ("kernels", "from kvproof.invariants.tags import Tags", "kernels imports"),
        ("kernels", "import kvproof.engine.engine as e", "kernels imports"),
        ("kernels", "import importlib\nimportlib.import_module('kvproof.fuzz.cli')", "kernels imp"),
        ("engine", "from kvproof.stateful_tests.harness import Harness", "engine imports"),
        ("engine", "def f():\n    from kvproof.fuzz.faults import all_faults", "engine imports"),
        ("engine", "from kvproof import fuzz", "engine imports kvproof.fuzz"),
        ("stateful_tests", "from kvproof.fuzz.search import search", "stateful_tests imports"),
        (
            "stateful_tests",
            "import importlib\nimportlib.import_module('kvproof.fuzz.shrink')",
            "stateful_tests imports kvproof.fuzz.shrink",
        ),
        ("fuzz", "from kvproof.tests.test_floors import ROOT", "fuzz imports"),
        ("fuzz", "from engine.pool import BlockPool", "bare import engine.pool"),
        ("tests", "import invariants", "bare import invariants"),
        ("tests", "import kernels.attention", "bare import kernels"),
        ("engine", "from . import pool", "relative import ..pool"),
        ("engine", "from .pool import BlockPool", "relative import .pool"),
        ("fuzz", "import kvproof", "kvproof as a whole"),
        ("engine", "import os\nif os:\n    import kvproof.fuzz", "m.py:3: engine imports"),
    ],
)
def test_a_planted_import_is_found(
    tmp_path: Path, folder: str, source: str, complaint: str
) -> None:
    (tmp_path / folder / "sub").mkdir(parents=True)
    (tmp_path / folder / "sub" / "m.py").write_text(source, encoding="utf-8")
    (found,) = complaints(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("engine", "from kvproof.invariants.events import Event"),
        ("engine", "import kvproof.engine.pool"),
        ("stateful_tests", "def f():\n    from kvproof.engine.engine import Engine"),
        ("stateful_tests", "TEXT = '''\nfrom kvproof.fuzz.faults import fault_by_id\n'''"),
        ("fuzz", "from kvproof.stateful_tests import harness"),
        ("fuzz", "import enginelike, testsuite, importlib\nimportlib.import_module('vllm')"),
        ("invariants", "from __future__ import annotations\nimport numpy as np"),
    ],
)
def test_a_proper_import_is_passed_over(tmp_path: Path, folder: str, source: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "m.py").write_text(source, encoding="utf-8")
    assert complaints(tmp_path) == []
