"""ORDER: blocks are evicted in the stated order, and only when needed.

Verifies: where the subject promises it, that the evicted block is the one whose last reference
went the longest time ago; that nothing is evicted while an empty-free block is left; that a
request gives back its last block first; in an audit, that the free blocks stand in that order.

Does not verify: that every cached extension has its prefix cached too (least recently used
evicts duplicates' children out of that order, see survey R14); orders of other policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from kvproof.invariants.books import GroupBooks
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksReleased,
    Event,
)
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.subject import Semantics


class Order(Check):
    """Eviction follows the stated policy."""

    claims = (
        Claim(
            "The victim is the cached-free block whose last reference went longest ago; a hit "
            "makes a block recent.",
            "bugs B56, B59, B64; survey R12, R13",
        ),
        Claim(
            "Cached content is evicted only when no empty-free block is left.",
            "survey P08, R12",
        ),
        Claim(
            "A request gives back its tail before its head, so prefixes outlive extensions.",
            "bugs B56, B57; survey P09",
        ),
    )
    positive_control = "evicts-the-hottest"
    counts_itself = True

    @classmethod
    def promised(cls, semantics: Semantics) -> bool:
        return semantics.eviction_order == "lru" or semantics.release_order == "tail_first"

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {}
        if self.semantics.eviction_order == "lru":
            handlers[BlocksEvicted] = self._evicted
            handlers[BlocksAllocated] = self._allocated
            handlers[BlockCopied] = self._copied
        if self.semantics.release_order == "tail_first":
            handlers[BlocksReleased] = self._released
        return handlers

    def _evicted(self, event: BlocksEvicted) -> None:
        cached_free, blocks = self.groups[event.group].cached_free, event.blocks
        self.checked += 1
        oldest = list(islice(cached_free, len(blocks)))
        if oldest == list(blocks):
            return
        for block, expected in zip(blocks, oldest, strict=False):
            if block != expected and block in cached_free:  # else PIN, VALID
                self.fail(
                    f"block {block} was evicted ({event.cause}), but block {expected} was "
                    "released before it and never used since",
                    group=event.group,
                    block=block,
                )
                return

    def _allocated(self, event: BlocksAllocated) -> None:
        if self.groups[event.group].evicting:
            self._needed(self.groups[event.group], len(event.blocks), event.request)

    def _copied(self, event: BlockCopied) -> None:
        if self.groups[event.group].evicting:
            self._needed(self.groups[event.group], 1, event.request)

    def _needed(self, group: GroupBooks, blocks: int, request: int) -> None:
        evicted = len(group.evicting)
        empty = group.empty_free - evicted
        if evicted > max(0, blocks - empty):
            self.fail(
                f"{evicted} blocks were evicted for the {blocks} that request {request} needs, "
                f"though {empty} free blocks were empty",
                group=group.group,
                block=group.evicting[-1],
                request=request,
            )
        self.checked += 1

    def _released(self, event: BlocksReleased) -> None:
        request = self.books.known.get(event.request)
        if event.step is not None or request is None:
            return
        table, blocks = request.tables[event.group], event.blocks
        self.checked += 1
        if table[::-1] != list(blocks) and sorted(blocks) == sorted(table):
            self.fail(
                f"request {event.request} gave back its blocks as {list(blocks)}, not from the "
                f"tail of its table {table}",
                group=event.group,
                block=blocks[0],
                request=event.request,
            )

    def audit(self) -> None:
        if self.semantics.eviction_order != "lru":
            return
        for group in self.books.groups:
            expected = list(group.cached_free)
            actual = list(self.view.free_blocks(group.group)[group.empty_free :])
            if actual != expected:
                first = next(
                    (a for a, e in zip(actual, expected, strict=False) if a != e),
                    (actual or expected)[-1],
                )
                self.fail(
                    f"the next victims are blocks {actual[:8]}, but by the time of their release "
                    f"they should be {expected[:8]}",
                    group=group.group,
                    block=first,
                )
