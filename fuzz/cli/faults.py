"""``kvproof faults``: the seeded faults, and how fast they are found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import msgspec
import typer

from kvproof.fuzz.cli.output import (
    JsonOption,
    console,
    finish,
    print_json,
    progress_bar,
    show_verdict,
    table,
    writable_file,
)
from kvproof.fuzz.detect import run_clean
from kvproof.fuzz.detection.drivers import DRIVERS, NAMES
from kvproof.fuzz.detection.measure import conditions, in_sample, measure_all, task_of
from kvproof.fuzz.detection.page import write_page
from kvproof.fuzz.detection.plot import plot, require_plotting
from kvproof.fuzz.detection.records import LOOP, CleanRun, Journal, Row
from kvproof.fuzz.detection.summary import (
    Detection,
    Rows,
    asked_and_reached,
    complaint,
    curves,
    detection_of,
    drivers_of,
    reached,
    speedup,
)
from kvproof.fuzz.faults import Fault, all_faults, fault_by_id
from kvproof.fuzz.report.unchecked import UNCHECKED
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.errors import InputError
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS
from kvproof.invariants.verdict import counted

app = typer.Typer(no_args_is_help=True, help="Seeded faults: list them, or measure detection.")

NamesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[FAULT]...", help="Only these faults.")
]
PropertyOption = Annotated[
    list[str] | None, typer.Option("--property", help="Only faults that break it, such as CONS.")
]
SubjectOption = Annotated[
    list[str] | None,
    typer.Option("--subject", help="Only faults of it: engine, scheduler, scheduler:orca."),
]
SourceOption = Annotated[
    list[str] | None,
    typer.Option("--source", help="Only faults modelled on a bug of it: vllm, B04, sglang#16067."),
]


def selected(
    names: Sequence[str] | None,
    properties: Sequence[str] | None,
    subjects: Sequence[str] | None,
    sources: Sequence[str] | None,
) -> list[Fault]:
    """The faults that all filters let pass, in the order of the catalogue.

    Raises InputError if there is none.
    """
    asked = [fault_by_id(name).id for name in names or ()]
    known = {fault.property for fault in all_faults()}
    for name in properties or ():
        if name.upper() not in known:
            raise InputError(f"no fault breaks {name!r}; there are {', '.join(sorted(known))}")
    faults = [
        fault
        for fault in all_faults()
        if (not asked or fault.id in asked)
        and (not properties or fault.property in [name.upper() for name in properties])
        and (not subjects or any(_is_of(fault.subject, name) for name in subjects))
        and (not sources or any(name.lower() in fault.source.lower() for name in sources))
    ]
    if not faults:
        raise InputError("no fault is all of that; see `kvproof faults list`")
    return faults


def _is_of(subject: str, name: str) -> bool:
    return subject == name or subject.startswith(f"{name}:")


@app.command("list")
def list_faults(
    names: NamesArgument = None,
    properties: PropertyOption = None,
    subjects: SubjectOption = None,
    sources: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the seeded faults by the property that each breaks; those that are named in full.

    Example: [bold]kvproof faults list --property CONS[/]
    """
    faults = selected(names, properties, subjects, sources)
    if as_json:
        fields = ("id", "property", "source", "summary", "subject", "shortest", "also")
        print_json({"faults": [{f: getattr(fault, f) for f in fields} for fault in faults]})
        return
    for line in _told(faults) if names else _listed(faults):
        console.print(line, markup=False)


_COLUMNS = 80
_REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def _listed(faults: Sequence[Fault]) -> Iterator[str]:
    """One line each, under the title of what they break."""
    checked = [check.describe() for check in (*CHECKS, *SCHEDULING_CHECKS)]
    titles = {own.id: own.title for own in (*checked, *UNCHECKED)}
    for name in dict.fromkeys(fault.property for fault in faults):
        title = f"{name}: {titles[name]}"
        yield from wrap(title, _COLUMNS, subsequent_indent="    ")
        for fault in faults:
            if fault.property == name:
                yield f"  {fault.id:41}  {_REPORT.findall(fault.source)[0]}"
    yield f"{counted(len(faults), 'fault')}; fewer: --property, --subject, --source"
    yield "What one does: kvproof faults list FAULT"
    yield "See one found: kvproof check --fault FAULT"


def _told(faults: Sequence[Fault]) -> Iterator[str]:
    for fault in faults:
        also = f", or {', '.join(fault.also)}" if fault.also else ""
        yield f"{fault.id}"
        yield f"    {fault.summary}"
        yield f"    breaks {fault.property}{also}, on {fault.subject}"
        yield f"    shortest known run: {counted(fault.shortest, 'operation')}"
        yield f"    modelled on {fault.source}"
        yield f"    see it found: kvproof check --fault {fault.id}"


@app.command("detect")
def detect(
    names: NamesArgument = None,
    properties: PropertyOption = None,
    subjects: SubjectOption = None,
    sources: SourceOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="Searches for each fault.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.1, help="CPU seconds of a search.")] = 60.0,
    shrinks: Annotated[
        int, typer.Option(min=0, help="Shrink the cases of the first so many of these searches.")
    ] = 20,
    compare: Annotated[
        list[str] | None,
        typer.Option(help=f"Compare with: {', '.join(name for name in DRIVERS if name != LOOP)}."),
    ] = None,
    compare_seeds: Annotated[int, typer.Option(min=1, help="Searches of each of these.")] = 3,
    compare_seconds: Annotated[
        float, typer.Option(min=0.1, help="CPU seconds of a search of these.")
    ] = 30.0,
    compare_one_in: Annotated[
        int, typer.Option(min=1, help="Compare over one fault in so many, by its name's checksum.")
    ] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    clean_ops: Annotated[
        int, typer.Option(min=1, help="Operations on the unmodified subjects.")
    ] = 200_000,
    seed: Annotated[str, typer.Option(help="Where random choices start.")] = "detect",
    out: Annotated[
        Path | None, typer.Option(help="Keep each result in this .jsonl; go on from what it has.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw survival curves: .png or .svg.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write the figures as Markdown.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plant each fault, search until it is found, shrink; and show that clean code stays silent.

    Exit code 0 if every search found its fault, by its property, and shrank it; else 1.

    Example: [bold]kvproof faults detect --compare hypothesis-unlimited --out results.jsonl[/]
    """
    faults = selected(names, properties, subjects, sources)
    others = _drivers(compare or [])
    for file in (out, picture, page):
        if file is not None:
            writable_file(file)
    if picture is not None:
        require_plotting(picture)
    limits = conditions(seed, seeds, seconds, shrinks, compare_seeds, compare_seconds)
    journal = Journal(out, limits)
    sample = [fault.id for fault in faults if in_sample(fault.id, compare_one_in)]
    wanted = [(fault.id, LOOP) for fault in faults]
    wanted += [(fault, driver) for fault in sample for driver in others]
    _measure(journal, wanted, workers)
    _run_clean(journal, faults, clean_ops)
    _report(journal, faults, wanted, picture, page, as_json)


def _drivers(names: Sequence[str]) -> list[str]:
    known = [name for name in DRIVERS if name != LOOP]
    for name in names:
        if name not in known:
            raise InputError(f"unknown driver {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in names]


def _measure(journal: Journal, wanted: Sequence[tuple[str, str]], workers: int) -> None:
    """What the journal does not have yet."""
    tasks = [
        task_of(journal.conditions, fault, driver)
        for fault, driver in wanted
        if (fault, driver) not in journal.rows
    ]
    done = 0
    with progress_bar("faults × drivers", len(tasks)) as bar:

        def on_row(row: Row) -> None:
            nonlocal done
            journal.add(row)
            done += 1
            bar.update(done, f"{row.fault} by {NAMES[row.driver]}")

        measure_all(tasks, workers=workers, on_row=on_row)


def _run_clean(journal: Journal, faults: Sequence[Fault], ops: int) -> None:
    subjects = tuple(dict.fromkeys(fault.subject for fault in faults))
    there = journal.clean
    if there.ops < ops or not {*there.subjects} >= {*subjects}:
        journal.add(run_clean(f"{journal.conditions.seed}/clean", ops, subjects))


def _report(
    journal: Journal,
    faults: Sequence[Fault],
    wanted: Sequence[tuple[str, str]],
    picture: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    rows = {key: journal.rows[key] for key in wanted}
    detections = [detection_of(fault, rows[fault.id, LOOP]) for fault in faults]
    goals = reached(detections, rows, journal.clean)
    if picture is not None:
        plot(curves(rows), picture)
    if page is not None:
        write_page(page, journal.conditions, rows, faults, detections, goals, picture)
    good = not any(complaint(d) for d in detections) and journal.clean.violations == 0
    asked = asked_and_reached(goals, journal.conditions)
    if as_json:
        print_json(_fields(journal, detections, rows, asked, good))
    else:
        _show(detections, rows, journal.clean, asked, good)
    finish("pass" if good else "fail")


def _fields(
    journal: Journal,
    detections: Sequence[Detection],
    rows: Rows,
    asked: Sequence[tuple[str, str, str]],
    good: bool,
) -> dict[str, Any]:
    others = [driver for driver in drivers_of(rows) if driver != LOOP]
    return {
        "verdict": "pass" if good else "fail",
        "seed": journal.conditions.seed,
        "conditions": msgspec.to_builtins(journal.conditions),
        "faults": msgspec.to_builtins(detections),
        "compared": {
            driver: {
                "speedup": msgspec.to_builtins(speedup(rows, driver)),
                "faults": [
                    msgspec.to_builtins(detection_of(fault_by_id(fault), row))
                    for (fault, name), row in rows.items()
                    if name == driver
                ],
            }
            for driver in others
        },
        "survival": msgspec.to_builtins(curves(rows)),
        "clean": msgspec.to_builtins(journal.clean),
        "goals": [
            {"what": what, "asked": asked_for, "reached": got} for what, asked_for, got in asked
        ],
    }


def _show(
    detections: Sequence[Detection],
    rows: Rows,
    clean: CleanRun,
    asked: Sequence[tuple[str, str, str]],
    good: bool,
) -> None:
    table(
        "Detection of seeded faults",
        (
            "fault",
            "property",
            "found",
            "median ops",
            "p90 ops",
            "median s",
            "p90 s",
            "shrunk ops",
            "shortest",
        ),
        [
            (
                d.id,
                d.property,
                f"{d.detected}/{d.seeds}",
                d.median_ops,
                d.p90_ops,
                d.median_seconds,
                d.p90_seconds,
                f"{d.shrunk_ops:g} (≤ {d.shrunk_ops_max})",
                d.shortest_known_ops,
            )
            for d in detections
        ],
    )
    for driver in drivers_of(rows):
        if driver != LOOP:
            _show_comparison(rows, driver)
    console.print(
        f"Unmodified subjects: {clean.ops:,} operations, {counted(clean.violations, 'violation')}."
    )
    show_verdict(
        "pass" if good else "fail",
        "every search found its fault and shrank it to about its shortest run"
        if good
        else "; ".join(text for text in map(complaint, detections) if text)
        or "an unmodified subject violates a property",
    )
    for what, asked_for, got in asked:
        console.print(f"  {what}: {got}; asked for: {asked_for}")


def _show_comparison(rows: Rows, driver: str) -> None:
    faster = speedup(rows, driver)
    mean = faster.geometric_mean
    times = "" if mean is None else f": the loop is {mean:.3g} times faster (geometric mean)"
    console.print(
        f"{NAMES[driver]}: found {faster.both + len(faster.driver_only)} of "
        f"{counted(faster.faults, 'fault')}{times}"
    )
