"""The orders in which content is to be evicted, told naively: what the checkers expect.

An order keeps the *evictable* entries of one pool (blocks or slots by number), each with its key:
nobody references or pins them.  Written from the policies' definitions, not from an engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from kvproof.invariants.subject import EvictionOrder


class Order(Protocol):
    """Evictable entries, the next victim first."""

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        """Evictable (again); not ``used``: it was merely copied from."""
        ...

    def remove(self, entry: int) -> None:
        """Referenced or pinned."""
        ...

    def evicted(self, entry: int) -> None:
        """Its content is gone, because room was wanted."""
        ...

    def forget(self, entry: int) -> None:
        """Its content is lost otherwise, whether it was evictable or not."""
        ...

    def __contains__(self, entry: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


_SHOWN = 8
"""Entries that a description names."""


class LeastRecent:
    """By the time of their last use, the longest ago first."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: OrderedDict[int, None] = OrderedDict()

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        self._entries.pop(entry, None)
        self._entries[entry] = None

    def remove(self, entry: int) -> None:
        self._entries.pop(entry, None)

    def evicted(self, entry: int) -> None:
        self._entries.pop(entry, None)

    def forget(self, entry: int) -> None:
        self._entries.pop(entry, None)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)


class Adaptive:
    """ARC (Megiddo and Modha): once used apart from used again, and a share that adapts itself.

    ``recent`` holds what was used once, ``frequent`` what was used again; ``ghosts`` are keys that
    each of them evicted lately, and one that comes back moves the target ``share`` of ``recent``.
    Entries in use are in neither: ``taken`` remembers whence they came.
    """

    __slots__ = ("capacity", "comebacks", "frequent", "ghosts", "recent", "share", "taken")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.recent: dict[int, bytes] = {}
        self.frequent: dict[int, bytes] = {}
        self.ghosts: tuple[dict[bytes, None], dict[bytes, None]] = ({}, {})
        self.share = 0
        self.comebacks = 0
        """Times that a ghost came back."""
        self.taken: dict[int, tuple[bytes, bool]] = {}
        """In use: its key, and whether it came from ``frequent``."""

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        known, was_frequent = self.taken.pop(entry, (None, False))
        of_recent, of_frequent = self.ghosts
        frequent = False
        if known == key:
            frequent = used or was_frequent
        elif key in of_recent:
            self.share = min(self.capacity, self.share + max(1, len(of_frequent) // len(of_recent)))
            del of_recent[key]
            frequent = True
        elif key in of_frequent:
            self.share = max(0, self.share - max(1, len(of_recent) // len(of_frequent)))
            del of_frequent[key]
            frequent = True
        self.comebacks += frequent and known != key
        (self.frequent if frequent else self.recent)[entry] = key

    def remove(self, entry: int) -> None:
        for entries, frequent in ((self.recent, False), (self.frequent, True)):
            key = entries.pop(entry, None)
            if key is not None:
                self.taken[entry] = (key, frequent)

    def evicted(self, entry: int) -> None:
        of_recent, of_frequent = self.ghosts
        for entries, ghosts in ((self.recent, of_recent), (self.frequent, of_frequent)):
            key = entries.pop(entry, None)
            if key is not None:
                ghosts[key] = None
        while of_recent and len(self.recent) + len(of_recent) > self.capacity:
            del of_recent[next(iter(of_recent))]
        while of_frequent and self._remembered() > 2 * self.capacity:
            del of_frequent[next(iter(of_frequent))]

    def describe(self) -> str:
        """Its four lists and the target, in words."""
        once, again = (list(entries)[:_SHOWN] for entries in (self.recent, self.frequent))
        ghosts = [[f"{key.hex()[:12]}…" for key in keys][:_SHOWN] for keys in self.ghosts]
        return (
            f"blocks {once} were used once, {again} again; of those evicted lately it remembers "
            f"keys {_listed(ghosts[0])} as used once, {_listed(ghosts[1])} as used again; "
            f"{self.share} of {self.capacity} blocks are for those used once"
        )

    def _remembered(self) -> int:
        return len(self) + sum(map(len, self.ghosts))

    def forget(self, entry: int) -> None:
        for entries in (self.recent, self.frequent, self.taken):
            entries.pop(entry, None)

    def __contains__(self, entry: object) -> bool:
        return entry in self.recent or entry in self.frequent

    def __len__(self) -> int:
        return len(self.recent) + len(self.frequent)

    def __iter__(self) -> Iterator[int]:
        beyond = max(0, len(self.recent) - self.share)
        yield from islice(self.recent, beyond)
        yield from self.frequent
        yield from islice(self.recent, beyond, None)


def _listed(words: Sequence[str]) -> str:
    return f"[{', '.join(words)}]"


def order_of(name: EvictionOrder, capacity: int) -> Order:
    """The order that a configuration names, for a pool of so many entries."""
    return Adaptive(capacity) if name == "arc" else LeastRecent()
