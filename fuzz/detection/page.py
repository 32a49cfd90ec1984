"""The measured figures as a page, with the conditions under which they were measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path

from kvproof.fuzz.detection.drivers import NAMES
from kvproof.fuzz.detection.records import LOOP, Conditions, Row, Trial
from kvproof.fuzz.detection.summary import (
    BASELINE,
    Detection,
    Reached,
    Rows,
    asked_and_reached,
    complaint,
    drivers_of,
    median_seconds,
    speedup,
)
from kvproof.fuzz.faults import Fault
from kvproof.invariants.verdict import counted


def write_page(
    path: Path,
    conditions: Conditions,
    rows: Rows,
    faults: Sequence[Fault],
    detections: Sequence[Detection],
    goals: Reached,
    picture: Path | None,
) -> None:
    """Write the page as Markdown; ``picture`` is shown by a link relative to it."""
    drivers = drivers_of(rows)
    lines = [
        "# How fast the seeded faults are found",
        "",
        *_introduction(conditions, rows, drivers),
        "",
        *_table(
            ("what", "asked for", "reached"),
            asked_and_reached(goals, conditions),
        ),
        "",
        *_missing(detections),
        "## The drivers",
        "",
        *_of_drivers(rows, drivers),
        *([f"![Survival curves]({os.path.relpath(picture, path.parent)})", ""] if picture else []),
        "## Each fault",
        "",
        *_of_faults(faults, detections, rows, drivers),
    ]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _introduction(c: Conditions, rows: Rows, drivers: Sequence[str]) -> Iterator[str]:
    speeds = [row.calls_per_second / 1e6 for row in rows.values()]
    compared = len({fault for fault, driver in rows if driver != LOOP})
    everything = len({fault for fault, _ in rows})
    against = f" --compare-seeds {c.compare_seeds} --compare-seconds {c.compare_seconds:g}"
    names = "".join(f" --compare {name}" for name in drivers if name != LOOP)
    yield (
        f"Written by `kvproof faults detect --seeds {c.seeds} --seconds {c.seconds:g} --shrinks "
        f"{c.shrinks}"
        f"{names + against if names else ''} --out FILE.jsonl --plot FILE.svg --page FILE.md`, "
        f"which goes on where it was stopped."
    )
    yield ""
    yield (
        f"Conditions: {c.machine.python} on {c.machine.system} {c.machine.processor}, "
        f"{counted(c.machine.cores, 'core')}, shared with other processes: between "
        f"{min(speeds):.1f} and {max(speeds):.1f} million empty Python method calls a second "
        "while it was measured.  "
        + ", ".join(f"{name} {version}" for name, version in c.versions.items())
        + f".  All times are CPU seconds of one process.  Seeds: `{c.seed}/FAULT/NUMBER`."
    )
    if names:
        yield ""
        yield (
            f"The seeded loop searched {c.seeds} times for each fault, at most {c.seconds:g} s; "
            f"each of the others {c.compare_seeds} times for {compared} of {everything} faults, at "
            f"most {c.compare_seconds:g} s.  A driver *finds* a fault here if its median search "
            "does.  Shrinking is no part of any search."
        )


def _missing(detections: Sequence[Detection]) -> Iterator[str]:
    complaints = [text for text in map(complaint, detections) if text]
    if complaints:
        yield "What is missing:"
        yield ""
        yield from (f"- {text}" for text in complaints)
        yield ""


def _of_drivers(
    rows: Rows,
    drivers: Sequence[str],
) -> Iterator[str]:
    cells = []
    for driver in drivers:
        own = [row for (_, name), row in rows.items() if name == driver]
        trials = [trial for row in own for trial in row.trials]
        faster = speedup(rows, driver) if driver != LOOP else None
        cells.append(
            (
                NAMES[driver],
                len(own),
                sum(all(trial.found for trial in row.trials) for row in own),
                sum(median_seconds(row) < inf for row in own),
                f"{100 * sum(trial.found for trial in trials) / len(trials):.0f} %",
                f"{_pace(trials):,.0f}",
                ""
                if faster is None or faster.geometric_mean is None
                else f"{faster.geometric_mean:.3g} (over {faster.both})",
            )
        )
    yield from _table(
        (
            "driver",
            "faults",
            "found in every search",
            "found",
            "searches",
            "operations/s",
            "the loop is faster, times",
        ),
        cells,
    )
    yield ""
    for driver in drivers:
        if driver != LOOP:
            yield from _alone(rows, driver)


def _pace(trials: Sequence[Trial]) -> float:
    return sum(trial.ops for trial in trials) / max(sum(trial.seconds for trial in trials), 1e-5)


def _alone(rows: Rows, driver: str) -> Iterator[str]:
    faster = speedup(rows, driver)
    for who, ids in (
        (f"The loop found, and {NAMES[driver]} did not", faster.loop_only),
        (f"{NAMES[driver]} found, and the loop did not", faster.driver_only),
    ):
        if ids:
            yield f"{who} ({len(ids)}): {', '.join(f'`{name}`' for name in ids)}."
            yield ""
    alarms = [
        name
        for (name, who), row in rows.items()
        if who == driver and any(trial.false_alarm for trial in row.trials)
    ]
    if alarms:
        yield (
            f"{NAMES[driver]} came upon something that the unmodified subject fails as well, "
            f"in searches for: {', '.join(f'`{name}`' for name in alarms)}."
        )
        yield ""


def _of_faults(
    faults: Sequence[Fault],
    detections: Sequence[Detection],
    rows: Rows,
    drivers: Sequence[str],
) -> Iterator[str]:
    others = [driver for driver in drivers if driver != LOOP]
    cells = []
    for fault, d in zip(faults, detections, strict=True):
        cells.append(
            (
                f"`{d.id}`",
                d.property,
                fault.subject,
                f"{d.detected}/{d.seeds}",
                f"{d.median_ops:,.0f} · {d.p90_ops:,.0f}",
                f"{d.median_seconds:.3g} · {d.p90_seconds:.3g}",
                f"{d.shrunk_ops:g} · {d.shrunk_ops_max} ({d.shortest_known_ops})",
                f"{d.shrink_seconds:.2g}",
                *(_compared(rows.get((d.id, driver))) for driver in others),
            )
        )
    yield "Operations and seconds: median · 90th percentile.  Shrunk: median · longest (shortest"
    yield "known).  Of the drivers to compare with: median seconds, and how many searches found it."
    yield ""
    yield from _table(
        (
            "fault",
            "property",
            "subject",
            "found",
            "operations",
            "CPU s",
            "shrunk",
            "shrinking, s",
            *(_SHORT[driver] for driver in others),
        ),
        cells,
    )


_SHORT = {"hypothesis": "Hypothesis", BASELINE: "… unlimited", "uniform": "uniform"}


def _compared(row: Row | None) -> str:
    if row is None:
        return "not run"
    found = sum(trial.found for trial in row.trials)
    seconds = median_seconds(row)
    return f"{'–' if seconds == inf else f'{seconds:.3g}'}, {found}/{len(row.trials)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
