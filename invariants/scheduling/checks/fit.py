"""FIT: what a policy is told of a request's blocks is what its admission takes.

Verifies: each answer to a policy that counts blocks, against a prediction from the cache's books:
new blocks beside the longest prefix hit, the free ones among the hit's blocks, the cached tokens;
what was swapped out comes back into as many blocks.

Does not verify: the admission itself (the cache's CAP predicts each of its operations); whether
the policy heeds the answer (BUDGET, and a plan that does not fit is rejected).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.hits import Hits
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import BlocksCounted
from kvproof.invariants.tags import Tags
from kvproof.invariants.verdict import Violation


class Fit(SchedulingCheck):
    """Admission agrees with allocation."""

    claims = (
        Claim(
            "A request fits exactly when its new blocks, and the free ones among its hits, are "
            "free.",
            "chapter, life cycle: request admitted → blocks allocated; bugs B139, B145; "
            "survey E05, K07",
        ),
        Claim(
            "The tokens that need not be computed are the longest findable prefix below the last "
            "token.",
            "bugs B153, B166; survey R05, R06",
        ),
    )
    positive_control = "cached-free-hits-count-as-free"

    def __init__(
        self, books: SchedulingBooks, view: SchedulerView, report: Callable[[Violation], None]
    ) -> None:
        super().__init__(books, view, report)
        self._hits = Hits(books.cache)

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {BlocksCounted: self._counted}

    def _counted(self, event: BlocksCounted) -> None:
        request = self.books.live.get(event.request)
        if request is None:
            self.fail(f"blocks were counted for request {event.request}, which is not live")
            return
        prediction = self._predict(request, event.tokens)
        if prediction is None:
            return
        self.checked += 1
        blocks, cached = prediction
        if event.blocks != blocks:
            self.fail(
                f"{event.tokens} tokens of request {request.id}, {request.state}, are said to take "
                f"{event.blocks} free blocks, but they take {blocks}",
                request=request.id,
            )
        elif event.cached_tokens != cached:
            self.fail(
                f"{event.cached_tokens} tokens of request {request.id}, {request.state}, are said "
                f"to be cached, but it is {cached}",
                request=request.id,
            )

    def _predict(self, request: LiveRequest, tokens: int) -> tuple[int, int] | None:
        """Free blocks that it takes, and cached tokens; None if the prompt is not known."""
        books = self.books
        rows = books.rows(tokens)
        if request.state == "running":
            return max(0, rows - books.held_blocks(request)), 0
        if request.state == "swapped":
            return max(rows, books.rows(request.computed)), request.computed
        tags = self._tags(request)
        if tags is None:
            return None
        hit = self._hits.of(request.id, tags)
        cached = hit.rows * books.block_size
        return max(0, rows - books.rows(cached)) + hit.revived, cached

    def _tags(self, request: LiveRequest) -> Tags[int] | None:
        if request.cache_request is None:
            return request.prompt()
        model = self.books.cache.requests.get(request.cache_request)
        return None if model is None else model.tags
