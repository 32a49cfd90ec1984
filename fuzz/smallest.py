"""The smallest failing case so far: what passes of shrinking try their changes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, process_time
from typing import Any

from msgspec.structs import replace

from kvproof.fuzz.simpler import size_of
from kvproof.invariants.case import Case
from kvproof.invariants.operations import AnyOperation
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation

Attempt = Callable[[Case], tuple[Case, Violation] | None]
"""Runs a candidate: what is left of it up to the violation that is wanted, if it fails so."""


_BUSY = 0.1
"""A process that computes for this share of the time is not waiting."""


class Patience:
    """So many CPU seconds; or as many by the clock, for code that waits rather than computes.

    Beside other work, a case cut short by the clock may look like another finding.  A policy that
    hangs, or an engine that is waited for, takes no CPU time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._clock, self._cpu = monotonic(), process_time()

    def is_over(self) -> bool:
        clock, cpu = monotonic() - self._clock, process_time() - self._cpu
        return cpu > self._seconds or (clock > self._seconds and cpu < clock * _BUSY)


class Smallest:
    """Every accepted change makes the case smaller; beyond the limits, none is tried any more."""

    def __init__(
        self,
        case: Case,
        violation: Violation,
        attempt: Attempt,
        replays_max: int,
        patience: Patience,
    ) -> None:
        self.case = case
        self.violation = violation
        self.attempt = attempt
        self.replays = 0
        self._replays_max = replays_max
        self._patience = patience

    @property
    def operations(self) -> list[AnyOperation]:
        return self.case.operations

    @property
    def world(self) -> Configuration:
        return self.case.configuration

    @property
    def size(self) -> tuple[int, int, str]:
        return size_of(self.case)

    def is_over(self) -> bool:
        """Whether the replays or the time are used up."""
        return self.replays >= self._replays_max or self._patience.is_over()

    def try_(self, **changes: Any) -> bool:
        """Whether the case with these changes is smaller and still fails: then it is kept."""
        candidate = replace(self.case, **changes)
        if self.is_over():
            return False
        self.replays += 1
        result = self.attempt(candidate)
        if result is None or size_of(result[0]) >= self.size:
            return False
        self.case, self.violation = result
        return True

    def try_in(self, operations: Sequence[AnyOperation] | None = None, **changes: Any) -> bool:
        """The operations, or the present ones, in another world: if there is such a world."""
        try:
            configuration = replace(self.world, **changes)
        except ValueError:  # its tiers do not fit together
            return False
        operations = self.operations if operations is None else operations
        return self.try_(operations=operations, configuration=configuration)
