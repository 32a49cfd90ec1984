"""An address sanitizer for Triton kernels that needs no GPU.

It runs kernels in Triton's interpreter and judges each access by the tensor that it hits: bounds,
whose slot it is, whether it was written, races between programs, and more (``Kind``).  See
``docs/sanitizer.md``.

Call ``kvproof.kernels.interpreter.use_interpreter()`` before kernels, and this, are imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from kvproof.kernels.interpreter import InterpreterError, checking_overflow, is_interpreting

if not is_interpreting():
    raise InterpreterError(
        "the sanitizer watches Triton's interpreter: call use_interpreter() of "
        "kvproof.kernels.interpreter before it, and before any kernel, is imported"
    )

from kvproof.kernels.sanitizer.hooks import Allocations, watching
from kvproof.kernels.sanitizer.poison import Poison
from kvproof.kernels.sanitizer.regions import (
    Region,
    output,
    paged,
    reads,
    rows,
    table,
    updates,
    visible_slots,
    workspace,
)
from kvproof.kernels.sanitizer.reports import Kind, Location, Program, Report, SanitizerError
from kvproof.kernels.sanitizer.watch import Sanitizer, SequenceOf

__all__ = [
    "Kind",
    "Location",
    "Program",
    "Region",
    "Report",
    "Sanitizer",
    "SanitizerError",
    "SequenceOf",
    "output",
    "paged",
    "reads",
    "rows",
    "sanitize",
    "table",
    "updates",
    "visible_slots",
    "workspace",
]

_active = False


@contextmanager
def sanitize(
    known: Mapping[str, torch.Tensor | Region] | None = None,
    /,
    *,
    sequence_of: SequenceOf | None = None,
    overflow: bool = False,
    poison: bool = True,
    raises: bool = True,
    **regions: torch.Tensor | Region,
) -> Iterator[Sanitizer]:
    """Watch every kernel launched within the block.

    Args:
        sequence_of: Which sequence a program works for, so that other sequences' elements are
            told apart.
        overflow: Also report integer arithmetic that leaves 32 bits; about 3 times slower.
        poison: Whether masked-off lanes of a load without ``other=`` get NaN (integers: garbage)
            instead of the interpreter's zeros.
        raises: Whether a finding raises when the block ends; ``Sanitizer.check`` does anyway.
        known, regions: The tensors by name and what may be done with them; as a mapping, by
            keyword, or both.  A bare tensor may be read everywhere.  Tensors that a kernel is
            given and nobody has named may be read and written within their bounds; those from
            ``torch.empty`` must be written first.

    Raises:
        SanitizerError: At the end of the block, with every report.
        RuntimeError: Another such block is active.
    """
    global _active
    if _active:
        raise RuntimeError("sanitize() is active already; blocks of it cannot be nested")
    allocations = Allocations()
    sanitizer = Sanitizer(sequence_of, Poison(poison, not overflow), allocations.is_fresh)
    sanitizer.declare(**(known or {}), **regions)
    allocations.on_write.append(sanitizer.written_by_torch)
    _active = True
    try:
        with ExitStack() as stack:
            stack.enter_context(watching(sanitizer))
            stack.enter_context(allocations)
            if overflow:
                stack.enter_context(checking_overflow())
            yield sanitizer
    except Exception as error:
        # What the kernel did wrong is likely why the block failed.
        if raises and sanitizer.reports and not isinstance(error, SanitizerError):
            raise SanitizerError(sanitizer.reports) from error
        raise
    finally:
        _active = False
    if raises:
        sanitizer.check()
