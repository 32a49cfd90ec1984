"""What ``kvproof check`` does: both drivers over one subject within a time budget.

First the seeded loop, which reaches rare situations fast, then the Hypothesis machine, which
draws otherwise.  The first failing run is shrunk, replayed and told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.replay import first_violation, installed, replay
from kvproof.fuzz.search import DETERMINISM, search
from kvproof.fuzz.shrink import shrink
from kvproof.fuzz.verdicts import judge
from kvproof.invariants.case import Case
from kvproof.invariants.story import explain
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Verdict, Violation, primary
from kvproof.stateful_tests.export import try_to_write_finding
from kvproof.stateful_tests.machine import CheckerStumbled, run_machine
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory
from kvproof.stateful_tests.totals import Totals

MACHINE_SHARE = 0.5
"""Part of the time that the Hypothesis machine gets."""
RUNS_PER_EXAMPLE = 10
"""Of so many runs: runs of the seeded loop to one of the machine, which takes far longer."""

Progress = Callable[[float, str], None]
"""Hears how many seconds have passed, and a few words."""


class Finding(Struct, frozen=True):
    """A violation, shrunk and told."""

    violation: Violation
    explanation: str
    case: Case
    found_ops: int
    """Operations of the run as it was found."""
    driver: str
    files: Sequence[Path]
    """Case, pytest file and log; empty if nothing was to be written, or could be."""
    unwritten: str = ""
    """Why they could not be."""


class Report(Struct, frozen=True):
    """The outcome of a check."""

    subject: str
    seed: str
    verdict: Verdict
    reasons: Sequence[str]
    """Why the verdict is unknown."""
    loop: Totals
    machine: Totals
    total: Totals
    finding: Finding | None


def check_subject(
    subject: str,
    *,
    seconds: float = math.inf,
    runs: int | None = None,
    seed: str,
    out: Path | None,
    fault: str | None = None,
    progress: Progress = lambda done, text: None,
) -> Report:
    """Drive the subject for so long, or for so many runs of the loop, or until something fails.

    So many runs are the same ones on every computer, whatever its speed.

    Raises InputError if there is no such subject or fault, or if it is not installed.
    """
    factory = subject_factory(subject)
    calls = fault_by_id(fault).calls() if fault else 0
    started = time.perf_counter()
    loop, machine = Totals(), Totals()

    def told(totals: Totals) -> None:
        progress(time.perf_counter() - started, f"{loop.ops + machine.ops:,} operations")

    share = seconds * (1 - MACHINE_SHARE)
    found = search(
        subject, seed, seconds=share, totals=loop, fault=fault, runs_max=runs, on_run=told
    )
    case, driver = (found.case, "seeded loop") if found else (None, "")
    left = seconds - (time.perf_counter() - started)
    if case is None and left > 0:
        with installed(fault):
            examples = math.inf if runs is None else runs / RUNS_PER_EXAMPLE
            case = _drive_machine(factory, subject, left, examples, seed, machine, told)
        case, driver = case and replace(case, fault=fault), "Hypothesis machine"
    seen = found.violation if found else None
    if case is not None:
        progress(time.perf_counter() - started, f"{loop.ops + machine.ops:,} operations; shrinking")
    finding = _finding(case, driver, out, seen) if case is not None else None
    total = loop.merged(machine)
    judgement = judge(
        factory(Configuration()),
        total.operations,
        total.goals,
        checked=total.checked,
        failed=finding is not None,
        problems=tuple(_problems(total, machine, subject, fault, calls)),
    )
    reasons = () if finding else judgement.reasons
    return Report(subject, seed, judgement.verdict, reasons, loop, machine, total, finding)


def _problems(
    total: Totals, machine: Totals, subject: str, fault: str | None, calls: int
) -> Iterator[str]:
    yield from total.problems
    if fault is not None and fault_by_id(fault).calls() == calls:
        yield f"the planted fault {fault} was never reached: {subject} does not do what it breaks"
    if not machine.runs:
        yield "there was no time left for the Hypothesis machine"


def _drive_machine(
    factory: SubjectFactory,
    subject: str,
    seconds: float,
    examples: float,
    seed: str,
    totals: Totals,
    told: Callable[[Totals], None],
) -> Case | None:
    started = time.perf_counter()

    def stop() -> bool:
        totals.seconds = time.perf_counter() - started
        told(totals)
        return totals.runs >= examples

    try:
        return run_machine(factory, subject, seconds=seconds, seed=seed, totals=totals, stop=stop)
    except CheckerStumbled as error:
        # What makes a checker stumble may be seen before, with an audit at each operation.
        if first_violation(factory, error.case.configuration, error.case.operations):
            return error.case
        totals.problems.append(str(error))
        return None


def _finding(case: Case, driver: str, out: Path | None, seen: Violation | None) -> Finding | None:
    """Shrink and tell.

    A run whose violation is gone in a replay would be a false alarm or a subject that is not
    deterministic; it is told as it was found, by what was ``seen`` there.
    """
    shrunk = None
    if case.violates != DETERMINISM:
        with suppress(KeyboardInterrupt):  # it is told as it was found
            shrunk = shrink(case)
    small = shrunk.case if shrunk else case
    result = replay(small, record=True)
    if not result.violations:
        small = case
        violation = seen or Violation(case.violates or "CRASH", "the run failed")
        if violation.property != DETERMINISM:
            again = "in a replay it does not happen again: the subject is not deterministic"
            violation = replace(violation, message=f"{violation.message}; {again}")
        explanation = f"{violation.property}: {violation.message}"
    else:
        violation = shrunk.violation if shrunk else primary(result.violations)
        explanation = explain(violation, result.moments, small.configuration.block_size)
    files, why = list[Path](), ""
    if out is not None:
        told = (small, violation, explanation, out)
        files, why = try_to_write_finding(*told, moments=result.moments)
    return Finding(violation, explanation, small, len(case.operations), driver, files, why)
