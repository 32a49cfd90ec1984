"""First come, first served, without a call per request: the block arithmetic is simple enough.

A request needs as many blocks as its new tokens cross edges between blocks.
"""

from kvproof.engine.policy import Plan, SchedulerState


class OwnArithmetic:
    """Decodes all; admits one at a time; preempts the latest for want of blocks."""

    def plan(self, state: SchedulerState) -> Plan:
        size, free, budget = state.block_size, state.free_blocks, state.limits.token_budget
        keep, run, preempt = list(state.running), [], []
        for request in state.running:
            done, count = request.computed_tokens, min(request.pending_tokens, budget)
            if not count or request not in keep:
                continue
            # Wrong: the fifth token goes to block 1, and 4 // 4 is 1 as well, so it seems to need
            # none.  Right: (done + count - 1) // size - (done - 1) // size.
            needed = (done + count - 1) // size - done // size
            while needed > free and keep[-1] is not request:
                preempt.append(keep.pop())
                free += state.blocks_freed(preempt[-1])
            if needed <= free:
                run.append((request.id, count))
                free, budget = free - needed, budget - count
        outside = [*state.preempted, *state.waiting][:1]
        if outside and not preempt and len(keep) < state.max_sequences:
            count = outside[0].pending_tokens - state.cached_tokens(outside[0])
            if state.limits.chunked_prefill:
                count = min(count, budget)
            blocks = state.blocks_for(outside[0], outside[0].pending_tokens)
            if 0 < count <= budget and blocks <= free - state.limits.watermark_blocks:
                run.append((outside[0].id, count))
        return Plan(tuple(run), tuple(request.id for request in preempt))
