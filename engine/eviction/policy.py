"""What an eviction policy is: the same interface for device, host and disk.

A policy of a user's is driven on the device; the tiers below have those that a configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Keeps the evictable blocks of one pool in the order in which they are to be evicted.

    Evictable is what is findable, and used by nobody: no block table, no step and no transfer.
    A policy of one's own subclasses this and has ``insert``, ``remove``, ``victim``, ``__len__``
    and ``__iter__``; the others it may leave as they are.  It is built with the capacity of its
    pool, in blocks, and never touches blocks or keys itself.  Every method should take constant
    or logarithmic time.  A policy that raises breaks its pool: there is no way back in the middle
    of an eviction.
    """

    __slots__ = ()

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        """Block ``entry``, findable under ``key``, became evictable, perhaps again.

        ``used`` is false if nobody wanted it meanwhile: it was copied from the host to the disk.
        (A copy from the device counts as a use there.)
        """
        ...

    def remove(self, entry: int) -> None:
        """``entry`` is in use again.  Raises KeyError if it was not evictable."""
        ...

    def victim(self) -> int:
        """The block to evict next; it stays until evicted.  Called only when there is one."""
        ...

    def __len__(self) -> int:
        """Number of evictable blocks."""
        ...

    def __iter__(self) -> Iterator[int]:
        """All evictable blocks, the next victim first: some may be passed over."""
        ...

    def evicted(self, entry: int) -> None:
        """``entry`` loses its content to make room: usually the victim, or one behind it."""
        self.remove(entry)

    def forget(self, entry: int) -> None:
        """What was in ``entry``, evictable or not, is lost otherwise (host and disk only)."""
        if entry in tuple(self):
            self.remove(entry)


EvictionPolicyFactory = Callable[[int], EvictionPolicy]
"""Builds the policy of one pool of so many blocks; called once per KV cache group."""
