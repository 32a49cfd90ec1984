"""A pytest plugin: the fixture ``kernel_sanitizer``, under which a test's kernels are watched.

Enable it in a ``conftest.py``, after ``use_interpreter()``::

    pytest_plugins = ["kvproof.kernels.sanitizer.plugin"]
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvproof.kernels.sanitizer import Sanitizer, sanitize


@pytest.fixture
def kernel_sanitizer() -> Iterator[Sanitizer]:
    """Watches every kernel of the test; the test fails if there is anything to report.

    Name tensors with its ``declare``, ask it for ``read_counts``, or just let it watch.
    """
    with sanitize(raises=False) as sanitizer:
        yield sanitizer


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Fail the test itself, not its teardown."""
    result = yield
    sanitizer = pyfuncitem.funcargs.get("kernel_sanitizer")
    if isinstance(sanitizer, Sanitizer):
        sanitizer.check()
    return result
