"""Static batching: a new set of requests is taken in only when nobody is in progress.

The set is the longest run of waiting requests, by arrival, that can all run to their end side by
side; places of those that finish stay empty until the last one has.  Members start as the token
budget allows, perhaps over several iterations, so that a small budget does not make sets of one.
The baseline that continuous batching is measured against.

Sources: TensorRT-LLM documentation, *Capacity Scheduler Policy*, ``STATIC_BATCH`` (survey K05,
Q23); request-level batching as in Yu et al., *ORCA*, OSDI 2022, section 2 (survey Q01).
"""

from __future__ import annotations

from kvproof.engine.policy import Plan, Promises, SchedulerState


class StaticBatch:
    """Requests enter as a set, when the last set has ended; never preempts."""

    promises = Promises(fcfs=True, no_eviction=True)

    def __init__(self) -> None:
        self._last_member = -1

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration."""
        if not state.running:
            self._choose(state)
        draft = state.draft()
        for request in state.running:
            draft.run(request)
        for request in state.waiting:
            if request.id > self._last_member or not draft.run(request):
                break
        return draft.plan()

    def _choose(self, state: SchedulerState) -> None:
        """Close the set, so that all members have blocks to their end; nobody is running."""
        self._last_member = -1
        free = state.free_blocks - state.limits.watermark_blocks
        for place, request in enumerate(state.waiting):
            free -= state.blocks_for(request, request.final_tokens)
            if free < 0 or place >= state.max_sequences:
                break
            self._last_member = request.id
