"""Guaranteed no eviction: a request starts only if it and all started ones can run to their end.

Blocks up to ``prompt + max_tokens`` of every started request are set aside in the count, though
they are taken only as the request grows.  A new one is admitted, in the order of arrival, if its
own fit beside them.  So no running request ever lacks a block, and nobody is preempted.

Why the count holds from one iteration to the next: what is set aside for a request is what its
table still lacks.  A prefix hit that others hold costs nothing, and stays when they end, since
this request holds it too; one in a cached-free block is taken out of the free ones when the
request is admitted.  Ends and steps in flight only give blocks back.

Source: TensorRT-LLM documentation, *Capacity Scheduler Policy*, ``GUARANTEED_NO_EVICT``, its
default (survey K04, E15).
"""

from __future__ import annotations

from kvproof.engine.policy import Plan, Promises, SchedulerState


class GuaranteedNoEvict:
    """Admits what is sure to finish; never preempts."""

    promises = Promises(fcfs=True, no_eviction=True, no_barrier=True, work_conserving=True)

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration."""
        draft = state.draft()
        free = state.free_blocks
        for request in state.running:
            free -= state.blocks_for(request, request.final_tokens)
            draft.run(request)
        for request in state.waiting:
            needed = state.blocks_for(request, request.final_tokens)
            if needed > free or not draft.run(request):
                break
            free -= needed
        return draft.plan()
