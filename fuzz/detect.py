"""The benchmark of bug finding: time to detect, and length of the shrunk case."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.faults import Fault
from kvproof.fuzz.replay import replay
from kvproof.fuzz.search import search
from kvproof.fuzz.shrink import shrink
from kvproof.stateful_tests.totals import Totals


class Detection(Struct, frozen=True):
    """How one fault was found, over several independent searches."""

    id: str
    property: str
    source: str
    seeds: int
    reached: int
    """Searches in which the faulty method was called."""
    triggered: int
    """Searches in which a run differed from one on the unmodified engine."""
    detected: int
    by_property: int
    """Detections in which the declared property was among those violated."""
    median_ops: float
    p90_ops: float
    median_seconds: float
    p90_seconds: float
    """CPU seconds of search, shrinking excluded."""
    shrunk_ops: float
    """Median length of the shrunk cases."""
    shrunk_ops_max: int
    shortest_known_ops: int


def complaint(detection: Detection) -> str:
    """What is missing, or nothing.

    A fault is to be found in every search, by its property, and to shrink to at most twice its
    shortest known run.
    """
    if detection.detected < detection.seeds:
        return f"{detection.id}: found in {detection.detected} of {detection.seeds} searches"
    if not detection.by_property:
        return f"{detection.id}: never by property {detection.property}"
    if detection.shrunk_ops_max > 2 * detection.shortest_known_ops:
        return f"{detection.id}: a shrunk case has {detection.shrunk_ops_max} operations"
    return ""


class CleanRun(Struct, frozen=True):
    """The unmodified subjects under the same search."""

    ops: int
    violations: int


class _Trial(Struct, frozen=True):
    """One search."""

    reached: bool
    triggered: bool = False
    found: bool = False
    ops: int = 0
    seconds: float = 0.0
    shrunk_ops: int = 0
    properties: frozenset[str] = frozenset()


def detect_fault(fault: Fault, *, seed: str, seeds: int, seconds: float) -> Detection:
    """Search ``seeds`` times for the fault, each time from another seed."""
    trials = [
        _search_once(fault, f"{seed}/{fault.id}/{number}", seconds) for number in range(seeds)
    ]
    found = [trial for trial in trials if trial.found] or [_Trial(reached=False)]
    ops = [trial.ops for trial in found]
    times = [trial.seconds for trial in found]
    shrunk = [trial.shrunk_ops for trial in found]
    expected = {fault.property, *fault.also}
    return Detection(
        fault.id,
        fault.property,
        fault.source,
        seeds,
        reached=sum(trial.reached for trial in trials),
        triggered=sum(trial.triggered for trial in trials),
        detected=sum(bool(trial.properties & expected) for trial in trials),
        by_property=sum(fault.property in trial.properties for trial in trials),
        median_ops=median(ops),
        p90_ops=float(np.percentile(ops, 90)),
        median_seconds=round(median(times), 4),
        p90_seconds=round(float(np.percentile(times, 90)), 4),
        shrunk_ops=median(shrunk),
        shrunk_ops_max=max(shrunk),
        shortest_known_ops=fault.shortest,
    )


def _search_once(fault: Fault, seed: str, seconds: float) -> _Trial:
    totals, calls = Totals(), fault.calls()
    started = time.process_time()
    found = search(fault.subject, seed, seconds=seconds, totals=totals, fault=fault.id)
    elapsed = time.process_time() - started
    reached = fault.calls() > calls
    if found is None:
        return _Trial(reached)
    shrunk = shrink(found.case)
    if shrunk is None:
        return _Trial(reached)
    as_found, unmodified = replay(found.case), replay(replace(found.case, fault=None))
    properties = {v.property for v in as_found.violations}
    properties |= {v.property for v in replay(shrunk.case).violations}
    return _Trial(
        reached,
        triggered=as_found.digest != unmodified.digest or as_found.verdict != unmodified.verdict,
        found=True,
        ops=totals.ops,
        seconds=elapsed,
        shrunk_ops=len(shrunk.case.operations),
        properties=frozenset(properties),
    )


def run_clean(seed: str, ops: int, subjects: Sequence[str] = ("engine",)) -> CleanRun:
    """The unmodified engine, or these subjects in turn, for at least so many operations."""
    totals = Totals()
    number = violations = 0
    while totals.ops < ops:
        subject = subjects[number % len(subjects)]
        found = search(subject, f"{seed}/{number}", seconds=600, totals=totals, runs_max=50)
        violations += found is not None
        number += 1
    return CleanRun(totals.ops, violations + len(totals.problems))
