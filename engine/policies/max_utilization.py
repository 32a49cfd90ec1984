"""Maximal utilization: only the blocks of the next iteration count, so the pool is kept full.

A request is admitted, in the order of arrival, as soon as blocks for what it computes next are
free; none are kept for later, not even for the rest of its prompt.  If a running one does not
fit, the most recently started is paused (preempted, to be recomputed) and it is tried again;
those behind a paused one stay outside in that iteration.

Source: TensorRT-LLM documentation, *Capacity Scheduler Policy*, ``MAX_UTILIZATION`` (survey K03).
"""

from __future__ import annotations

from itertools import chain

from kvproof.engine.policy import Plan, Promises, SchedulerState


class MaxUtilization:
    """Admits by the next iteration's blocks; pauses the most recently started."""

    promises = Promises(fcfs=True, no_barrier=True, work_conserving=True)

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration."""
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts:
            for request in chain(state.preempted, state.waiting):
                if not draft.run(request):
                    break
        return draft.plan()
