"""All checks together, fed one operation at a time.

Incremental: the work after an operation follows what the operation touched.  A full audit, which
looks at everything, runs after every ``audit_interval``-th operation and when asked; it is made
rarer with the pool's size, so that its share of the cost stays the same, and never switched off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvproof.invariants.books import Books
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.events import AnyEvent, Event
from kvproof.invariants.goals import Goals
from kvproof.invariants.operations import OPERATION_TYPES, Operation
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.property import Check, EventHandler, OperationHandler
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.subject import Subject
from kvproof.invariants.verdict import Violation

AUDITED_SHARE = 20
"""An audit after one in so many operations (5 %) …"""
AUDIT_BLOCKS = 2
"""… but for pools of more than 40 blocks, one for so many operations per ``AUDIT_BLOCKS`` blocks."""


class CheckerError(Exception):
    """A checker stumbled over what a subject reported: the verdict is unknown, not pass."""


def audit_interval(blocks: int) -> int:
    """Operations between two audits of a pool of this size."""
    return max(AUDITED_SHARE, blocks // AUDIT_BLOCKS)


class Checker:
    """Observes one run of one subject.  After the first violation its books are not kept."""

    def __init__(
        self,
        subject: Subject,
        *,
        checks: Iterable[type[Check]] = CHECKS,
        interval: int | None = None,
    ) -> None:
        """``interval``: operations between audits; None for the default, 0 for none."""
        configuration, semantics = subject.configuration, subject.semantics
        self.books = Books(configuration, semantics)
        ids = configuration.blocks + len(semantics.reserved)
        shadows = [Shadow(ids, configuration.block_size) for _ in range(semantics.groups)]
        self.violations: list[Violation] = []
        self.operations = 0
        view = subject.view()
        self.checks = [
            check(self.books, shadows, view, self.violations.append) for check in checks
        ]
        self.goals = Goals(self.books)
        self._interval = audit_interval(configuration.blocks) if interval is None else interval
        self._until_audit = self._interval
        self._expect = {kind: self._expecting(kind) for kind in OPERATION_TYPES}
        self._conclude = {
            (kind, status): self._concluding(kind, status)
            for kind in OPERATION_TYPES
            for status in ("done", "refused", "skipped")
        }
        self._on_event = {kind: self._on(kind) for kind in AnyEvent.__args__}

    # -- which hooks look at what ----------------------------------------------------------------

    def _expecting(self, kind: type[Operation]) -> tuple[OperationHandler, ...]:
        return tuple(check.expect for check in self.checks if kind in check.expects_of)

    def _concluding(self, kind: type[Operation], status: Status) -> tuple[OperationHandler, ...]:
        return tuple(
            check.conclude
            for check in (*self.checks, self.goals)
            if type(check).conclude is not Check.conclude
            and kind in check.concludes_on
            and status in check.concludes_when
        )

    def _on(self, kind: type[Event]) -> tuple[EventHandler, ...]:
        before = [check.before_event().get(kind) for check in (*self.checks, self.goals)]
        books = self.books.event_handlers.get(kind)
        after = [check.after_event().get(kind) for check in self.checks]
        return tuple(handler for handler in (*before, books, *after) if handler is not None)

    # -- observation -------------------------------------------------------------------------------

    def observe(
        self, operation: Operation, outcome: Outcome, events: Sequence[Event]
    ) -> Sequence[Violation]:
        """Check one operation that the subject has just answered; new violations, if any.

        Raises CheckerError if the subject's reports make no sense to a checker that has not
        reported a violation.
        """
        try:
            self._observe(operation, outcome, events)
            self._until_audit -= 1
            if self._until_audit == 0:
                self._until_audit = self._interval
                if not self.violations:
                    self._audit()
        except Exception as error:
            if not self.violations:
                raise CheckerError(f"at operation {self.operations}: {error!r}") from error
        self.operations += 1
        return self._stamped() if self.violations else ()

    def _observe(
        self, operation: Operation, outcome: Outcome, events: Sequence[Event]
    ) -> None:
        books = self.books
        books.begin()
        books.events_seen = len(events)
        kind = operation.__class__
        for expect in self._expect[kind]:
            expect(operation, outcome)
        if self.violations and any(v.property == "LIFE" for v in self.violations):
            return  # the outcome speaks of another request: the books cannot follow
        if outcome.status == "done":
            books.apply(operation, outcome)
        on_event = self._on_event
        for event in events:
            for handler in on_event[event.__class__]:
                handler(event)
        for conclude in self._conclude[kind, outcome.status]:
            conclude(operation, outcome)

    def audit(self) -> Sequence[Violation]:
        """Check everything now; new violations, if any."""
        try:
            self._audit()
        except Exception as error:
            if not self.violations:
                raise CheckerError(f"in an audit: {error!r}") from error
        return self._stamped(self.operations - 1) if self.violations else ()

    def _audit(self) -> None:
        before = len(self.violations)
        for check in self.checks:
            check.audit()
        self.violations[before:] = [
            replace(violation, by_audit=True) for violation in self.violations[before:]
        ]

    def _stamped(self, op: int | None = None) -> Sequence[Violation]:
        op = self.operations - 1 if op is None else op
        self.violations[:] = [
            violation if violation.op >= 0 else replace(violation, op=op)
            for violation in self.violations
        ]
        return self.violations

    def checked(self) -> dict[str, int]:
        """How often each property was put to the test."""
        return {check.id(): check.checked for check in self.checks}
