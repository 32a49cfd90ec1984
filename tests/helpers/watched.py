"""A subject driven one operation at a time, with checks that must have nothing to say."""

from __future__ import annotations

from typing import Any

from kvproof.invariants.operations import Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness


class Watched:
    """A scheduler subject, its checks, and the latest events."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject
        self.harness = SchedulingHarness(subject, audit_interval=1)

    def __call__(self, *operations: Operation) -> Outcome:
        """The last one's outcome."""
        for operation in operations:
            outcome = self.harness.perform(operation)
            assert not self.harness.violations
        return outcome

    def told(self, kind: type) -> list[Any]:
        """Of the last operation."""
        return [event for event in self.harness.last_events if isinstance(event, kind)]

    @property
    def free(self) -> int:
        """Blocks of the device."""
        count: int = self.subject.cache.view().free_count(0)
        return count
