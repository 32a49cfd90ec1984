"""All checks together, fed one operation at a time.

Incremental: the work for an operation follows what the operation touched.  Outcomes and events
are judged at once.  State that stays, the view of what was touched, is settled every
``SETTLED_EVERY`` operations: what several of them touched is compared once.  A full audit, which
looks at everything, is made at a sampled 5 % of operations and when asked; it is made rarer with
the pool's size and with the number of live requests, so that its share of the cost stays the same,
and never switched off.  What is seen late is put down to the right operation by a replay that
settles and audits at each one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import get_args

from msgspec import msgpack
from msgspec.structs import replace

from kvproof.invariants.books import Books
from kvproof.invariants.checks import CHECKS
from kvproof.invariants.events import AnyEvent, Event
from kvproof.invariants.goals import Goals
from kvproof.invariants.operations import (
    OPERATION_TYPES,
    Admit,
    Fork,
    Grow,
    Operation,
    Preempt,
    Reserve,
    Resume,
)
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.property import Check, EventHandler, OperationHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.shadow import Shadow, States
from kvproof.invariants.subject import Subject
from kvproof.invariants.verdict import Violation, place

SETTLED_EVERY = 12
"""Operations between two comparisons of touched state with the view …"""
SETTLED_BLOCKS = 64
"""… but for pools of more than 768 blocks, one for so many operations per ``SETTLED_BLOCKS``
blocks: the more operations, the more of them touch the same …"""
SETTLED_RARELY = 128
"""… up to so many."""
AUDITED_SHARE = 20
"""An audit after one in so many operations (5 %) …"""
AUDIT_BLOCKS = 2
"""… but for pools of more than 40 blocks, one for so many operations per ``AUDIT_BLOCKS``; and
never more often than one in as many operations as there are live requests."""


Plan = tuple[
    dict[Status, int],
    tuple[OperationHandler, ...],
    OperationHandler | None,
    tuple[OperationHandler, ...],
]
"""For one kind of operation and one status: the counts to add to, what looks first, the books'
handler, and what looks at the end."""

NEVER = 1 << 62

STATUSES: tuple[Status, ...] = get_args(Status)
EVENT_TYPES: tuple[type[Event], ...] = get_args(AnyEvent)


class CheckerError(Exception):
    """A checker stumbled over what a subject reported: the verdict is unknown, not pass."""


def audit_interval(blocks: int) -> int:
    """Operations between two audits of a pool of this size."""
    return max(AUDITED_SHARE, blocks // AUDIT_BLOCKS)


def settlement_interval(blocks: int) -> int:
    """Operations between two settlements of a pool of this size."""
    return min(max(SETTLED_EVERY, blocks // SETTLED_BLOCKS), SETTLED_RARELY)


Looks = tuple[tuple[int, ...], tuple[int, ...]]
"""Which checks have something to say about an operation that ends so, by their place in the list:
before it is followed, and after."""


@lru_cache(maxsize=64)
def _known_looks(
    checks: tuple[type[Check], ...], semantics: bytes, tiers: bool
) -> dict[tuple[type[Operation], Status], Looks]:
    """What ``Checker._looks`` found out: the same for all runs of such a subject, and there are
    thousands of short ones."""
    return {}


class _Plans(dict[Status, Plan]):
    """The plans for one kind of operation, each made when it is first needed: most never are."""

    def __init__(self, kind: type[Operation], plan: Callable[[type[Operation], Status], Plan]):
        self._kind = kind
        self._plan = plan

    def __missing__(self, status: Status) -> Plan:
        plan = self[status] = self._plan(self._kind, status)
        return plan


class Checker:
    """Observes one run of one subject.  After the first violation its books are not kept."""

    def __init__(
        self,
        subject: Subject,
        *,
        checks: Iterable[type[Check]] = CHECKS,
        interval: int | None = None,
    ) -> None:
        """``interval``: operations between audits; None for the default, 0 for none.

        With 1, touched state is settled at each operation, too.
        """
        configuration, semantics = subject.configuration, subject.semantics
        self.books = Books(configuration, semantics)
        ids = configuration.blocks + len(semantics.reserved)
        shadows = [
            (States if group.group in semantics.states else Shadow)(ids, group.block_size)
            for group in self.books.groups
        ]
        if semantics.shared_pool and not (semantics.block_sizes or semantics.states):
            shadows = shadows[:1] * semantics.groups
        self.violations: list[Violation] = []
        self.operations = 0
        self.audits = 0
        self.settlements = 0
        self.counts: dict[type[Operation], dict[Status, int]] = {
            kind: dict.fromkeys(STATUSES, 0) for kind in OPERATION_TYPES
        }
        """Operations observed, by kind and status."""
        view = self._view = subject.view()
        self._block_sizes = self.books.block_sizes
        self.checks = [check(self.books, shadows, view, self._report) for check in checks]
        self.goals = Goals(self.books)
        blocks = configuration.blocks
        if self.books.tiers is not None:
            blocks += configuration.host_blocks + configuration.disk_blocks
        self._interval = audit_interval(blocks) if interval is None else interval
        self._follows_requests = interval is None
        self.audit_every = self._interval
        """Operations between audits, on average, while there are not more live requests than that;
        0 for none."""
        self._settle_every = 1 if self._interval == 1 else settlement_interval(configuration.blocks)
        self._drawn = 1
        self._next_audit = self._gap() if self._interval else NEVER
        self._next_look = min(self._settle_every, self._next_audit)
        self._known_looks = _known_looks(
            tuple([type(check) for check in self.checks]),
            msgpack.encode(semantics),
            self.books.tiers is not None,
        )
        self._settling = [
            check.settle for check in self.checks if type(check).settle is not Check.settle
        ]
        self._auditing = [
            check.audit for check in self.checks if type(check).audit is not Check.audit
        ]
        self._judging_standing = [
            check for check in self.checks if type(check).judge_standing is not Check.judge_standing
        ]
        self._plans = {kind: _Plans(kind, self._plan) for kind in OPERATION_TYPES}
        self._on_event = self._event_handlers()

    # -- which hooks look at what ----------------------------------------------------------------

    def _plan(self, kind: type[Operation], status: Status) -> Plan:
        """All that is to be done about such an operation, looked up once."""
        before, after = self._looks(kind, status)
        expecting = [self.checks[place].expecting(kind) for place in before]
        follow = self.books.operation_handlers.get(kind) if status == "done" else None
        concluding: list[OperationHandler] = [self.checks[place].conclude for place in after]
        if kind in (Admit, Grow, Reserve, Fork, Preempt, Resume) and status == "done":
            concluding.insert(0, self._stands)
        if status != "skipped":
            concluding += self.goals.concluding(kind)
        return (
            self.counts[kind],
            tuple([handler for handler in expecting if handler is not None]),
            follow,
            tuple(concluding),
        )

    def _looks(self, kind: type[Operation], status: Status) -> Looks:
        known = self._known_looks.get((kind, status))
        if known is None:
            places = range(len(self.checks))
            known = self._known_looks[kind, status] = (
                tuple([place for place in places if self.checks[place].expects(kind, status)]),
                tuple([place for place in places if self.checks[place].concludes(kind, status)]),
            )
        return known

    def _event_handlers(self) -> dict[type[Event], tuple[EventHandler, ...]]:
        handlers: dict[type[Event], list[EventHandler]] = {kind: [] for kind in EVENT_TYPES}
        stages = [
            *(check.before_event() for check in self.checks),
            self.goals.before_event(),
            self.goals.tiers.before_event() if self.goals.tiers is not None else {},
            self.books.event_handlers,
            *(check.after_event() for check in self.checks),
        ]
        for stage in stages:
            for kind, handler in stage.items():
                handlers[kind].append(handler)
        return {kind: tuple(handlers[kind]) for kind in EVENT_TYPES}

    def _report(self, violation: Violation) -> None:
        """A violation, unless it was reported already: several looks may see the same."""
        if all(violation != replace(known, op=violation.op) for known in self.violations):
            self.violations.append(violation)

    # -- observation -------------------------------------------------------------------------------

    def observe(
        self, operation: Operation, outcome: Outcome, events: Sequence[Event]
    ) -> Sequence[Violation]:
        """Check one operation that the subject has just answered; new violations, if any.

        Raises CheckerError if the subject's reports make no sense to a checker that has not
        reported a violation.
        """
        status, followed = outcome.status, False
        self.operations += 1
        try:
            counts, expecting, follow, concluding = self._plans[operation.__class__][status]
            counts[status] += 1
            books = self.books
            if books.passing:
                books.begin()
            for expect in expecting:
                expect(operation, outcome)
            if self.violations and self._lost():
                return self._stamped()
            if follow is not None:
                follow(operation, outcome)
            if events or status != "skipped":  # else nothing happened
                books.events = events
                on_event = self._on_event
                for event in events:
                    for handle in on_event[event.__class__]:
                        handle(event)
                for conclude in concluding:
                    conclude(operation, outcome)
            followed = True
            if self.operations >= self._next_look:
                self._look()
        except Exception as error:
            self._explain_away(error, followed)
        return self._stamped() if self.violations else ()

    def pass_over(self, kind: type[Operation]) -> None:
        """Count an operation that was not put to the subject."""
        self.operations += 1
        self.counts[kind]["skipped"] += 1

    def _look(self) -> None:
        """It is time to settle, and perhaps to audit."""
        if self.operations < self._next_audit or self.violations:
            self._settle()
        else:
            self._next_audit = self.operations + self._gap()
            self._audit()

    def _gap(self) -> int:
        """Operations to the next audit: drawn, so that nothing periodic hides between audits.

        A multiplicative generator, so that a replay audits where the run did.
        """
        self._drawn = self._drawn * 48271 % 0x7FFFFFFF
        interval = self._interval
        if self._follows_requests:
            interval = max(interval, len(self.books.requests))
        return 1 + self._drawn % (2 * interval - 1)

    def _settle(self) -> None:
        """Compare what was touched since the last time with the view."""
        self._next_look = min(self.operations + self._settle_every, self._next_audit)
        self.settlements += 1
        self._compare_standings()
        for settle in self._settling:
            settle()
        self.books.settled()

    def _stands(self, operation: Operation, outcome: Outcome) -> None:
        """A request that was given blocks or lost them stands as it should: it may be gone, or have
        them again, when settled."""
        live = self.books.requests
        for number in (outcome.request, *outcome.children):
            if number is not None and number in live:
                self._compare_standing(live[number])

    def _compare_standings(self) -> None:
        live = self.books.requests
        for number, request in self.books.touched_requests.items():
            if number in live:
                self._compare_standing(request)

    def _compare_standing(self, request: RequestModel) -> None:
        """One comparison of all that a view says of a request; the checks sort it out."""
        actual, expected = self._view.standing(request.id), request.standing(*self._block_sizes)
        if actual != expected:
            for check in self._judging_standing:
                check.judge_standing(request, actual, expected)

    def _explain_away(self, error: Exception, followed: bool) -> None:
        """A checker stumbled: over a violation that is seen, or can be seen now; else raise.

        Books that have not ``followed`` the operation cannot be compared with the view.
        """
        if not self.violations and followed:
            try:
                self._settle()
            except Exception:
                self.violations.clear()
        if not self.violations:
            raise CheckerError(f"{place(self.operations - 1)}: {error!r}") from error

    def _lost(self) -> bool:
        """Whether the outcome speaks of another request, so that the books cannot follow."""
        return any(violation.property == "LIFE" for violation in self.violations)

    def audit(self) -> Sequence[Violation]:
        """Check everything now; new violations, if any."""
        try:
            self._audit()
        except Exception as error:
            self._explain_away(error, followed=True)
        return self._stamped() if self.violations else ()

    def _audit(self) -> None:
        self.audits += 1
        self.books.touched_requests.update(self.books.requests)  # compare them all
        self._settle()
        for audit in self._auditing:
            audit()

    def _stamped(self) -> Sequence[Violation]:
        """The violations, each with the operation at which it was seen."""
        op = self.operations - 1
        self.violations[:] = [
            violation if violation.op >= 0 else replace(violation, op=op)
            for violation in self.violations
        ]
        return self.violations

    def checked(self) -> dict[str, int]:
        """How often each property was put to the test."""
        looked = [0] * len(self.checks)
        for kind, statuses in self.counts.items():
            for status, count in statuses.items():
                if count:
                    before, after = self._looks(kind, status)
                    for place in {*before, *after}:
                        looked[place] += count
        return {
            check.id(): self._checked(check, count)
            for check, count in zip(self.checks, looked, strict=True)
        }

    def _checked(self, check: Check, looked: int) -> int:
        if check.counts_itself:
            return check.checked
        looked += self.audits if type(check).audit is not Check.audit else 0
        return check.checked + looked + self.settlements * check.settles()
