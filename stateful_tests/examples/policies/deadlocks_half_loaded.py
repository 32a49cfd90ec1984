"""No work is thrown away: a request that started keeps its blocks, and nobody is preempted.

Each is admitted as soon as its first chunk fits, and takes blocks as it goes.
"""

from kvproof.engine.policy import Plan, SchedulerState


class NeverPreempts:
    """First come, first served; who lacks a block waits until another one ends."""

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run(request)
        # Wrong: two may hold half of what they need each, and wait for each other for ever.
        for request in state.waiting:
            if not draft.run(request):
                break
        return draft.plan()
