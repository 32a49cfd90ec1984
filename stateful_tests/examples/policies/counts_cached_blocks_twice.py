"""First come, first served, with all blocks reserved at admission; cached blocks are used too.

The author saw the pool refuse requests while many blocks held only old prefixes.
"""

from kvproof.engine.policy import Plan, SchedulerState


class UsesTheWholePool:
    """Reserves prompt and output at admission, in free and in evictable blocks."""

    def plan(self, state: SchedulerState) -> Plan:
        budget = state.limits.token_budget
        # Wrong: the cached-free blocks are among the free ones already.
        free = state.free_blocks + state.cached_free_blocks - state.limits.watermark_blocks
        places = state.max_sequences - len(state.running)
        run: list[tuple[int, int]] = []
        reserve: list[tuple[int, int]] = []
        for request in state.running:
            count = min(request.pending_tokens, budget)
            if count:
                run.append((request.id, count))
                budget -= count
        for request in state.waiting:
            pending = request.pending_tokens - state.cached_tokens(request)
            count = min(pending, budget)
            free -= state.blocks_for(request, request.final_tokens)
            whole = count == pending or state.limits.chunked_prefill
            if not count or not whole or free < 0 or len(reserve) == places:
                break
            run.append((request.id, count))
            reserve.append((request.id, request.final_tokens))
            budget -= count
        return Plan(tuple(run), reserve=tuple(reserve))
