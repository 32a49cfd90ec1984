"""The right harness for a subject: one that checks a cache, or one that checks a scheduler too."""

from __future__ import annotations

from kvproof.invariants.subject import Subject
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

AnyHarness = Harness | SchedulingHarness


def harness_for(
    subject: Subject, *, audit_interval: int | None = None, checked: bool = True
) -> AnyHarness:
    """A harness over a fresh subject; the arguments are those of :class:`Harness`."""
    if isinstance(subject, SchedulerSubject):
        return SchedulingHarness(subject, audit_interval=audit_interval, checked=checked)
    return Harness(subject, audit_interval=audit_interval, checked=checked)
