"""The benchmark of bug finding by the seeded loop: one fault, and the unmodified subjects."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.fuzz.detection.measure import Task, measure
from kvproof.fuzz.detection.records import LOOP, CleanRun
from kvproof.fuzz.detection.summary import Detection, complaint, detection_of
from kvproof.fuzz.faults import Fault
from kvproof.fuzz.search import search
from kvproof.stateful_tests.totals import Totals


def detect_fault(fault: Fault, *, seed: str, seeds: int, seconds: float) -> Detection:
    """Search ``seeds`` times for the fault, each time from another seed, and shrink what fails."""
    return detection_of(fault, measure(Task(fault.id, LOOP, seed, seeds, seconds, seeds)))


def run_clean(seed: str, ops: int, subjects: Sequence[str] = ("engine",)) -> CleanRun:
    """The unmodified engine, or these subjects in turn, for at least so many operations."""
    totals = Totals()
    number = violations = 0
    while totals.ops < ops:
        subject = subjects[number % len(subjects)]
        found = search(subject, f"{seed}/{number}", seconds=600, totals=totals, runs_max=50)
        violations += found is not None
        number += 1
    return CleanRun(totals.ops, violations + len(totals.problems), tuple(subjects))


__all__ = ["CleanRun", "Detection", "complaint", "detect_fault", "run_clean"]
