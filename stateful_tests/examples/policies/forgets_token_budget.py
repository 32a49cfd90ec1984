"""Prompts in chunks, so that a long one does not hold up those that decode.

A decode is one token, so the budget is given to the prompts.
"""

from kvproof.engine.policy import Plan, RequestState, SchedulerState


class ChunksPrompts:
    """Reserves all blocks at admission; shares the budget among prompts, by arrival."""

    def plan(self, state: SchedulerState) -> Plan:
        free = state.free_blocks - state.limits.watermark_blocks
        places = state.max_sequences - len(state.running)
        # Wrong: the tokens of those that decode count as well.
        run = [(request.id, 1) for request in state.running if request.pending_tokens == 1]
        prefilling = [request for request in state.running if request.pending_tokens > 1]
        admitted: list[RequestState] = []
        for request in state.waiting:
            free -= state.blocks_for(request, request.final_tokens)
            if free < 0 or len(admitted) == places:
                break
            admitted.append(request)
        budget = state.limits.token_budget
        for request in [*prefilling, *admitted]:
            cached = state.cached_tokens(request) if request in admitted else 0
            pending = request.pending_tokens - cached
            count = min(pending, budget)
            if not count or not (count == pending or state.limits.chunked_prefill):
                break
            run.append((request.id, count))
            budget -= count
        started = {number for number, _ in run}
        reserve = [(r.id, r.final_tokens) for r in admitted if r.id in started]
        return Plan(tuple(run), reserve=tuple(reserve))
