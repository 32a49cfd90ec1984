"""Replay of cases: the digest, the first bad operation, and the record for the story."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from hashlib import sha256

import msgspec
from msgspec import Struct

from kvproof.fuzz.faults import fault_by_id
from kvproof.invariants.case import Case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.operations import AnyOperation
from kvproof.invariants.story import Moment
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Verdict, Violation
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory

EVERY_OPERATION = 1
"""Audit interval at which nothing hides until a later audit."""


class Replay(Struct, frozen=True):
    """What a case did."""

    digest: str
    """SHA-256 over all outcomes and events: equal digests, equal runs."""
    verdict: Verdict
    violations: Sequence[Violation]
    ops: int
    """Operations performed, the violating one included."""
    moments: Sequence[Moment]
    """All that happened, for the story; empty unless asked for."""
    problem: str | None = None
    """Why the verdict is unknown."""


def replay(
    case: Case, *, audit_interval: int | None = EVERY_OPERATION, record: bool = False
) -> Replay:
    """Run a case in a fresh subject, up to its first violation.

    Raises InputError if the case names a subject or a fault that there is not.
    """
    factory = subject_factory(case.subject)
    fault = fault_by_id(case.fault) if case.fault else None
    with fault.installed() if fault else nullcontext():
        return _replay(factory, case, audit_interval, record)


def _replay(
    factory: SubjectFactory, case: Case, audit_interval: int | None, record: bool
) -> Replay:
    harness = Harness(factory(case.configuration), audit_interval=audit_interval)
    digest, moments, problem, ops = sha256(), [], None, 0
    try:
        for ops, operation in enumerate(case.operations, start=1):
            harness.last_events = ()  # a subject that raises has reported nothing
            outcome = harness.perform(operation)
            events = harness.last_events
            digest.update(msgspec.json.encode((operation, outcome, events)))
            if record:
                moments.append(Moment(ops - 1, operation, outcome, events))
            if harness.violations:
                break
        harness.audit()
    except CheckerError as error:
        problem = str(error)
    verdict: Verdict = "fail" if harness.violations else "unknown" if problem else "pass"
    return Replay(digest.hexdigest(), verdict, harness.violations, ops, moments, problem)


def first_violation(
    factory: SubjectFactory, configuration: Configuration, operations: Iterable[AnyOperation]
) -> tuple[list[AnyOperation], Sequence[Violation]] | None:
    """The operations up to the first bad one, audited at every step, and all that it violates.

    The caller installs the fault, if any: shrinking replays thousands of times.
    """
    harness = Harness(factory(configuration), audit_interval=EVERY_OPERATION)
    performed: list[AnyOperation] = []
    try:
        for operation in operations:
            performed.append(operation)
            harness.perform(operation)
            if harness.violations:
                return performed, harness.violations
    except CheckerError:
        return None
    violations = harness.audit()
    return (performed, violations) if violations else None
