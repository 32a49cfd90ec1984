"""What is installed is all there is: a folder that pyproject.toml forgets, only users miss."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        Path(*package.split(".")[1:]) for package in setuptools["packages"] if "." in package
    }
    top = {name.split(".")[1] for name in setuptools["package-dir"]}
    modules = {
        file.parent.relative_to(ROOT) for name in top for file in (ROOT / name).rglob("__init__.py")
    }
    assert modules <= folders
