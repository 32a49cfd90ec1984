"""The seeded loop: draw a run, perform it, check it, drain it; until something fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from msgspec import Struct, field

from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants.case import Case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory


class Tally(Struct):
    """What a search did, added up over its runs."""

    runs: int = 0
    ops: int = 0
    seconds: float = 0.0
    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    goals: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Why the verdict is unknown: a checker stumbled."""

    def add(self, harness: Harness) -> None:
        """Add a finished run."""
        self.runs += 1
        self.ops += harness.checker.operations
        for kind, counts in harness.operation_counts().items():
            total = self.operations.setdefault(kind, dict.fromkeys(counts, 0))
            for status, count in counts.items():
                total[status] += count
        _add(self.goals, harness.checker.goals.hits)
        _add(self.checked, harness.checker.checked())


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count


class Found(Struct, frozen=True):
    """A failing run."""

    case: Case
    violation: Violation
    """The most telling one at the first bad operation."""


def search(
    subject: str,
    seed: str,
    *,
    seconds: float,
    tally: Tally,
    fault: str | None = None,
    runs_max: int | None = None,
    on_run: Callable[[Tally], None] | None = None,
) -> Found | None:
    """Run draws ``seed/0``, ``seed/1``, … until one fails or the time is up.

    Raises InputError if there is no such subject or fault.
    """
    factory = subject_factory(subject)
    planted = fault_by_id(fault) if fault else None
    started = time.perf_counter()
    with planted.installed() if planted else nullcontext():
        for draw in _draws(factory, seed, runs_max):
            found = _run(factory, draw, tally)
            tally.seconds = time.perf_counter() - started
            if found is not None:
                operations, violation = found
                case = Case(
                    subject,
                    draw.configuration,
                    operations,
                    features=draw.features,
                    seed=draw.seed,
                    fault=fault,
                    violates=violation.property,
                )
                return Found(case, violation)
            if on_run is not None:
                on_run(tally)
            if tally.seconds >= seconds:
                return None
    return None


def _draws(factory: SubjectFactory, seed: str, runs_max: int | None) -> Iterator[Draw]:
    capabilities = factory(Configuration()).capabilities
    number = 0
    while runs_max is None or number < runs_max:
        yield draw_run(f"{seed}/{number}", capabilities)
        number += 1


def _run(factory: SubjectFactory, draw: Draw, tally: Tally) -> tuple[list, Violation] | None:
    harness = Harness(factory(draw.configuration))
    operations = list(draw.operations)
    try:
        harness.run(draw.operations)
        if not harness.violations:
            operations += harness.drain()
            harness.audit()
    except CheckerError as error:
        tally.problems.append(f"run {draw.seed}: {error}")
    tally.add(harness)
    if not harness.violations:
        return None
    violation = primary(harness.violations)
    return operations[: violation.op + 1], violation
