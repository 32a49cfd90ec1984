"""FCFS: requests are admitted in the order of their arrival.

Verifies: where it is promised, that each iteration admits the waiting requests that arrived
first; and none of them while a preempted or swapped one waits.  Who is passed over because its
adapter is one too many is not overtaken.

Does not verify: the order among preempted requests; who is preempted; anything where the policy
does not promise it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.vocabulary import Promises, Scheduled


class Fcfs(SchedulingCheck):
    """First come, first served."""

    claims = (
        Claim(
            "Of the waiting requests, the one that arrived first is admitted first.", "survey Q12"
        ),
        Claim("Nobody is admitted past a preempted or swapped request.", "bug B138; survey Q16"),
    )
    positive_control = "shortest-prompt-overtakes"

    @classmethod
    def promised(cls, promises: Promises) -> bool:
        return promises.fcfs

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {Scheduled: self._scheduled}

    def _scheduled(self, event: Scheduled) -> None:
        admitted = event.admitted
        if not admitted:
            return
        self.checked += 1
        books, latest = self.books, max(admitted)
        for request in books.waiting.values():
            if request.id > latest:
                break
            if not books.lacks_adapter(request, self._before(request.id, admitted)):
                self._overtaken(event, request.id, latest, "still waits after")
                return
        for request in books.displaced.values():
            if request.ready and not books.lacks_adapter(request, self._before(-1, admitted)):
                self._overtaken(event, request.id, latest, f"is {request.state}, beside")
                return

    def _before(self, number: int, admitted: Sequence[int]) -> Iterator[LiveRequest]:
        """Of the running requests, those that were there when it was that one's turn."""
        later = {other for other in admitted if other > number}
        return (request for request in self.books.running.values() if request.id not in later)

    def _overtaken(self, event: Scheduled, number: int, other: int, how: str) -> None:
        self.fail(
            f"request {number} {how} request {other}, which iteration {event.iteration} admitted: "
            "first come, first served is promised",
            request=number,
        )
