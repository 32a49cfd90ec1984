"""Eviction policies: which cached-free block loses its content first.  One policy per file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kvproof.engine.eviction.lru import LeastRecentlyUsed


class EvictionPolicy(Protocol):
    """Keeps the cached-free blocks of one pool in the order in which they are to be evicted.

    The pool calls :meth:`insert` when the last reference to a findable block goes,
    :meth:`remove` when such a block is referenced again or loses its content by other means, and
    :meth:`victim` when an allocation finds no empty-free block.  A policy never touches blocks
    or keys itself.  Every method should take constant or logarithmic time.  A policy that raises
    breaks its pool: there is no way back in the middle of an eviction.
    """

    def insert(self, block: int) -> None:
        """``block`` became cached-free."""
        ...

    def remove(self, block: int) -> None:
        """``block`` is no longer cached-free.  Raises KeyError if it was not."""
        ...

    def victim(self) -> int:
        """The block to evict next; it stays until removed.  Called only when there is one."""
        ...

    def __len__(self) -> int:
        """Number of cached-free blocks."""
        ...

    def __iter__(self) -> Iterator[int]:
        """All cached-free blocks, the next victim first."""
        ...


EvictionPolicyFactory = Callable[[], EvictionPolicy]
"""Builds the policy of one pool; called once per KV cache group."""

__all__ = ["EvictionPolicy", "EvictionPolicyFactory", "LeastRecentlyUsed"]
