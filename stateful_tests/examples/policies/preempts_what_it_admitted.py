"""Round robin: everybody gets a turn, so nobody waits long for a first token.

If the request that has waited longest does not fit, running ones make room for it.
"""

from kvproof.engine.policy import Plan, SchedulerState


class RoundRobin:
    """Whoever waits takes the place of the latest admitted."""

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in [*state.preempted, *state.waiting][:1]:
            # Wrong: the latest may be the one that was let in one iteration ago.  Two that do not
            # fit together throw each other out before either has computed its prompt.
            while state.blocks_for(request, request.pending_tokens) > draft.free_blocks:
                if not draft.preempt_latest():
                    break
            draft.run(request)
        for request in state.running:
            draft.run_preempting(request)
        return draft.plan()
