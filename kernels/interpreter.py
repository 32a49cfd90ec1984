"""Triton kernels without a GPU: the interpreter of Triton, made to compute what a GPU computes.

``TRITON_INTERPRET=1`` alone is not enough.  Three shims (``kvproof.kernels.shims``) cure it:

* *numerics*: bfloat16 and float8 are computed in float32 and rounded to nearest even, float8
  saturates, a maximum passes over NaN.  Untreated, the interpreter works on the bare bits:
  ``tl.dot`` of two bfloat16 tiles is wrong by ten orders of magnitude.  The maintainers decline to
  change that (triton-lang/triton issues 11584 and 11585), so the shim stays.
* *index*: Triton 3.6 cannot run a loop with a bound read from memory under numpy 2.4 or later.
* *speed*: the language is patched once per launch instead of at each call of a helper, and is put
  back afterwards; 32-bit overflow is looked for only where asked (``checking_overflow``).

Nothing here imports Triton before ``use_interpreter`` has been called: Triton decides when it is
imported, and again where a kernel is defined, whether that kernel is compiled or interpreted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


class InterpreterError(RuntimeError):
    """Kernels of this process cannot be interpreted; the message says why."""


def use_interpreter() -> None:
    """Have every kernel defined from now on run on the CPU, with the three shims.

    Call it before the modules with the kernels are imported.  Calling it again does nothing.

    Raises:
        InterpreterError: Triton was imported before, to compile; or it is not installed; or its
            interpreter has changed, so that a shim would have no effect.
    """
    if "triton.language" in sys.modules and not is_interpreting():
        raise InterpreterError(
            "triton was imported before use_interpreter(), so its helpers (tl.max, tl.sum, ...) "
            "are to be compiled; call use_interpreter() first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        shims = import_module("kvproof.kernels.shims")
    except ModuleNotFoundError as error:
        raise InterpreterError(f"{error.name} is not installed") from error
    shims.install()


def is_interpreting() -> bool:
    """Whether the Triton of this process interprets (False where it is not imported yet).

    Triton's own helpers tell: each kernel and helper was made what it is where it was defined.
    """
    language = sys.modules.get("triton.language")
    return language is not None and type(language.max).__name__ == "InterpretedFunction"


@contextmanager
def checking_overflow() -> Iterator[None]:
    """Within it, integer arithmetic of kernels that overflows 32 bits raises.

    About 3.4 times slower.  Masked-off lanes count as well: their offsets are computed, too.
    The sanitizer reports overflows with their line instead: ``sanitize(overflow=True)``.
    """
    with import_module("kvproof.kernels.shims").overflow_checks():
        yield


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Within it, the programs of a launch run in an order drawn from ``seed``.

    A GPU promises no order, the interpreter runs them in order: a kernel that depends on it (a
    second writer that must come last, a ticket taken for granted) passes there by luck.
    """
    with import_module("kvproof.kernels.shims").shuffled_order(seed):
        yield
