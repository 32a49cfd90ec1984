"""Adaptive replacement: blocks used once and blocks used again compete for the room.

Two lists hold what is evictable, by recency: blocks seen once, and blocks seen again.  Two ghost
lists remember the keys of what each of them lost.  A block that comes back as a ghost shows that
its list was too short, and moves the border between the two in its favour.  So a scan of blocks
that nobody asks for again does not push out those that are asked for.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (2003).  Unlike
there, blocks in use belong to no list: they cannot be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from kvproof.engine.eviction.policy import EvictionPolicy

_Blocks = OrderedDict[int, bytes]
_Ghosts = OrderedDict[bytes, None]


class AdaptiveReplacement(EvictionPolicy):
    """Each list and each ghost list, the oldest first; ``target`` is the size once is aimed at."""

    __slots__ = (
        "_again",
        "_again_ghosts",
        "_capacity",
        "_in_use",
        "_once",
        "_once_ghosts",
        "target",
    )

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.target = 0
        self._once: _Blocks = OrderedDict()
        self._again: _Blocks = OrderedDict()
        self._once_ghosts: _Ghosts = OrderedDict()
        self._again_ghosts: _Ghosts = OrderedDict()
        self._in_use: dict[int, tuple[bytes, _Blocks]] = {}
        """What is in use and was evictable before: its key then, and its list."""

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        known, blocks = self._in_use.pop(entry, (None, self._once))
        if known == key:
            blocks = self._again if used else blocks
        elif self._comes_back(key):
            blocks = self._again
        else:
            blocks = self._once
        blocks[entry] = key

    def _comes_back(self, key: bytes) -> bool:
        """Whether this key is a ghost; the border then moves, by the ratio of the ghost lists."""
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self.target = min(self._capacity, self.target + max(1, again // once))
            del self._once_ghosts[key]
        elif key in self._again_ghosts:
            self.target = max(0, self.target - max(1, once // again))
            del self._again_ghosts[key]
        else:
            return False
        return True

    def remove(self, entry: int) -> None:
        blocks = self._list_of(entry)
        self._in_use[entry] = blocks.pop(entry), blocks

    def evicted(self, entry: int) -> None:
        blocks = self._list_of(entry)
        ghosts = self._once_ghosts if blocks is self._once else self._again_ghosts
        ghosts[blocks.pop(entry)] = None
        while len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        while len(self) + len(self._once_ghosts) + len(self._again_ghosts) > 2 * self._capacity:
            self._again_ghosts.popitem(last=False)

    def forget(self, entry: int) -> None:
        for blocks in (self._once, self._again, self._in_use):
            blocks.pop(entry, None)

    def victim(self) -> int:
        once = len(self._once) > self.target or not self._again
        return next(iter(self._once if once else self._again))

    def _list_of(self, entry: int) -> _Blocks:
        return self._once if entry in self._once else self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[int]:
        beyond = max(0, len(self._once) - self.target)
        yield from islice(self._once, beyond)
        yield from self._again
        yield from islice(self._once, beyond, None)
