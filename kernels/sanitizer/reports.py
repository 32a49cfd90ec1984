"""What the sanitizer says: kinds of faults, and one report for each place in a kernel."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What can be wrong with an access."""

    OUT_OF_BOUNDS = "out of bounds"
    """An address outside of every registered tensor, or in a gap of a strided one."""
    FORBIDDEN = "forbidden slot"
    """An element that no sequence may touch: behind the last key, before the window, padding."""
    OTHER_SEQUENCE = "other sequence's slot"
    """An element that belongs to sequences, but not to the one that the program works for."""
    UNINITIALISED = "uninitialised read"
    """An element that nothing has been written to."""
    READ_ONLY = "write to a read-only tensor"
    WRITE_ONLY = "read of a write-only tensor"
    RACE = "race"
    """Two programs of one launch touch an element, at least one writes; no order is promised."""
    DUPLICATE_LANES = "duplicate lanes"
    """One store writes an element more than once."""
    WIDTH = "element width"
    """The access is wider or narrower than the elements of the tensor, or not aligned to them."""
    MISSING_OTHER = "missing other="
    """What a masked-off lane loaded was stored: the GPU leaves there whatever it likes."""
    OVERFLOW = "32-bit overflow"
    UNWRITTEN = "unwritten output"
    """An element of an output that no program has written."""


@dataclass(frozen=True)
class Program:
    """One program of a launch: the kernel's name, its ``tl.program_id`` and the grid."""

    kernel: str
    index: tuple[int, int, int]
    grid: tuple[int, int, int]

    def __str__(self) -> str:
        return f"program {self.index} of {self.kernel}, grid {self.grid}"


@dataclass(frozen=True)
class Location:
    """A line of a kernel's source."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line's text, without its indentation; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} ({self.function})"


@dataclass
class Report:
    """One kind of fault of one tensor at one line: its first occurrence, and how often it came.

    ``lanes`` counts the elements of the tiles concerned, ``accesses`` the loads or stores.
    """

    kind: Kind
    tensor: str | None
    index: tuple[int, ...] | None
    detail: str
    program: Program | None
    location: Location | None
    lanes: int = 0
    accesses: int = 0

    def __str__(self) -> str:
        text = f"{self.kind}: {self.detail}"
        if self.location is not None:
            text += f"\n    at {self.location}"
            if self.location.source:
                text += f": {self.location.source}"
        if self.program is not None:
            text += f"\n    first in {self.program}"
        if self.accesses:
            text += f"; {_count(self.lanes, 'lane')} in {_count(self.accesses, 'access', 'es')}"
        return text


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


class SanitizerError(AssertionError):
    """A kernel touched what it may not; the message holds every report."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = list(reports)
        found = _count(len(self.reports), "fault")
        super().__init__("\n".join([f"the sanitizer found {found}", *map(str, self.reports)]))
