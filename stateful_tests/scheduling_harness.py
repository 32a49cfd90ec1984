"""One run of a scheduler: the cache below it checked at each of its operations, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvproof.invariants.checker import CheckerError
from kvproof.invariants.events import Event
from kvproof.invariants.operations import AnyOperation, Arrive, Operation, Run, Wait, kind_of
from kvproof.invariants.outcomes import SKIPPED, Outcome, Status
from kvproof.invariants.scheduling.checker import SchedulingChecker
from kvproof.invariants.scheduling.vocabulary import SchedulerEvent
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harness import Harness, crash_violation
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

DRAIN_ITERATIONS = 64
"""Iterations of one operation while a run is drained."""
_UNTIL_ALL_HAVE_COME = Wait(1 << 50)
"""Longer than any copies take, and short enough to be done over and over."""

_STOPPED = Outcome("refused", "stopped_by_violation")
"""Of the operation in which a violation is seen; its subject gives no answer any more."""


class _Violated(Exception):
    """Leaves the scheduler in the middle of an operation: what it does further tells nothing."""


class SchedulingHarness:
    """As :class:`Harness`, for subjects that schedule."""

    def __init__(
        self,
        subject: SchedulerSubject,
        *,
        audit_interval: int | None = None,
        checked: bool = True,
    ) -> None:
        self.subject = subject
        self.cache = Harness(subject.cache, audit_interval=audit_interval, checked=checked)
        self.checker = SchedulingChecker(
            limits=subject.configuration.scheduling,
            promises=subject.promises,
            configuration=subject.configuration,
            cache=self.cache.checker,
            view=subject.state_view,
        )
        self.violations: Sequence[Violation] = ()
        self.last_events: Sequence[Event] = ()
        """Of the cache and of the scheduler, as they came."""
        self._events: list[Event] = []
        self._checked = checked
        self._audit_interval = self.cache.checker.audit_every
        self._next_audit = self._audit_interval
        subject.connect(self._perform_below, self._hear)

    @property
    def counts(self) -> dict[type[Operation], dict[Status, int]]:
        """Operations by kind and status."""
        return self.checker.counts

    @property
    def goals(self) -> dict[str, int]:
        """How often each situation was met."""
        return self.checker.goals.hits

    @property
    def operations(self) -> int:
        """Operations observed: the scheduler's and, one floor below, the cache's."""
        return self.checker.operations + self.cache.checker.operations

    def checks(self) -> dict[str, int]:
        """How often each property was put to the test."""
        return self.cache.checker.checked() | self.checker.checked()

    def _perform_below(self, operation: Operation) -> Outcome:
        outcome = self.cache.perform(operation)
        if self._checked:
            self._events += self.cache.last_events
            if self.cache.violations:
                raise _Violated
        return outcome

    def _hear(self, event: SchedulerEvent) -> None:
        if self._checked:
            self._events.append(event)
            self.checker.handle(event)
            if self.checker.violations:
                raise _Violated

    def perform(self, operation: Operation) -> Outcome:
        """Apply and check one operation.

        Raises CheckerError if a checker stumbles.  A subject that raises is a violation.
        """
        semantics = self.subject.semantics
        lacking = isinstance(operation, Arrive) and (
            (operation.samples > 1 and not semantics.samples)
            or (operation.media != () and not semantics.arriving_media)
        )
        if lacking or kind_of(operation) not in self.subject.capabilities:
            self.checker.pass_over(type(operation))
            return SKIPPED
        self._events = []
        if isinstance(operation, Arrive) and self._checked:
            self.checker.expect(operation)
        try:
            outcome = self.subject.apply(operation)
        except _Violated:
            return self._stopped(operation, self.cache.violations or self.checker.violations)
        except CheckerError:
            raise
        except Exception as error:
            return self._stopped(operation, (crash_violation(operation, error),))
        finally:
            self.subject.drain_events()
            self.last_events = self._events
        if self._checked:
            violations = self.checker.observe(operation, outcome)
            if violations:
                self.violations = violations
            elif self._audit_interval and self.checker.operations >= self._next_audit:
                self._next_audit += self._audit_interval
                self.audit()
        return outcome

    def _stopped(self, operation: Operation, violations: Sequence[Violation]) -> Outcome:
        """A violation in the middle of an operation, which is the one to blame."""
        op = self.checker.operations
        self.violations = [replace(violation, op=op) for violation in violations]
        self.checker.pass_over(type(operation))
        return _STOPPED

    def run(self, operations: Iterable[Operation]) -> Sequence[Violation]:
        """Perform operations up to the first violation, then audit; the violations."""
        for operation in operations:
            self.perform(operation)
            if self.violations:
                return self.violations
        return self.audit()

    def audit(self) -> Sequence[Violation]:
        """A full audit now, of cache and scheduler, unless something has failed already."""
        if not self.violations and self._checked:
            op = self.checker.operations - 1
            below = [replace(violation, op=op) for violation in self.cache.audit()]
            self.violations = below or self.checker.audit()
        return self.violations

    def drain(self, performed: list[AnyOperation]) -> None:
        """Run to the end of all requests, the liveness phase, and of all copies.

        What it takes is appended to ``performed`` as it is done, also if a checker stumbles.
        """
        operation: AnyOperation = Run(DRAIN_ITERATIONS)
        while not self.violations:
            performed.append(operation)
            outcome = self.perform(operation)
            if outcome.status != "done" or not self.subject.state_view.live():
                break
        if self.subject.configuration.offloads_prefixes and not self.violations:
            performed.append(_UNTIL_ALL_HAVE_COME)
            self.perform(_UNTIL_ALL_HAVE_COME)

    def operation_counts(self) -> dict[str, dict[str, int]]:
        """Per operation kind of the scheduler: done, refused, skipped."""
        return {kind.__name__.lower(): dict(counts.items()) for kind, counts in self.counts.items()}
