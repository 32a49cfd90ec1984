"""All scheduling checks together, fed one event at a time, while an operation is under way.

The work for an event follows the number of its parts.  What only a view can tell is compared by
``audit``, when the driver asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from kvproof.invariants.checker import STATUSES, Checker, CheckerError
from kvproof.invariants.events import Event
from kvproof.invariants.operations import OPERATION_TYPES, SCHEDULER_KINDS, Arrive, Operation
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.property import EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.checks import SCHEDULING_CHECKS
from kvproof.invariants.scheduling.goals import SchedulingGoals
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    BlocksHeld,
    Completed,
    Deferred,
    Limits,
    PlanRejected,
    Promises,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
    SchedulerEvent,
    TransferDelivered,
    TransferQueued,
)
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, place

SCHEDULING_OPERATIONS = tuple(
    [kind for kind in OPERATION_TYPES if kind.__name__.lower() in SCHEDULER_KINDS]
)
"""What drives a scheduler."""

EVENT_TYPES: tuple[type[SchedulerEvent], ...] = (
    RequestArrived,
    BlocksCounted,
    BlocksHeld,
    PlanRejected,
    Scheduled,
    Completed,
    RequestCancelled,
    RunningReset,
    Deferred,
    TransferQueued,
    TransferDelivered,
)


class SchedulingChecker:
    """Observes one run of one scheduler, beside the ``Checker`` of the cache below it.

    Checks of promises that the policy does not make are not there at all.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        promises: Promises,
        configuration: Configuration,
        cache: Checker,
        view: SchedulerView,
        checks: Iterable[type[SchedulingCheck]] = SCHEDULING_CHECKS,
    ) -> None:
        self.books = SchedulingBooks(limits, promises, configuration, cache.books)
        self.violations: list[Violation] = []
        self.operations = 0
        self.counts: dict[type[Operation], dict[Status, int]] = {
            kind: dict.fromkeys(STATUSES, 0) for kind in SCHEDULING_OPERATIONS
        }
        """Operations observed, by kind and status."""
        self.checks = [
            check(self.books, view, self.violations.append)
            for check in checks
            if check.promised(promises)
        ]
        self.goals = SchedulingGoals(self.books)
        self._on_event = self._event_handlers()
        self._concluding: dict[
            type[Operation], tuple[Callable[[Operation, Outcome], None], ...]
        ] = {
            kind: (
                *(check.conclude for check in self.checks if kind in check.concludes_on),
                self.goals.conclude,
            )
            for kind in SCHEDULING_OPERATIONS
        }

    def _event_handlers(self) -> dict[type[Event], tuple[EventHandler, ...]]:
        stages = [
            *(check.before_event() for check in self.checks),
            self.goals.before_event(),
            self.books.event_handlers,
            *(check.after_event() for check in self.checks),
            self.goals.after_event(),
        ]
        return {
            kind: tuple([stage[kind] for stage in stages if kind in stage]) for kind in EVENT_TYPES
        }

    # -- observation -----------------------------------------------------------------------------

    def expect(self, operation: Arrive) -> None:
        """This arrival is about to be applied; only it knows the prompt."""
        self.books.expect(operation)

    def handle(self, event: SchedulerEvent) -> None:
        """Check one event, at the time when it happens: the cache's books stand as it left them.

        Raises CheckerError if the event makes no sense to a check, and no violation was seen.
        """
        try:
            for handle in self._on_event[event.__class__]:
                handle(event)
        except Exception as error:
            self._explain_away(error, self.operations)

    def observe(self, operation: Operation, outcome: Outcome) -> Sequence[Violation]:
        """An operation of the scheduler has ended; new violations, if any."""
        kind = operation.__class__
        self.operations += 1
        self.books.expect(None)
        self.counts[kind][outcome.status] += 1
        try:
            for conclude in self._concluding[kind]:
                conclude(operation, outcome)
        except Exception as error:
            self._explain_away(error, self.operations - 1)
        return self._stamped() if self.violations else ()

    def pass_over(self, kind: type[Operation]) -> None:
        """Count an operation that was not put to the scheduler."""
        self.operations += 1
        self.counts.setdefault(kind, dict.fromkeys(STATUSES, 0))["skipped"] += 1

    def audit(self) -> Sequence[Violation]:
        """Compare everything with the view now; new violations, if any."""
        try:
            for check in self.checks:
                check.audit()
        except Exception as error:
            self._explain_away(error, self.operations - 1)
        return self._stamped() if self.violations else ()

    def _explain_away(self, error: Exception, op: int) -> None:
        """After a violation the books may be wrong, and a check may stumble over them."""
        if not self.violations:
            raise CheckerError(f"{place(op)}: {error!r}") from error

    def _stamped(self) -> Sequence[Violation]:
        """The violations, each with the operation at which it was seen."""
        op = self.operations - 1
        self.violations[:] = [
            violation if violation.op >= 0 else replace(violation, op=op)
            for violation in self.violations
        ]
        return self.violations

    def checked(self) -> dict[str, int]:
        """How often each property was put to the test; those not promised are not there."""
        return {check.id(): check.checked for check in self.checks}
