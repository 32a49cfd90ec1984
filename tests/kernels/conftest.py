"""Kernels run compiled where there is a GPU, and interpreted where there is none.

Without torch or triton, the modules here are skipped, and the reason is shown.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def prepare() -> str:
    """Set up Triton for this process; returns why it cannot be, or nothing."""
    # Tiles are tiny: threads of the libraries below would only wait for each other.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    for module in ("torch", "triton", "numpy"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed (the extra named kernels)"
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return ""
    from kvproof.kernels.interpreter import InterpreterError, use_interpreter

    try:
        use_interpreter()
    except InterpreterError as error:
        return str(error)
    return ""


UNAVAILABLE = prepare()


class SkippedModule(pytest.Module):
    """A module that is not imported, but reported as skipped."""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip(UNAVAILABLE, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if UNAVAILABLE else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.kernels)


@pytest.fixture(autouse=True)
def unmeasured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Coverage pauses: it measures no kernel, and the interpreter under it takes twice the time."""
    module = sys.modules.get("coverage")
    coverage = module.Coverage.current() if module is not None else None
    if coverage is None or request.path.stem == "test_cli":
        yield
        return
    coverage.stop()
    yield
    coverage.start()


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tests put their tensors."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
