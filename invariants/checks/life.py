"""LIFE: requests live as operations say: admitted, running, preempted, ended, once each.

Verifies: that an operation is applied to the candidate that it names, and is skipped only when
there is none; that identities are new; that a request's state and tokens are those of its
operations; that events speak of live requests only; in an audit, that exactly the expected
requests are live, with the expected tables and steps.

Does not verify: arrival and waiting queues (the scheduler's level); when a request should end.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.books import RequestModel
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Finish,
    Fork,
    Grow,
    Operation,
    Preempt,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim


class Life(Check):
    """The life cycle of requests."""

    claims = (
        Claim(
            "A request is admitted once, runs or is preempted, and ends once.",
            "chapter, life cycle; bugs B38, B96, B142; survey section 2",
        ),
        Claim(
            "A request keeps the tokens it was given, in number, whatever happens to its blocks.",
            "bug B72; survey D32",
        ),
        Claim("Live requests are exactly those that were admitted and have not ended.", "B142"),
    )
    positive_control = "output-token-recorded-twice"
    expects_of = (Grow, Finish, Fork, Preempt, Resume, Abort, Admit, Retire)
    concludes_on = (Admit, Grow, Fork, Preempt, Resume)
    concludes_when = ("done",)

    def expect(self, operation: Operation, outcome: Outcome) -> None:
        if isinstance(operation, Admit):
            self._identity(outcome, (outcome.request,) if outcome.status == "done" else ())
            return
        if isinstance(operation, Retire):
            if (outcome.status == "skipped") != (not self.books.steps):
                self.fail(f"retire was {outcome.status} with {len(self.books.steps)} in flight")
            return
        candidates = self._candidates(operation)
        if outcome.status == "skipped":
            # What a subject is not capable of is skipped by the driver, not by the subject.
            if candidates:
                self.fail(
                    f"{type(operation).__name__.lower()} was skipped, though "
                    f"{len(candidates)} requests could take it"
                )
            return
        index = operation.request  # type: ignore[attr-defined]
        expected = candidates[index % len(candidates)].id if candidates else None
        if outcome.request != expected:
            self.fail(
                f"{type(operation).__name__.lower()} was applied to request {outcome.request}, "
                f"but it names request {expected}",
                request=outcome.request,
            )
        self._identity(outcome, outcome.children)

    def _candidates(self, operation: Operation) -> Sequence[RequestModel]:
        if isinstance(operation, Resume):
            return self.books.preempted
        if isinstance(operation, Abort):
            return sorted(self.books.requests.values(), key=lambda request: request.order)
        return self.books.running

    def _identity(self, outcome: Outcome, created: Sequence[int | None]) -> None:
        for number in created:
            if number is None or number in self.books.requests:
                self.fail(f"a new request is called {number}", request=number)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        self.checked += 1
        if self.books.strays:
            event = self.books.strays.pop()
            self.fail(f"an event speaks of a request that is not live: {event}")
        if outcome.request is not None:
            self._as_expected(self.books.requests[outcome.request])
        for child in outcome.children:
            self._as_expected(self.books.requests[child])

    def _as_expected(self, request: RequestModel) -> None:
        if self.view.length(request.id) != len(request.tags):
            self.fail(
                f"request {request.id} has {self.view.length(request.id)} tokens, but it was "
                f"given {request.length}",
                request=request.id,
            )
        expected = "running" if request.running else "preempted"
        if self.view.state(request.id) != expected:
            self.fail(
                f"request {request.id} is {self.view.state(request.id)}, not {expected}",
                request=request.id,
            )

    def audit(self) -> None:
        self.checked += 1
        live = sorted(self.view.requests())
        if live != sorted(self.books.requests):
            self.fail(f"live requests are {live}, but should be {sorted(self.books.requests)}")
            return
        steps = [step.number for step in self.books.steps]
        if list(self.view.steps_in_flight()) != steps:
            self.fail(f"steps {list(self.view.steps_in_flight())} are in flight, not {steps}")
        for request in self.books.requests.values():
            self._as_expected(request)
            self._audit_request(request)

    def _audit_request(self, request: RequestModel) -> None:
        if self.view.computed(request.id) != request.computed:
            self.fail(
                f"request {request.id} counts {self.view.computed(request.id)} tokens as "
                f"computed, but {request.computed} are",
                request=request.id,
            )
        for group in self.books.groups:
            table = self.view.table(request.id, group.group)
            own = request.tables[group.group]
            if len(table) != len(own) or list(table) != own:
                self.fail(
                    f"the table of request {request.id} is {list(table)}, but it was given "
                    f"{own}",
                    group=group.group,
                    request=request.id,
                )
                return
