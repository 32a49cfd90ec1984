"""ORCA: iteration-level scheduling, with room for the longest possible output from the start.

Requests are picked by arrival in every iteration.  On its first one a request reserves slots for
all of its tokens and keeps them until it ends, so that growth is paid for in advance, nobody is
preempted and no deadlock can occur.  The first new request whose reservation does not fit holds up
those behind it: one that came earlier has run in at least as many iterations as a later one.

Source: Yu et al., *ORCA: A Distributed Serving System for Transformer-Based Generative Models*,
OSDI 2022, section 4 and algorithm 1 (survey C09, Q14, 2.5).  Its engine has no paged cache and no
token budget; here slots are reserved in whole blocks, and the budget binds it as all others.
"""

from __future__ import annotations

from kvproof.engine.policy import Plan, Promises, SchedulerState


class Orca:
    """Arrival order; reserves for prompt and ``max_tokens`` at admission; never preempts."""

    promises = Promises(
        fcfs=True, no_eviction=True, no_barrier=True, work_conserving=True, starvation_bound=0
    )

    def plan(self, state: SchedulerState) -> Plan:
        """Decide one iteration."""
        draft = state.draft()
        # Those that run arrived before all that wait: this is arrival order throughout.
        for request in state.running:
            draft.run(request)
        for request in state.waiting:
            if not draft.run(request, reserve=request.final_tokens):
                break
        return draft.plan()
