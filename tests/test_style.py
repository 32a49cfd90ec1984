"""Linting and type checking, as tests: what is not clean is not done."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def _needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is part of the test extra")


@_needs("ruff")
def test_ruff_is_clean() -> None:
    result = _run("ruff", "check", ".")
    assert result.returncode == 0, result.stdout


@_needs("mypy")
def test_mypy_is_clean_and_strict_on_the_ground_floor() -> None:
    packages = ("invariants", "kernels", "engine", "stateful_tests", "fuzz")
    flags = [flag for name in packages for flag in ("-p", f"kvproof.{name}")]
    result = _run("mypy", "--config-file", "pyproject.toml", *flags)
    assert result.returncode == 0, result.stdout


@_needs("mypy")
@pytest.mark.parametrize("folder", ["invariants", "kernels"])
def test_strictness_is_not_lost(tmp_path: Path, folder: str) -> None:
    """Positive control: an untyped function in a strict package would be refused."""
    package = tmp_path / "kvproof" / folder
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "planted.py").write_text("def untyped(x):\n    return x\n")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "-p",
            f"kvproof.{folder}.planted",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert "missing a type annotation" in result.stdout
