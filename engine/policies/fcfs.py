"""First come, first served: the running ones first, then admissions in the order of arrival.

For want of blocks the latest admitted request is preempted, in the end the one that asks; what it
computed is recomputed later.  Preempted requests come back before new ones are admitted, nobody is
admitted in an iteration that preempted, and the first that does not fit holds up those behind it.
A request is admitted only if blocks for all of its tokens are free, though not reserved for it:
else it would be preempted in the middle of its prefill.

Sources: vLLM's default scheduler (survey K07, K08, K12, K14, K15, Q13, Q15, Q16); Kwon et al.,
*Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023,
section 4.5.
"""

from __future__ import annotations

from itertools import chain

from kvproof.engine.policy import Draft, Plan, Promises, RequestState, SchedulerState


class FirstComeFirstServed:
    """Arrival order; the latest admitted is preempted, to be recomputed."""

    promises = Promises(fcfs=True, no_barrier=True, work_conserving=True)
    swaps = False
    """Whether victims are swapped out if they can be."""

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration."""
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request, swap=self.swaps)
        if not draft.preempts:
            for request in chain(state.preempted, state.waiting):
                if not (_fits_whole(draft, request) and draft.run(request)):
                    break
        return draft.plan()


def _fits_whole(draft: Draft, request: RequestState) -> bool:
    tokens = request.computed_tokens + request.pending_tokens
    return draft.state.blocks_for(request, tokens) <= draft.free_blocks
