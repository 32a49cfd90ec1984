"""Waiting requests with short prompts go first; preempted ones come back before them."""

from kvproof.engine.policy import Plan, SchedulerState


class ShortestFirst:
    """For want of blocks, the latest admitted request is preempted."""

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts:
            waiting = sorted(state.waiting, key=lambda request: request.prompt_tokens)
            for request in [*state.preempted, *waiting]:
                if not draft.run(request):
                    break
        return draft.plan()
