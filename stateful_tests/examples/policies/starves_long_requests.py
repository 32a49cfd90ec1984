"""Low latency for short prompts, which are most of the traffic; nobody waits for ever, I believe.

The shortest is always admitted first, and one that does not fit is skipped, so that no block is
left idle.
"""

from kvproof.engine.policy import Plan, Promises, SchedulerState


class ShortestAlwaysFirst:
    """Shortest prompt first, over all that wait."""

    promises = Promises(starvation_bound=10)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request)
        if draft.preempts:
            return draft.plan()
        outside = [*state.preempted, *state.waiting]
        # Wrong: blocks never add up to a long request, short newcomers take them first.
        for request in sorted(outside, key=lambda request: request.prompt_tokens):
            draft.run(request)
        return draft.plan()
