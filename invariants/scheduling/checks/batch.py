"""BATCH: requests come and go one by one, and nobody waits for a batch.

Verifies: where no barrier is promised, that each running, ready request is run in every iteration
in which budget is left and a block for it, if it needs one, is free; where work conservation is
promised, that some request is admitted whenever budget, sequences and blocks are left for all
that wait, to their ends.

Does not verify: policies that promise neither (a static batch is a barrier by intent); work
conservation while more than eight requests wait, or blocks are fenced; requests whose KV is on its
way, and those behind them (LIVE); those whose adapter is one too many; which of the waiting
requests enters (FCFS, PRIORITY).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.vocabulary import Promises, Scheduled

WAITING_AT_MOST = 8
"""More waiting requests than that are not summed up: an iteration's cost must not follow them."""


class Batch(SchedulingCheck):
    """Continuous batching."""

    claims = (
        Claim(
            "When a short request finishes, its slot and its blocks can be used in the next "
            "iteration.",
            "chapter, continuous batching: capacity becomes reusable; survey E09, Q05",
        ),
        Claim(
            "A waiting request enters then, if there is room for it.",
            "chapter, continuous batching: waiting request may enter; bug B136; survey E10",
        ),
        Claim(
            "A long request goes on meanwhile, in each iteration.",
            "chapter, continuous batching: long request continues; bug B144; survey E11, Q06",
        ),
    )
    positive_control = "batch-leaves-together"

    @classmethod
    def promised(cls, promises: Promises) -> bool:
        return promises.no_barrier or promises.work_conserving

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {Scheduled: self._scheduled}

    def _scheduled(self, event: Scheduled) -> None:
        left = self.limits.token_budget - sum([part.tokens for part in event.parts])
        if self.promises.no_barrier and left > 0:
            self._no_barrier(event, left)
        if self.promises.work_conserving and not (event.preempted or event.swapped):
            self._work_conserving(event, left)

    # -- running requests --------------------------------------------------------------------------

    def _no_barrier(self, event: Scheduled, left: int) -> None:
        """Budget is left, so that nearly all running requests were run: looking at all is cheap."""
        books, now = self.books, self.books.iterations
        self.checked += 1
        for request in books.running.values():
            if request.last_run == now or request.pending < 1:
                continue
            if books.least_tokens(request) > left:
                continue
            # After an admission the watermark's blocks may not be taken, by anybody.
            floor = self.limits.watermark_blocks if books.entered else 0
            free, needed = books.free_blocks() - floor, books.growth(request)
            if needed <= max(0, free):
                self._waits(event, request, left, needed, free)
                return

    def _waits(
        self, event: Scheduled, request: LiveRequest, left: int, needed: int, free: int
    ) -> None:
        others = [part.request for part in event.parts][:8]
        beside = f"beside requests {others}" if others else "though nothing else ran"
        self.fail(
            f"request {request.id} waits at a barrier: it has {request.pending} pending tokens, "
            f"{left} of the budget of iteration {event.iteration} are left, and it needs {needed} "
            f"of {free} free blocks, but it was not run {beside}",
            request=request.id,
        )

    # -- waiting requests --------------------------------------------------------------------------

    def _work_conserving(self, event: Scheduled, left: int) -> None:
        books = self.books
        count = len(books.waiting) + len(books.displaced)
        if books.entered or not 0 < count <= WAITING_AT_MOST or books.fenced():
            return
        waiting = [*books.displaced.values(), *books.waiting.values()]
        if books.deferred or books.cache.semantics.adapters:
            running = books.running.values()
            waiting = [
                request
                for request in waiting
                if not books.held_back(request) and not books.lacks_adapter(request, running)
            ]
            count = len(waiting)
        if not waiting or not all(request.ready for request in waiting):
            return
        self.checked += 1
        chunked = self.limits.chunked_prefill
        tokens = count if chunked else sum([request.known for request in waiting])
        sequences = self.configuration.requests - len(books.running)
        if tokens > left or count > sequences:
            return
        demand = self._demand(waiting)
        free = books.free_blocks() - self.limits.watermark_blocks
        if demand <= free:
            self.fail(
                f"requests {[request.id for request in waiting]} wait, but iteration "
                f"{event.iteration} admits none of them: {left} tokens of its budget, {sequences} "
                f"sequences and {free} blocks are left, and {demand} would serve all to their ends",
                request=waiting[0].id,
            )

    def _demand(self, waiting: list[LiveRequest]) -> int:
        """Blocks that all live requests may still take, up to their longest outputs."""
        books, total = self.books, 0
        for request in waiting:
            total += books.rows(request.final_tokens)
        for request in books.running.values():
            total += max(0, books.rows(request.final_tokens) - books.held_blocks(request))
        return total
