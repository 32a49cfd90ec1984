"""The seeded loop: draw a run, perform it, check it, drain it; until something fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import Struct

from kvproof.fuzz.replay import NEVER, first_violation, installed
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants.case import Case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.operations import AnyOperation, kind_of
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, counted, primary
from kvproof.stateful_tests.harnesses import AnyHarness, harness_for
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory
from kvproof.stateful_tests.totals import Totals

DETERMINISM = "DETERMINISM"
"""The property that a subject breaks by doing one thing now and another then."""
DONE_TWICE_EVERY = 20
"""One run in so many is done twice, and compared: the last of them, since most faults are seen
before."""


class Found(Struct, frozen=True):
    """A failing run."""

    case: Case
    violation: Violation
    """The most telling one at the first bad operation."""


Failure = tuple[list[AnyOperation], Violation]
"""The operations up to the first bad one, and what it violates."""
Performer = Callable[[AnyHarness, Sequence[AnyOperation]], object]
"""Performs operations, up to the first violation, and audits."""


def perform_run(harness: AnyHarness, operations: Sequence[AnyOperation]) -> None:
    """What the loop does of itself."""
    harness.run(operations)


def search(
    subject: str,
    seed: str,
    *,
    seconds: float,
    totals: Totals,
    fault: str | None = None,
    runs_max: int | None = None,
    on_run: Callable[[Totals], None] | None = None,
) -> Found | None:
    """Run draws ``seed/0``, ``seed/1``, … until one fails or the time is up.

    Raises InputError if there is no such subject or fault.
    """
    factory = subject_factory(subject)
    started = time.perf_counter()
    with installed(fault):
        for number, draw in enumerate(_draws(factory, seed, runs_max)):
            done_twice = number % DONE_TWICE_EVERY == DONE_TWICE_EVERY - 1
            make = run_twice if done_twice else run_once
            failure = make(factory, draw, totals)
            totals.seconds = time.perf_counter() - started
            if failure is not None:
                return found(subject, draw, failure, fault)
            if on_run is not None:
                on_run(totals)
            if totals.seconds >= seconds:
                return None
    return None


def found(subject: str, draw: Draw, failure: Failure, fault: str | None) -> Found:
    """The failing run of a draw, as a case."""
    operations, violation = failure
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


def run_twice(factory: SubjectFactory, draw: Draw, totals: Totals) -> Failure | None:
    """As ``run_once``, and once more: answers and events of both subjects must be the same."""
    told: list[bytes] = []

    def perform(harness: AnyHarness, operations: Sequence[AnyOperation]) -> None:
        for operation in operations:
            told.append(_told(harness, operation))
            if harness.violations:
                return
        harness.audit()

    failure = run_once(factory, draw, totals, perform)
    return failure if failure is not None else _difference(factory, draw, told)


def _told(harness: AnyHarness, operation: AnyOperation) -> bytes:
    """Answer and events, as they are now: an event may hold a block table that grows."""
    harness.last_events = ()
    outcome = harness.perform(operation)
    return msgspec.msgpack.encode((outcome, harness.last_events))


def _difference(factory: SubjectFactory, draw: Draw, told: Sequence[bytes]) -> Failure | None:
    """The operations up to the first one that is answered otherwise than it was."""
    harness = harness_for(factory(draw.configuration), audit_interval=NEVER)
    for index, before in enumerate(told):
        try:
            now = _told(harness, draw.operations[index])
        except CheckerError:  # the first time it did not stumble
            now = b""
        if now != before:
            message = (
                f"the same {counted(index + 1, 'operation')}, done in two fresh subjects, gave "
                f"different results at the last one, {kind_of(draw.operations[index])}: the "
                "subject, or its policy, is not deterministic"
            )
            return draw.operations[: index + 1], Violation(DETERMINISM, message, op=index)
    return None


def _draws(factory: SubjectFactory, seed: str, runs_max: int | None) -> Iterator[Draw]:
    able = abilities(factory)
    number = 0
    while runs_max is None or number < runs_max:
        yield draw_run(f"{seed}/{number}", able)
        number += 1


def abilities(factory: SubjectFactory) -> frozenset[str]:
    """What ``draw_run`` has to know of a subject."""
    subject = factory(Configuration())
    return subject.capabilities | subject.semantics.features()


def run_once(
    factory: SubjectFactory, draw: Draw, totals: Totals, perform: Performer = perform_run
) -> Failure | None:
    """Do one drawn run in a fresh subject, and drain it; what fails, if anything."""
    harness = harness_for(factory(draw.configuration))
    operations = list(draw.operations)
    try:
        perform(harness, draw.operations)
        if not harness.violations:
            harness.drain(operations)
            harness.audit()
    except CheckerError as error:
        totals.add(harness)
        return _before_it_stumbled(factory, draw, operations, error, totals)
    totals.add(harness)
    if not harness.violations:
        return None
    violation = primary(harness.violations)
    return operations[: violation.op + 1], violation


def _before_it_stumbled(
    factory: SubjectFactory,
    draw: Draw,
    operations: list[AnyOperation],
    error: CheckerError,
    totals: Totals,
) -> Failure | None:
    """A subject that is broken may make a checker stumble before a violation is settled.

    With an audit at each operation it is seen first; otherwise the verdict is unknown.
    """
    seen = first_violation(factory, draw.configuration, operations)
    if seen is None:
        totals.problems.append(f"run {draw.seed}: {error}")
        return None
    return list(seen[0]), primary(seen[1])
