"""Contiguous reservation: every request is given the longest context of the model up front.

What caches did before paging.  A pool serves ``floor(pool / reservation)`` requests at a time,
however short they are: three of 1.2k, 7.6k and 2.0k tokens that reserve 8k each use 45 % of 24k
slots.  A context longer than the pool reserves all of it, so that one request runs at a time.
A prefix hit makes no room for another request: contiguous memory cannot share.

Sources: Kwon et al., *Efficient Memory Management for Large Language Model Serving with
PagedAttention*, SOSP 2023, section 3 (survey C01, C03, C04, C05, C10).
"""

from __future__ import annotations

from kvproof.engine.policy import Plan, Promises, SchedulerState


class ContiguousReservation:
    """Arrival order; reserves the model's longest context at admission; never preempts."""

    # Not work conserving: blocks are left where no whole reservation is.
    promises = Promises(fcfs=True, no_eviction=True, no_barrier=True)

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration."""
        draft = state.draft()
        for request in state.running:
            draft.run(request)
        usable = state.total_blocks - state.limits.watermark_blocks
        tokens = min(state.limits.max_model_tokens, usable * state.block_size)
        if tokens < 1:
            return draft.plan()
        places = usable // -(-tokens // state.block_size) - len(state.running)
        for request in state.waiting:
            if places < 1 or not draft.run(request, reserve=tokens):
                break
            places -= 1
        return draft.plan()
