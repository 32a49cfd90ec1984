"""LIFE: requests live as operations say: admitted, running, preempted, ended, once each.

Verifies: that an operation is applied to the candidate that it names, and is skipped only when
there is none; that identities are new; that a request's state and tokens are those of its
operations; that events speak of requests and steps that there are, and of the next rows of
tables; in an audit, that exactly the expected
requests are live, with the expected tables and steps.

Does not verify: arrival and waiting queues (the scheduler's level); when a request should end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from kvproof.invariants.events import (
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Finish,
    Fork,
    Grow,
    Operation,
    Preempt,
    Reserve,
    Resume,
    Retire,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim, EventHandler, OperationHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.view import Standing


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

    def expecting(self, kind: type[Operation]) -> OperationHandler | None:
        return self._handlers.get(kind)

    @cached_property
    def _handlers(self) -> Mapping[type[Operation], OperationHandler]:
        return {
            Admit: self._admitted,
            Retire: self._retired,
            Resume: self._resumed,
            Abort: self._aborted,
            Grow: self._of_running,
            Decode: self._decoded,
            Reserve: self._of_running,
            Finish: self._of_running,
            Fork: self._forked,
            Preempt: self._of_running,
        }

    def _admitted(self, operation: Admit, outcome: Outcome) -> None:
        number = outcome.request
        if outcome.status == "done" and (number is None or number in self.books.identities):
            self._taken(number)

    def _retired(self, operation: Retire, outcome: Outcome) -> None:
        if (outcome.status == "skipped") != (not self.books.steps):
            self.fail(f"retire was {outcome.status} with {len(self.books.steps)} in flight")

    def _of_running(self, operation: Operation, outcome: Outcome) -> None:
        running = self.books.running
        index = operation.request  # type: ignore[attr-defined]
        # The usual case first, in few steps: this is done for every other operation.
        if (
            not running
            or outcome.request != running[index % len(running)].id
            or outcome.status == "skipped"
            or outcome.children
        ):
            self._target(operation, running, outcome)

    def _decoded(self, operation: Decode, outcome: Outcome) -> None:
        running = self.books.running
        count = len(running)
        indices = dict.fromkeys([index % count for index in operation.requests]) if count else ()
        named = [running[index].id for index in indices]
        expected = named if outcome.status == "done" else []
        if list(outcome.children) != expected or (outcome.status == "skipped") != (not running):
            self.fail(
                f"decode was {outcome.status} for requests {list(outcome.children)}, but of "
                f"{count} candidates it names {named}"
            )

    def _forked(self, operation: Fork, outcome: Outcome) -> None:
        self._of_running(operation, outcome)
        if outcome.status == "done" and len(outcome.children) != operation.samples:
            self.fail(
                f"a fork into {operation.samples} made {len(outcome.children)} children",
                request=outcome.request,
            )

    def _resumed(self, operation: Resume, outcome: Outcome) -> None:
        self._target(operation, self.books.preempted, outcome)

    def _aborted(self, operation: Abort, outcome: Outcome) -> None:
        self._target(operation, list(self.books.requests.values()), outcome)

    def _target(
        self, operation: Operation, candidates: Sequence[RequestModel], outcome: Outcome
    ) -> None:
        index = operation.request  # type: ignore[attr-defined]
        expected = candidates[index % len(candidates)].id if candidates else None
        if outcome.request != expected or (outcome.status == "skipped") != (not candidates):
            name = type(operation).__name__.lower()
            self.fail(
                f"{name} was {outcome.status} for request {outcome.request}, but of "
                f"{len(candidates)} candidates it names request {expected}",
                request=outcome.request,
            )
        for child in outcome.children:
            if child in self.books.identities:
                self._taken(child)

    def _taken(self, number: int | None) -> None:
        self.fail(
            f"a new request is called {number}, which is no name or was another's", request=number
        )

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            RequestAdmitted: self._told_admission,
            RequestResumed: self._told,
            RequestGrown: self._told,
            RequestsDecoded: self._told_decoding,
            RequestPreempted: self._told,
            RequestFinished: self._told,
            RequestAborted: self._told,
        }

    def _told(self, event: RequestGrown) -> None:
        if event.request not in self.books.known:
            self.books.strays.append(event)

    def _told_decoding(self, event: RequestsDecoded) -> None:
        if not self.books.known.keys() >= set(event.requests):
            self.books.strays.append(event)

    def _told_admission(self, event: RequestAdmitted) -> None:
        request = self.books.known.get(event.request)
        if request is None or (event.input_tokens, event.cached_tokens) != (
            request.input_tokens,
            request.cached_tokens,
        ):
            self.books.strays.append(event)

    def settle(self) -> None:
        if self.books.strays:
            event = self.books.strays.pop()
            self.fail(f"an event does not fit what happened before: {event}")

    def judge_standing(self, request: RequestModel, actual: Standing, expected: Standing) -> None:
        if actual[0] != expected[0]:
            self.fail(f"request {request.id} is {actual[0]}, not {expected[0]}", request=request.id)
        if actual[1] != expected[1]:
            self.fail(
                f"request {request.id} has {actual[1]} tokens, but it was given {expected[1]}",
                request=request.id,
            )

    def audit(self) -> None:
        live = self.view.requests()
        if set(live) != self.books.requests.keys() or len(live) != len(self.books.requests):
            self.fail(
                f"live requests are {sorted(live)}, but should be {sorted(self.books.requests)}"
            )
            return
        steps = [step.number for step in self.books.steps]
        if list(self.view.steps_in_flight()) != steps:
            self.fail(f"steps {list(self.view.steps_in_flight())} are in flight, not {steps}")
        look_up = self.view.table
        for request in self.books.requests.values():
            for group, own in enumerate(request.tables):
                table = look_up(request.id, group)
                if table != own and list(table) != own:
                    self._wrong_table(request, group, table)
                    return

    def _wrong_table(self, request: RequestModel, group: int, table: Sequence[int]) -> None:
        self.fail(
            f"the table of request {request.id} is {list(table)}, but it was given "
            f"{request.tables[group]}",
            group=group,
            request=request.id,
        )
