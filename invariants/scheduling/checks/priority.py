"""PRIORITY: the more urgent request goes first.

Verifies: where it is promised, that no iteration admits a request while one of a smaller priority
number waits, preempted and swapped ones included; and that none is preempted while one of a larger
number keeps running.

Does not verify: the order among requests of the same priority, or of those whose KV is on its way
and of all behind them (LIVE, FCFS), or whose adapter is one too many; which running requests are
served when the budget does not suffice for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    Promises,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
)
from kvproof.invariants.verdict import Violation


class Priority(SchedulingCheck):
    """Strict priority."""

    claims = (
        Claim("No request is admitted while a more urgent one waits.", "survey Q12, Q16"),
        Claim("The least urgent running request is preempted first.", "survey K12"),
    )
    positive_control = "urgent-request-waits"

    def __init__(
        self, books: SchedulingBooks, view: SchedulerView, report: Callable[[Violation], None]
    ) -> None:
        super().__init__(books, view, report)
        self._waiting: defaultdict[int, dict[int, LiveRequest]] = defaultdict(dict)
        """By priority: the requests that are live, but not running."""
        self._priorities: list[int] = []
        """A heap of theirs, and of some that nobody has any more."""

    @classmethod
    def promised(cls, promises: Promises) -> bool:
        return promises.strict_priority

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            RequestArrived: self._arrived,
            Scheduled: self._scheduled,
            RunningReset: self._reset,
            Completed: self._ended,
            RequestCancelled: self._ended,
        }

    def _arrived(self, event: RequestArrived) -> None:
        self._wait(self.books.live[event.request])

    def _reset(self, event: RunningReset) -> None:
        for number in event.preempted:
            if number in self.books.displaced:
                self._wait(self.books.displaced[number])

    def _ended(self, event: Event) -> None:
        for request in self.books.ended:
            self._leave(request)

    def _wait(self, request: LiveRequest) -> None:
        waiting = self._waiting[request.priority]
        if not waiting:
            heappush(self._priorities, request.priority)
        waiting[request.id] = request

    def _leave(self, request: LiveRequest) -> None:
        waiting = self._waiting[request.priority]
        waiting.pop(request.id, None)
        if not waiting:
            del self._waiting[request.priority]

    def _scheduled(self, event: Scheduled) -> None:
        books = self.books
        displaced = [
            books.displaced[number]
            for number in (*event.preempted, *event.swapped)
            if number in books.displaced
        ]
        for request in displaced:
            self._wait(request)
        for request in books.entered:
            self._leave(request)
        if books.entered:
            self._admitted(event)
        if displaced:
            self._preempted(event, displaced)

    def _admitted(self, event: Scheduled) -> None:
        self.checked += 1
        last = max(self.books.entered, key=_by_priority)
        waiting = self._most_urgent()
        if waiting is not None and waiting.priority < last.priority:
            self.fail(
                f"iteration {event.iteration} admits request {last.id} of priority "
                f"{last.priority}, while request {waiting.id} of priority {waiting.priority} waits",
                request=waiting.id,
            )

    def _most_urgent(self) -> LiveRequest | None:
        """The ready request of the smallest priority number that waits."""
        while self._priorities and self._priorities[0] not in self._waiting:
            heappop(self._priorities)
        for request in self._ready(self._priorities[:1]):
            return request
        # All of that priority wait for a sample from before their preemption, or for KV: rare.
        return next(self._ready(sorted(self._waiting)), None)

    def _ready(self, priorities: list[int]) -> Iterator[LiveRequest]:
        for priority in priorities:
            for request in self._waiting[priority].values():
                if request.ready and not self._passed_over(request):
                    yield request

    def _passed_over(self, request: LiveRequest) -> bool:
        """It waits for KV, or its adapter was one too many when it was its turn."""
        books = self.books
        later = {other.id for other in books.entered if other.priority > request.priority}
        before = (other for other in books.running.values() if other.id not in later)
        return books.held_back(request) or books.lacks_adapter(request, before)

    def _preempted(self, event: Scheduled, displaced: list[LiveRequest]) -> None:
        self.checked += 1
        victim = min(displaced, key=_by_priority)
        spared = max(self.books.running.values(), key=_by_priority, default=victim)
        if spared.priority > victim.priority:
            self.fail(
                f"iteration {event.iteration} preempts request {victim.id} of priority "
                f"{victim.priority}, while request {spared.id} of priority {spared.priority} "
                "keeps running",
                request=victim.id,
            )


def _by_priority(request: LiveRequest) -> int:
    return request.priority
