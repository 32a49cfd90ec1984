"""FIT: what a policy is told of a request's blocks is what its admission takes.

Verifies: each answer to a policy that counts blocks, against a prediction from the cache's books:
new blocks beside the longest prefix hit, the free ones among the hit's blocks, the cached tokens;
what was swapped out comes back into as many blocks.

Does not verify: the admission itself (the cache's CAP predicts each of its operations); whether
the policy heeds the answer (BUDGET, and a plan that does not fit is rejected).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.books import GroupBooks
from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import LiveRequest
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.vocabulary import BlocksCounted
from kvproof.invariants.tags import Tags


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
        hits = self._longest_hit(tags)
        revived = max([self._revived(group, tags, hits) for group in books.cache.groups])
        return max(0, rows - hits) + revived, hits * books.block_size

    def _tags(self, request: LiveRequest) -> Tags[int] | None:
        if request.cache_request is None:
            return request.prompt()
        model = self.books.cache.requests.get(request.cache_request)
        return None if model is None else model.tags

    def _longest_hit(self, tags: Tags[int]) -> int:
        """Rows of the longest prefix that is findable in every group, below the last token."""
        size = self.books.block_size
        rows = (len(tags) - 1) // size if self.configuration.prefix_caching else 0
        for group in self.books.cache.groups:
            known, limit, rows = group.key_of_tag, rows, 0
            while rows < limit and tags[rows * size + size - 1] in known:
                rows += 1
        return rows

    def _revived(self, group: GroupBooks, tags: Tags[int], hits: int) -> int:
        """Blocks of the hit that nobody holds: they are taken out of the free ones."""
        size, refs = self.books.block_size, group.refs
        blocks_of, key_of_tag = group.blocks_of, group.key_of_tag
        # Of several equal blocks the one that was indexed first is reused.
        return sum(
            [
                refs[blocks_of[key_of_tag[tag]][0]] == 0
                for tag in tags[size - 1 : hits * size : size]
            ]
        )
