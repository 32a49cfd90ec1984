"""NOEVICT: a request that has started is never preempted.

Verifies: where it is promised, that no iteration preempts or swaps out anybody.

Does not verify: that what is admitted fits to its end (the promise cannot be kept otherwise, and
LIVE sees what comes of it); evictions of cached blocks that nobody holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.vocabulary import Promises, Scheduled


class Noevict(SchedulingCheck):
    """No eviction of started requests."""

    claims = (
        Claim(
            "Where started requests are guaranteed their blocks, none is ever paused for want of "
            "them.",
            "survey K04, E15",
        ),
    )
    positive_control = "started-request-is-evicted"

    @classmethod
    def promised(cls, promises: Promises) -> bool:
        return promises.no_eviction

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {Scheduled: self._scheduled}

    def _scheduled(self, event: Scheduled) -> None:
        self.checked += 1
        for number in (*event.preempted, *event.swapped):
            self.fail(
                f"iteration {event.iteration} preempts request {number}, which had started: "
                "the policy promises that none is evicted",
                request=number,
            )
