"""Replay of cases: the digest, the first bad operation, and the record for the story."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import sha256

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvproof.fuzz.faults import fault_by_id
from kvproof.invariants.case import Case
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.operations import AnyOperation
from kvproof.invariants.story import Moment
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Verdict, Violation
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import SubjectFactory, subject_factory

EVERY_OPERATION = 1
"""Audit interval at which nothing hides until a later audit."""
NEVER = 0
"""Audit interval of a run that is audited at its end only."""
AUDITED_WHOLE = 4_000_000
"""Operations times blocks up to which a replay is audited at each operation: some seconds."""


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


def replay(case: Case, *, record: bool = False, imports: bool = True) -> Replay:
    """Run a case in a fresh subject, up to its first violation, audited at each operation.

    Where that would take long, the first bad operation is bisected instead.  ``imports``: as for
    ``subject_factory``.  Raises InputError if the case names a subject or a fault that there is
    not.
    """
    factory = subject_factory(case.subject, imports=imports)
    with installed(case.fault):
        if len(case.operations) * case.configuration.blocks <= AUDITED_WHOLE:
            return _replay(factory, case, EVERY_OPERATION, record)
        return _replay(factory, _bisected(factory, case), NEVER, record)


@contextmanager
def installed(fault: str | None) -> Iterator[None]:
    """The seeded fault of that name, if any, for as long as the context is open."""
    with fault_by_id(fault).installed() if fault else nullcontext():
        yield


def _replay(factory: SubjectFactory, case: Case, audit_interval: int, record: bool) -> Replay:
    harness = harness_for(factory(case.configuration), audit_interval=audit_interval)
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


def _bisected(factory: SubjectFactory, case: Case) -> Case:
    """The case up to its first bad operation, found by audits at the ends of ever closer parts.

    What an audit sees stays wrong, so that the search may halve.
    """

    def fails(length: int) -> bool:
        harness = harness_for(factory(case.configuration), audit_interval=NEVER)
        try:
            return bool(harness.run(case.operations[:length]))
        except CheckerError:
            return False

    good, bad = 0, len(case.operations)
    if not fails(bad):
        return case
    while bad - good > 1:
        middle = (good + bad) // 2
        if fails(middle):
            bad = middle
        else:
            good = middle
    return replace(case, operations=case.operations[:bad])


def first_violation(
    factory: SubjectFactory, configuration: Configuration, operations: Iterable[AnyOperation]
) -> tuple[list[AnyOperation], Sequence[Violation]] | None:
    """The operations up to the first bad one, audited at every step, and all that it violates.

    None if there is none, or if a checker stumbled.  The caller installs the fault, if any:
    shrinking replays thousands of times.
    """
    harness = harness_for(factory(configuration), audit_interval=EVERY_OPERATION)
    performed: list[AnyOperation] = []
    try:
        for operation in operations:
            performed.append(operation)
            harness.perform(operation)
            if harness.violations:
                return performed, harness.violations
        violations = harness.audit()
    except CheckerError:
        return None
    return (performed, violations) if violations else None
