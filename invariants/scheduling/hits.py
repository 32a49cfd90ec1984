"""Prefix hits, remembered for as long as nothing changes them.

A policy may ask about the same long prompt at every iteration, and what it would hit changes
rarely; looking up a thousand blocks each time would cost more than all other checks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

from kvproof.invariants.books import Books
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.tags import Tags

_REMEMBERED = 64
_first = itemgetter(0)


class Hit(NamedTuple):
    """What a request with these tokens would find."""

    rows: int
    revived: int
    """Blocks among them that nobody holds; of several groups, the most, or those of all that share
    a pool."""
    blocks: tuple[set[int], ...]
    """In each group."""
    length: int
    """Tokens that were looked up."""
    next_tag: int | None
    """Of the first row that is not in the hit; None if all that may be hit are."""


class Hits:
    """The latest look-ups, by request."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._groups = books.groups
        self._size = books.block_size
        self._together = sum if books.semantics.shared_pool else max
        self._caches = books.configuration.prefix_caching
        self._windowed = any(books.semantics.windows)
        self._known: dict[int, Hit] = {}

    def of(self, request: int, tags: Tags[int]) -> Hit:
        """The longest prefix that is findable in every group, below the last token."""
        if self._windowed:  # it may grow otherwise than row by row
            return self._look_up(tags)
        self._forget_changed()
        known = self._known.get(request)
        if known is not None and known.length == len(tags) and not self._goes_on(known):
            return known
        if known is None and len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        hit = self._known[request] = self._look_up(tags)
        return hit

    def _forget_changed(self) -> None:
        """What holds a block whose references or content changed is looked up anew."""
        for index, group in enumerate(self._groups):
            if group.changed is None:
                group.changed = set()
                self._known.clear()
            elif group.changed:
                unchanged = group.changed.isdisjoint
                self._known = {
                    request: hit
                    for request, hit in self._known.items()
                    if unchanged(hit.blocks[index])
                }
                group.changed.clear()

    def _goes_on(self, hit: Hit) -> bool:
        """Whether the row behind the hit is findable by now."""
        tag = hit.next_tag
        return tag is not None and all(tag in group.key_of_tag for group in self._groups)

    def _look_up(self, tags: Tags[int]) -> Hit:
        unit, rows = self._books.hit_tokens, self._books.longest_hit(tags)
        end = rows * self._size
        limit = (len(tags) - 1) // unit * unit if self._caches else 0
        firsts = [self._books.first_row(group.group, end) for group in self._groups]
        placed = list(zip(self._groups, firsts, strict=True))
        blocks = tuple([set(_reused(group, tags, first, end)) for group, first in placed])
        revived = self._together(
            [
                end // group.block_size - first - len(group.held & hit)
                for (group, first), hit in zip(placed, blocks, strict=True)
            ]
        )
        next_tag = tags[end + unit - 1] if end < limit else None
        return Hit(rows, revived, blocks, len(tags), next_tag)


def _reused(group: GroupBooks, tags: Tags[int], first: int, end: int) -> Iterator[int]:
    """From that row on; of several equal blocks the one that was indexed first is reused."""
    size = group.block_size
    keys = map(group.key_of_tag.__getitem__, tags[(first + 1) * size - 1 : end : size])
    return map(_first, map(group.blocks_of.__getitem__, keys))
