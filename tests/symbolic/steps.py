"""The protocol of a block pool, as steps that keep its invariant: a proof by induction.

Each step takes a pool that satisfies the invariant (``pre:``) and must leave a pool that
satisfies it, with the promised effect (``post:``).  CrossHair confirms that over all paths for
every pool of at most ``BLOCKS`` blocks; so no sequence of these steps, however long, breaks one.

Verifies: the protocol, and ``kvproof.engine.arithmetic`` where a step uses it.
Does not verify: the code of the engine's pool, which the stateful tests drive.

The invariant is ``sound`` for the pool and ``known`` for the index of the prefix cache.  A step
takes only the parts that it touches, since each one multiplies the paths.  No ``post:`` calls a
function that a step calls too, or one mistake could hide in both.
"""

from itertools import pairwise
from typing import NamedTuple

from kvproof.engine.arithmetic import copy_needed

BLOCKS = 3


class Pool(NamedTuple):
    """Two counts for each block.

    The order of the free list is left out: where a step takes a block it is handed any one that
    is free, so that the proof holds for every order.
    """

    refs: list[int]
    """Reference count."""
    free: list[int]
    """How often the block stands in the free list."""


def sound(pool: Pool) -> bool:
    """No count is negative; a block is in the free list, once, exactly if its count is zero."""
    return len(pool.free) == len(pool.refs) <= BLOCKS and all(
        count >= 0 and places == (count == 0)
        for count, places in zip(pool.refs, pool.free, strict=True)
    )


def known(index: list[int], blocks: int) -> bool:
    """The index, blocks that can be found, is a set (ascending) of blocks of the pool."""
    return len(index) <= blocks <= BLOCKS and all(
        low < high for low, high in pairwise([-1, *index, blocks])
    )


def sound_after(before: Pool, after: Pool, block: int, by: int) -> bool:
    """The pool is sound, and one reference count changed: that of ``block``, by ``by``."""
    return sound(after) and after.refs == [
        count + by * (other == block) for other, count in enumerate(before.refs)
    ]


def changed(counts: list[int], block: int, by: int) -> list[int]:
    """The counts with one of them changed."""
    return [*counts[:block], counts[block] + by, *counts[block + 1 :]]


def allocate(pool: Pool, index: list[int], block: int) -> tuple[Pool, list[int]]:
    """Take a free block; what it cached is evicted now and not before (seed-systems R12).

    pre: sound(pool) and 0 <= block < len(pool.refs) and pool.free[block] == 1
    pre: known(index, len(pool.refs))
    post: sound_after(pool, __return__[0], block, 1) and unfindable(__return__[1], pool, block)
    """
    taken = Pool(changed(pool.refs, block, 1), changed(pool.free, block, -1))
    return taken, [entry for entry in index if entry != block]


def unfindable(index: list[int], pool: Pool, block: int) -> bool:
    """The index is in order and has no entry for ``block``."""
    return known(index, len(pool.refs)) and block not in index


def release(pool: Pool, block: int) -> Pool:
    """Give back one reference; the last one frees the block (seed-systems P07, S01).

    pre: sound(pool) and 0 <= block < len(pool.refs) and pool.refs[block] >= 1
    post: sound_after(pool, __return__, block, -1)
    """
    frees = int(pool.refs[block] == 1)
    return Pool(changed(pool.refs, block, -1), changed(pool.free, block, frees))


def share(pool: Pool, block: int) -> Pool:
    """A prefix hit: one more reference, to a cached-free or a referenced block.

    A cached-free one leaves the free list (seed-systems R15); so a hit uses capacity (R16).

    pre: sound(pool) and 0 <= block < len(pool.refs)
    post: sound_after(pool, __return__, block, 1)
    post: sum(pool.free) - sum(__return__.free) == (pool.refs[block] == 0)
    """
    return Pool(changed(pool.refs, block, 1), changed(pool.free, block, -pool.free[block]))


def admit(pool: Pool, hits: list[bool], fresh: int) -> Pool | None:
    """Share the blocks that ``hits`` marks and take ``fresh`` more; or refuse, changing nothing.

    The hits come first (seed-systems R15, P13): a cached-free block that is hit is no longer
    there to be taken.

    pre: sound(pool) and len(hits) == len(pool.refs) and 0 <= fresh <= BLOCKS
    post: (__return__ is None) == (untouched_free(pool, hits) < fresh)
    post: __return__ is None or sound(__return__)
    post: __return__ is None or served(pool, __return__, hits) == fresh
    """
    hit = touch(pool, hits)
    return take(hit, fresh) if fresh <= sum(hit.free) else None


def served(before: Pool, after: Pool, hits: list[bool]) -> int:
    """Blocks that were taken besides the hits; -1 if one was taken twice, or a hit was missed."""
    owners = list(zip(before.refs, after.refs, hits, strict=True))
    if any(now != was + hit and (hit or was > 0 or now != 1) for was, now, hit in owners):
        return -1
    return sum(now - was - hit for was, now, hit in owners)


def untouched_free(pool: Pool, hits: list[bool]) -> int:
    """Free blocks that are not hit."""
    return sum(count == 0 and not hit for count, hit in zip(pool.refs, hits, strict=True))


def touch(pool: Pool, hits: list[bool]) -> Pool:
    """One more reference to each block that is hit; those leave the free list."""
    return Pool(
        [count + hit for count, hit in zip(pool.refs, hits, strict=True)],
        [places * (not hit) for places, hit in zip(pool.free, hits, strict=True)],
    )


def take(pool: Pool, fresh: int) -> Pool:
    """The first ``fresh`` free blocks get an owner."""
    taken = [places * (sum(pool.free[:block]) < fresh) for block, places in enumerate(pool.free)]
    return Pool(
        [count + new for count, new in zip(pool.refs, taken, strict=True)],
        [places - new for places, new in zip(pool.free, taken, strict=True)],
    )


def publish(index: list[int], blocks: int, block: int) -> list[int]:
    """Make a full block findable, if it is not already (seed-systems R04).

    pre: 0 <= block < blocks and known(index, blocks)
    post: known(__return__, blocks) and block in __return__
    post: [b for b in __return__ if b != block] == [b for b in index if b != block]
    """
    below = [entry for entry in index if entry < block]
    return [*below, block, *[entry for entry in index if entry > block]]


def evict(index: list[int], block: int) -> list[int]:
    """Make a block unfindable, if it is not already, and no other (seed-systems R12).

    pre: known(index, BLOCKS)
    post: known(__return__, BLOCKS) and block not in __return__
    post: len(__return__) == len(index) - (block in index) and all(b in index for b in __return__)
    """
    return [entry for entry in index if entry != block]


def fork(pool: Pool, held: list[bool]) -> Pool:
    """A child shares every block that its parent has: ``held`` marks them (seed-systems S02).

    pre: sound(pool) and len(held) == len(pool.refs)
    pre: all(count >= 1 for count, mine in zip(pool.refs, held) if mine)
    post: sound(__return__)
    post: all(now == was + mine for now, was, mine in zip(__return__.refs, pool.refs, held))
    """
    return Pool([count + mine for count, mine in zip(pool.refs, held, strict=True)], pool.free)


def write(pool: Pool, last: int, length: int, block_size: int, spare: int) -> Pool:
    """Write the token after ``length`` into the partial block ``last``, or into its copy ``spare``.

    Whichever it is, the writer is its only owner then (seed-systems P12, S04).

    pre: sound(pool) and 0 <= last < len(pool.refs) and pool.refs[last] >= 1
    pre: 0 <= spare < len(pool.refs) and pool.free[spare] == 1
    pre: block_size >= 1 and length >= 0 and length % block_size >= 1
    post: sound(__return__) and sum(__return__.refs) == sum(pool.refs)
    post: __return__.refs[spare if pool.refs[last] > 1 else last] == 1
    """
    if not copy_needed(length, block_size, pool.refs[last]):
        return pool
    return Pool(changed(changed(pool.refs, spare, 1), last, -1), changed(pool.free, spare, -1))
