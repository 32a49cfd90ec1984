"""What the measured searches say: times to detection, survival curves, speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, fsum, inf, log
from statistics import median

import numpy as np
from msgspec import Struct, field

from kvproof.fuzz.detection.records import LOOP, CleanRun, Conditions, Row, Trial
from kvproof.fuzz.faults import Fault

SHRUNK_AT_MOST = 1.5
"""Times the shortest known run."""
SECONDS_AT_MOST = 60.0
"""CPU seconds to a fault, by the median search."""
SPEED_UP_AT_LEAST = 25.0
"""Over the Hypothesis machine without an example limit, geometric mean."""
BASELINE = "hypothesis-unlimited"


Rows = Mapping[tuple[str, str], Row]
"""By fault and driver."""


class Detection(Struct, frozen=True):
    """How one fault was found by one driver, over several independent searches."""

    id: str
    property: str
    source: str
    seeds: int
    reached: int
    """Searches in which the faulty method was called."""
    triggered: int
    """Searches in which a run differed from one on the unmodified subject."""
    detected: int
    """Searches that found it, by a property that the fault is declared to break."""
    by_property: int
    """Detections in which the one property that it stands for was among those violated."""
    median_ops: float
    p90_ops: float
    median_seconds: float
    p90_seconds: float
    """CPU seconds of searches that found it, shrinking excluded."""
    shrunk_ops: float
    """Median length of the shrunk cases."""
    shrunk_ops_max: int
    shortest_known_ops: int
    found: int = 0
    """Searches that found it by any property."""
    false_alarms: int = 0
    """Searches that ended with what the unmodified subject fails as well."""
    shrink_seconds: float = 0.0
    """Median."""


def detection_of(fault: Fault, row: Row) -> Detection:
    """The figures of a row."""
    found = [trial for trial in row.trials if trial.found] or [Trial(0.0, 0)]
    ops = [trial.ops for trial in found]
    times = [trial.seconds for trial in found]
    shrunk = [trial for trial in found if trial.shrunk_ops] or [Trial(0.0, 0)]
    expected = {fault.property, *fault.also}
    return Detection(
        fault.id,
        fault.property,
        fault.source,
        len(row.trials),
        reached=sum(trial.reached for trial in row.trials),
        triggered=sum(trial.triggered for trial in row.trials),
        detected=sum(trial.found and bool({*trial.properties} & expected) for trial in row.trials),
        by_property=sum(trial.found and fault.property in trial.properties for trial in row.trials),
        median_ops=median(ops),
        p90_ops=float(np.percentile(ops, 90)),
        median_seconds=round(median(times), 4),
        p90_seconds=round(float(np.percentile(times, 90)), 4),
        shrunk_ops=median(trial.shrunk_ops for trial in shrunk),
        shrunk_ops_max=max(trial.shrunk_ops for trial in shrunk),
        shortest_known_ops=fault.shortest,
        found=sum(trial.found for trial in row.trials),
        false_alarms=sum(trial.false_alarm for trial in row.trials),
        shrink_seconds=round(median(trial.shrink_seconds for trial in shrunk), 4),
    )


def complaint(detection: Detection) -> str:
    """What is missing, or nothing.

    A fault is to be found in every search, by its property, and to shrink to little more than
    its shortest known run.
    """
    if detection.false_alarms:
        return f"{detection.id}: {detection.false_alarms} searches found something else"
    if detection.detected < detection.seeds:
        return f"{detection.id}: found in {detection.detected} of {detection.seeds} searches"
    if not detection.by_property:
        return f"{detection.id}: never by property {detection.property}"
    if detection.shrunk_ops_max > SHRUNK_AT_MOST * detection.shortest_known_ops:
        return f"{detection.id}: a shrunk case has {detection.shrunk_ops_max} operations"
    return ""


class Survival(Struct, frozen=True):
    """Which part of the searches have not found their fault after so many CPU seconds."""

    steps: tuple[tuple[float, float], ...]
    """(CPU seconds, share from then on), where the share changes."""
    censored: tuple[float, ...]
    """When the searches that found nothing were given up: what came after is not known."""


def survival(trials: Sequence[Trial]) -> Survival:
    """The curve of these searches.

    It is exact up to the first search that was given up.  Beyond that those count as not having
    found it, which is all that is known of them: the true curve is not above.
    """
    found = sorted(trial.seconds for trial in trials if trial.found)
    total = len(trials)
    steps = [(0.0, 1.0)]
    for count, seconds in enumerate(found, start=1):
        share = (total - count) / total
        if steps[-1][0] == seconds:
            steps.pop()
        steps.append((seconds, share))
    censored = sorted(trial.seconds for trial in trials if not trial.found)
    return Survival(tuple(steps), tuple(censored))


def drivers_of(rows: Rows) -> list[str]:
    """All that were measured, the seeded loop first."""
    return list(dict.fromkeys(driver for _, driver in rows))


def common_faults(rows: Rows) -> list[str]:
    """The faults that every driver has searched for."""
    drivers = drivers_of(rows)
    return [
        fault
        for fault in dict.fromkeys(fault for fault, _ in rows)
        if all((fault, driver) in rows for driver in drivers)
    ]


def curves(rows: Rows) -> dict[str, Survival]:
    """The survival curve of each driver, over the faults that all have searched for."""
    common = common_faults(rows)
    return {
        driver: survival([trial for fault in common for trial in rows[fault, driver].trials])
        for driver in drivers_of(rows)
    }


def median_seconds(row: Row) -> float:
    """The median search, those that found nothing taking for ever."""
    return median(trial.seconds if trial.found else inf for trial in row.trials)


class Speedup(Struct, frozen=True):
    """How much sooner the seeded loop finds faults than another driver."""

    driver: str
    faults: int
    """Faults that both have searched for."""
    both: int
    """Of these, those that the median search of either found: the mean is over them."""
    loop_only: tuple[str, ...]
    driver_only: tuple[str, ...]
    geometric_mean: float | None
    """Of the ratios of median CPU seconds; none if there is no fault that both found."""
    ratios: dict[str, float] = field(default_factory=dict)


def speedup(rows: Rows, driver: str) -> Speedup:
    """The seeded loop against that driver, over the faults that both have searched for."""
    ids = [fault for fault, name in rows if name == driver and (fault, LOOP) in rows]
    ratios: dict[str, float] = {}
    alone: dict[str, list[str]] = {"loop": [], "driver": []}
    for fault in ids:
        ours, theirs = (median_seconds(rows[fault, name]) for name in (LOOP, driver))
        if ours < inf and theirs < inf:
            ratios[fault] = theirs / max(ours, 1e-5)
        elif min(ours, theirs) < inf:
            alone["loop" if ours < inf else "driver"].append(fault)
    mean = exp(fsum(log(ratio) for ratio in ratios.values()) / len(ratios)) if ratios else None
    return Speedup(
        driver,
        len(ids),
        len(ratios),
        tuple(alone["loop"]),
        tuple(alone["driver"]),
        mean,
        ratios,
    )


class Reached(Struct, frozen=True):
    """What was asked for, and what was reached: the last line of the benchmark."""

    faults: int
    every_search: int
    """Faults that every search of the seeded loop found."""
    slowest_seconds: float
    slowest: str
    shrunk: float
    """Longest shrunk case over the shortest known run …"""
    longest: str
    """… and whose."""
    speedup: Speedup | None
    clean: CleanRun


def reached(
    detections: Sequence[Detection],
    rows: Rows,
    clean: CleanRun,
) -> Reached:
    """Over the seeded loop's detections."""
    slowest = max(detections, key=lambda d: median_seconds(rows[d.id, LOOP]))
    longest = max(detections, key=_overlong)
    compared = any(driver == BASELINE for _, driver in rows)
    return Reached(
        len(detections),
        sum(d.detected == d.seeds for d in detections),
        median_seconds(rows[slowest.id, LOOP]),
        slowest.id,
        _overlong(longest),
        longest.id,
        speedup(rows, BASELINE) if compared else None,
        clean,
    )


def _overlong(detection: Detection) -> float:
    return detection.shrunk_ops_max / detection.shortest_known_ops


def asked_and_reached(goals: Reached, under: Conditions) -> list[tuple[str, str, str]]:
    """(what, asked for, reached), a line each."""
    lines = [
        (
            f"faults found in every search ({under.seeds} a fault)",
            f"all {goals.faults}",
            f"{goals.every_search} of {goals.faults}",
        ),
        (
            "CPU seconds to the slowest, median",
            f"at most {min(SECONDS_AT_MOST, under.seconds):g}",
            f"{goals.slowest_seconds:.3g} ({goals.slowest})",
        ),
        (
            "longest shrunk case over the shortest known",
            f"at most {SHRUNK_AT_MOST:g}",
            f"{goals.shrunk:.2g} ({goals.longest})",
        ),
    ]
    if goals.speedup is not None:
        mean = goals.speedup.geometric_mean
        told = "no fault that both found" if mean is None else f"{mean:.3g}"
        lines.append(
            (
                "times faster than Hypothesis without an example limit",
                f"at least {SPEED_UP_AT_LEAST:g}",
                f"{told} (over {goals.speedup.both} of {goals.speedup.faults} faults)",
            )
        )
    clean = goals.clean
    found = f"{clean.violations} in {clean.ops:,} operations"
    lines.append(("violations on unmodified subjects", "0", found))
    return lines
