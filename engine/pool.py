"""The physical blocks of one KV cache group: free ones, reference counts, prefix index.

A block is in exactly one of three classes (survey row D01):

* empty-free: no reference, nothing findable in it; reused last in, first out;
* cached-free: no reference, still findable under its key; evicted only when no empty-free block
  is left, in the order of the eviction policy;
* referenced: one or more block tables (or fences of steps, or transfers, in flight) hold it.

Block 0 is the null block: never free, never written, in no request's table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Literal

from kvproof.engine.eviction import EvictionPolicy
from kvproof.invariants.events import BlocksEvicted, Event

NULL_BLOCK = 0


class PoolExhaustedError(Exception):
    """More blocks were taken than are free: the caller did not ask first."""


class BlockPool:
    """``blocks`` usable blocks, ids 1 to ``blocks``; all operations take constant time a block."""

    __slots__ = (
        "_cached",
        "_empty",
        "_events",
        "evictions",
        "free_count",
        "generation",
        "group",
        "index",
        "keys",
        "ref_counts",
        "usable",
        "watch",
        "withheld",
    )

    def __init__(
        self, blocks: int, group: int, eviction: EvictionPolicy, events: list[Event]
    ) -> None:
        self.usable = blocks
        self.group = group
        self.ref_counts = [0] * (blocks + 1)
        self.keys: list[bytes | None] = [None] * (blocks + 1)
        self.index: dict[bytes, tuple[int, ...]] = {}
        """The block that is findable under a key, as the view shows it: duplicates stay private."""
        self.free_count = blocks
        """Blocks that may be taken, empty or cached, but for what is withheld."""
        self.withheld = 0
        """Free blocks that are somebody else's: no particular ones."""
        self.watch: Callable[[bytes, bool], None] | None = None
        """Is told each key that becomes findable (true) or unfindable."""
        self.evictions = 0
        self.generation = 0
        """Changes whenever a block becomes findable, unfindable, referenced or unreferenced: while
        it does not, every look-up gives what it gave."""
        self._empty = list(range(blocks, NULL_BLOCK, -1))
        self._cached = eviction
        self._events = events

    def room(self, protect: Collection[int]) -> int:
        """Blocks that may be taken without evicting a protected one."""
        return self.free_count - self.count_unreferenced(protect)

    def take(self, count: int, protect: Collection[int] = ()) -> list[int]:
        """Hand out free blocks, each with one reference; their old content is not findable.

        Of the cached ones the next victims, but for the protected ones.
        """
        room = self.room(protect) if protect else self.free_count
        if count > room:
            raise PoolExhaustedError(f"{count} blocks wanted, {room} free")
        empty = self._empty
        taken = empty[: -count - 1 : -1]  # last in, first out
        del empty[len(empty) - len(taken) :]
        if len(taken) < count:
            taken += self._evict(count - len(taken), "pressure", protect)
        ref_counts = self.ref_counts
        for block in taken:
            ref_counts[block] = 1
        self.free_count -= count
        return taken

    def withhold(self, count: int) -> int:
        """So many free blocks are somebody else's from now on, or as many as are free."""
        self.free_count += self.withheld
        self.withheld = min(count, self.free_count)
        self.free_count -= self.withheld
        return self.withheld

    def match(self, keys: Sequence[bytes], count: int) -> list[int]:
        """The findable blocks of the longest prefix of ``keys[1:count+1]``; takes no reference."""
        # All in C: a prompt may have thousands of blocks, and a policy asks at each iteration.
        found = takewhile(bool, map(self.index.get, islice(keys, 1, count + 1)))
        return list(chain.from_iterable(found))  # type: ignore[arg-type]

    def count_unreferenced(self, blocks: Collection[int]) -> int:
        """How many of ``blocks`` would leave the free ones when referenced (survey row R16)."""
        ref_counts = self.ref_counts
        return len([block for block in blocks if ref_counts[block] == 0])

    def count_sole(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` have one reference, and so are free when it is given back."""
        ref_counts = self.ref_counts
        return len([block for block in blocks if ref_counts[block] == 1])

    @property
    def cached_free_count(self) -> int:
        """Free blocks in which something is findable."""
        return len(self._cached)

    def victims(self) -> Iterator[int]:
        """These blocks, the next to be evicted first."""
        return iter(self._cached)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each; a cached-free block is no longer free."""
        self.generation += 1
        ref_counts = self.ref_counts
        for block in blocks:
            if ref_counts[block] == 0:
                self._cached.remove(block)
                self.free_count -= 1
            ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each, in this order; unreferenced blocks become free."""
        self.generation += 1
        ref_counts, keys, cache = self.ref_counts, self.keys, self._cached.insert
        for block in blocks:
            count = ref_counts[block] = ref_counts[block] - 1
            if count == 0:
                self.free_count += 1
                key = keys[block]
                if key is None:
                    self._empty.append(block)
                else:
                    cache(block, key)

    def publish(self, block: int, key: bytes) -> bool:
        """Make a full block findable, unless its content already is in another block."""
        if key in self.index:
            return False
        self.generation += 1
        self.index[key] = (block,)
        self.keys[block] = key
        if self.watch is not None:
            self.watch(key, True)
        return True

    def evict(self, count: int, cause: Literal["request", "reset"]) -> int:
        """Make up to ``count`` cached-free blocks empty-free; says how many."""
        evicted = self._evict(min(count, len(self._cached)), cause)
        self._empty += evicted
        return len(evicted)

    def free_blocks(self) -> Iterator[int]:
        """All free blocks, in the order in which :meth:`take` would hand them out."""
        return chain(reversed(self._empty), self._cached)

    def _evict(
        self,
        count: int,
        cause: Literal["pressure", "request", "reset"],
        protect: Collection[int] = (),
    ) -> list[int]:
        """Forget the content of the next ``count`` victims, which the caller puts elsewhere."""
        if not count:
            return []
        victims, keys = [], []
        evicted, forget = self._cached.evicted, self._forget
        for block in self._next_victims(count, protect):
            evicted(block)
            victims.append(block)
            keys.append(forget(block))
        self.evictions += count
        self.generation += 1
        self._events.append(BlocksEvicted(self.group, victims, keys, cause))
        return victims

    def _next_victims(self, count: int, protect: Collection[int]) -> Iterable[int]:
        """Each must be evicted before the next is asked for, unless some are protected."""
        if not protect:
            return (self._cached.victim() for _ in range(count))
        return list(islice((block for block in self._cached if block not in protect), count))

    def _forget(self, block: int) -> bytes:
        """The block's content is not findable any more; says its key."""
        key = self.keys[block]
        assert key is not None, "a cached-free block has a key"
        del self.index[key]
        self.keys[block] = None
        if self.watch is not None:
            self.watch(key, False)
        return key
