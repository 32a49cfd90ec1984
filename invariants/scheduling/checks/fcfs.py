"""FCFS: requests are admitted in the order of their arrival.

Verifies: where it is promised, that each iteration admits the waiting requests that arrived
first; and none of them while a preempted or swapped one waits.

Does not verify: the order among preempted requests; who is preempted; anything where the policy
does not promise it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.property import SchedulingCheck
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
        latest = max(admitted)
        first = next(iter(self.books.waiting), None)
        if first is not None and first < latest:
            self._overtaken(event, first, latest, "still waits after")
            return
        for request in self.books.displaced.values():
            if request.ready:
                self._overtaken(event, request.id, latest, f"is {request.state}, beside")
                return

    def _overtaken(self, event: Scheduled, number: int, other: int, how: str) -> None:
        self.fail(
            f"request {number} {how} request {other}, which iteration {event.iteration} admitted: "
            "first come, first served is promised",
            request=number,
        )
