"""Least recently used: evict the block whose last reference went the longest time ago.

A hit takes a block out; when released again it counts as the most recent.  Since requests give
back their tails first, a prefix is evicted after its extensions.  Source: the free queue of
vLLM (survey rows P08, P09, R13).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvproof.engine.eviction.policy import EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """Evictable blocks in the order of their release."""

    __slots__ = ("_blocks",)

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        self._blocks[entry] = None

    def remove(self, entry: int) -> None:
        del self._blocks[entry]

    evicted = remove

    def forget(self, entry: int) -> None:
        self._blocks.pop(entry, None)

    def victim(self) -> int:
        return next(iter(self._blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)
