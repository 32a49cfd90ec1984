"""The ownership ledger of one KV cache group: who holds which block, and what is findable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvproof.invariants.orders import Adaptive
from kvproof.invariants.request_books import RequestModel


class Owed(NamedTuple):
    """Who published a block before it was computed, and is to compute it; see ``Semantics``."""

    request: RequestModel
    row: int
    epoch: int
    """The request's at that time."""
    end: int
    """Tokens of it that are computed when the block is."""


class GroupBooks:
    """Ledger of one KV cache group's pool."""

    __slots__ = (
        "adaptive",
        "arriving",
        "block_size",
        "blocks_of",
        "cached_free",
        "changed",
        "emptied",
        "evicting",
        "free",
        "group",
        "held",
        "key_of",
        "key_of_tag",
        "owed",
        "referenced",
        "refs",
        "tag_of",
        "touched",
        "touched_keys",
        "unstored",
        "usable",
        "withheld",
    )

    def __init__(self, group: int, usable: int, ids: int, block_size: int) -> None:
        self.group = group
        self.block_size = block_size
        self.usable = usable
        self.withheld = 0
        self.free = usable
        """Blocks that an allocation may take: neither referenced nor withheld."""
        self.refs = [0] * ids
        self.held: set[int] = set()
        """Blocks with at least one reference …"""
        self.referenced = 0
        """… and how many they are."""
        self.key_of: dict[int, bytes] = {}
        self.blocks_of: dict[bytes, tuple[int, ...]] = {}
        """The prefix index: key to findable blocks."""
        self.tag_of = [0] * ids
        """Of findable blocks: the tag of the last position …"""
        self.key_of_tag: dict[int, bytes] = {}
        """… and the key under which that content is findable."""
        self.cached_free: OrderedDict[int, None] = OrderedDict()
        """Findable blocks without a reference, by the time of their release."""
        self.adaptive: Adaptive | None = None
        """The same blocks, where they are to be evicted as ARC says."""
        self.unstored: dict[int, None] = {}
        """Findable blocks that were not copied to the host since, in that order."""
        self.arriving: dict[int, int] = {}
        """Tags of blocks on their way up from the host, and the transfer that brings each."""
        self.emptied: list[int] = []
        """Blocks that the latest release left without a holder and with nothing findable."""
        self.evicting: list[int] = []
        """Evicted under pressure, not yet handed out."""
        self.touched: list[int] = []
        self.touched_keys: list[bytes] = []
        """Blocks and keys of the events since the last settlement."""
        self.changed: set[int] | None = None
        """Blocks whose references or content changed since somebody asked; None if nobody does."""
        self.owed: dict[int, Owed] = {}
        """Findable blocks that are yet to be computed."""

    @property
    def findable(self) -> Collection[int]:
        """Blocks in which something of this group is findable."""
        return self.key_of

    @property
    def empty_free(self) -> int:
        """Free blocks in which nothing is findable."""
        return self.usable - self.referenced - len(self.cached_free)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""
        if self.changed is not None:
            self.changed.update(blocks)
        refs, cached_free = self.refs, self.cached_free
        for block in blocks:
            refs[block] += 1
        if cached_free and not cached_free.keys().isdisjoint(blocks):
            for block in blocks:
                cached_free.pop(block, None)
            if self.adaptive is not None:
                for block in blocks:
                    self.adaptive.remove(block)
        self.held.update(blocks)
        self.referenced = held = len(self.held)
        self.free = self.usable - held - self.withheld
        self.touched += blocks

    def withhold(self, blocks: int) -> None:
        """So many of the free blocks, or all, are somebody else's from now on."""
        self.withheld = min(blocks, self.usable - self.referenced)
        self.free = self.usable - self.referenced - self.withheld

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less to each, in this order; never below zero (REF has reported it)."""
        if self.changed is not None:
            self.changed.update(blocks)
        refs, key_of, held = self.refs, self.key_of, self.held
        self.emptied = []
        for block in blocks:
            count = refs[block]
            if count > 1:
                refs[block] = count - 1
            elif count:
                refs[block] = 0
                held.discard(block)
                if block in key_of:
                    self.cached_free[block] = None
                    if self.adaptive is not None:
                        self.adaptive.insert(block, key_of[block])
                else:
                    self.emptied.append(block)
        self.referenced = left = len(held)
        self.free = self.usable - left - self.withheld
        self.touched += blocks

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], tags: Sequence[int]) -> None:
        """Blocks are findable under these keys, whose last positions have these tags."""
        if self.changed is not None:
            self.changed.update(blocks)
        key_of, blocks_of, held = self.key_of, self.blocks_of, self.held
        tag_of, key_of_tag = self.tag_of, self.key_of_tag
        for block, key, tag in zip(blocks, keys, tags, strict=False):
            key_of[block] = key
            others = blocks_of.get(key)
            blocks_of[key] = (*others, block) if others else (block,)
            tag_of[block] = tag
            key_of_tag[tag] = key
            if block not in held:  # a subject may publish what nobody holds
                self.cached_free[block] = None
        self.touched += blocks
        self.touched_keys += keys

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Nothing is findable in these blocks any more."""
        if self.changed is not None:
            self.changed.update(blocks)
        key_of, cached_free, blocks_of = self.key_of, self.cached_free, self.blocks_of
        tag_of, key_of_tag = self.tag_of, self.key_of_tag
        for block in blocks:
            key = key_of.pop(block, None)
            if key is None:
                continue  # PIN, VALID
            cached_free.pop(block, None)
            if self.adaptive is not None:
                self.adaptive.evicted(block)
            others = blocks_of.pop(key)
            if len(others) > 1:
                blocks_of[key] = tuple([other for other in others if other != block])
            else:
                key_of_tag.pop(tag_of[block], None)
        if self.owed:
            for block in blocks:
                self.owed.pop(block, None)
        if self.unstored:
            for block in blocks:
                self.unstored.pop(block, None)


class PooledBooks(GroupBooks):
    """Ledger of a group that shares its pool with others: all but its keys is the pool's."""

    __slots__ = ("group_of", "pool")

    def __init__(self, group: int, usable: int, ids: int, block_size: int) -> None:
        super().__init__(group, usable, ids, block_size)
        self.group_of: dict[int, int] = {}
        """The group in which a block became findable last."""
        self.pool: list[GroupBooks] = [self]
        """The ledgers of all groups."""

    @property
    def findable(self) -> Collection[int]:
        return [block for block in self.key_of if self.group_of[block] == self.group]

    def share(self, first: GroupBooks) -> None:
        """What is known of a block is known in all groups."""
        assert isinstance(first, PooledBooks)
        for name in _OF_THE_POOL:
            setattr(self, name, getattr(first, name))
        self.pool.append(self)

    def hold(self, blocks: Sequence[int]) -> None:
        super().hold(blocks)
        self._agree()

    def drop(self, blocks: Sequence[int]) -> None:
        super().drop(blocks)
        self._agree()

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes], tags: Sequence[int]) -> None:
        super().publish(blocks, keys, tags)
        self.group_of.update(dict.fromkeys(blocks, self.group))

    def _agree(self) -> None:
        for group in self.pool:
            group.referenced, group.free = self.referenced, self.free


_OF_THE_POOL = (
    "refs",
    "held",
    "key_of",
    "blocks_of",
    "tag_of",
    "cached_free",
    "evicting",
    "group_of",
    "pool",
)
"""Of a shared pool, by block."""
