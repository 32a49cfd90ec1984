"""Strict priority: the smaller number first, ties by arrival; the least urgent is preempted.

Running requests are served by urgency, and for want of blocks the one of the largest (priority,
arrival) is preempted, to be recomputed.  Those that wait, preempted or new, are admitted by
urgency up to the first that does not fit; none in an iteration that preempted.  Nobody is
preempted to admit another one.  Long waits of the less urgent are the point, so no bound on them
is promised.

Source: vLLM's scheduling policy ``priority`` (survey K12, Q12).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter

from kvproof.engine.policy import Draft, Plan, Promises, RequestState, SchedulerState

_id = attrgetter("id")
_urgency = attrgetter("priority", "id")


class StrictPriority:
    """Urgency order; the least urgent running request is preempted, to be recomputed."""

    promises = Promises(strict_priority=True, no_barrier=True, work_conserving=True)

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """(priority, id) of all that wait and were never admitted, and of some that have left."""
        self._latest_shown = -1

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration."""
        self._note_arrivals(state.waiting)
        draft = state.draft()
        order = sorted(state.running, key=_urgency)
        for request in order:
            draft.run_preempting(request, order=order)
        if not draft.preempts:
            self._admit(draft)
        return draft.plan()

    def _note_arrivals(self, waiting: Sequence[RequestState]) -> None:
        # Newcomers stand at the end; all the others are known, and may be very many.  Some that
        # were not shown for a while, since KV was on its way, come as newcomers again.
        for request in reversed(waiting):
            if request.id <= self._latest_shown:
                break
            heappush(self._heap, (request.priority, request.id))
        self._latest_shown = waiting[-1].id if waiting else -1

    def _admit(self, draft: Draft) -> None:
        preempted = sorted(draft.state.preempted, key=_urgency, reverse=True)
        admitted = []
        while True:
            new = self._most_urgent(draft.state.waiting)
            candidates = [*preempted[-1:], *([new] if new is not None else [])]
            request = min(candidates, key=_urgency, default=None)
            if request is None or not draft.run(request):
                break
            if request is new:
                admitted.append(self._take())
            else:
                preempted.pop()
        # Not gone yet: this is only a plan.
        for entry in admitted:
            heappush(self._heap, entry)

    def _take(self) -> tuple[int, int]:
        """The top of the heap, where it may stand more than once."""
        top = heappop(self._heap)
        while self._heap and self._heap[0] == top:
            heappop(self._heap)
        return top

    def _most_urgent(self, waiting: Sequence[RequestState]) -> RequestState | None:
        """The top of the heap, less those that were admitted or aborted meanwhile."""
        while self._heap:
            _, number = self._heap[0]
            place = bisect_left(waiting, number, key=_id)
            if place < len(waiting) and waiting[place].id == number:
                return waiting[place]
            heappop(self._heap)
        return None
