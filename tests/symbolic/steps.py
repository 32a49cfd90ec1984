"""The protocol of a block pool, as steps that keep its invariant: a proof by induction.

Each step takes a pool that satisfies the invariant (``pre:``) and must leave a pool that
satisfies it, with the promised effect (``post:``).  CrossHair confirms that over all paths for
every pool of at most three blocks; so no sequence of these steps, however long, breaks one.

Verifies: the protocol, and ``kvproof.engine.arithmetic`` where a step uses it.
Does not verify: the code of the engine's pool, which the stateful tests drive.

A step takes only the parts of a pool that it touches, since each one multiplies the paths:

``refs``   reference count, by block;
``free``   how often the block stands in the free list, by block.  So nothing depends on the
           order of that list: where a step takes a block, it is handed any one that is free;
``index``  the blocks that the prefix cache can find, one entry for each key.
"""

from kvproof.engine.arithmetic import copy_needed

Counts = list[int]
Pool = tuple[Counts, Counts]
"""``refs`` and ``free``."""


def sound(refs: Counts, free: Counts) -> bool:
    """No count is negative; a block is in the free list, once, exactly if its count is zero."""
    return len(free) == len(refs) <= 3 and all(
        count >= 0 and places == (count == 0) for count, places in zip(refs, free, strict=True)
    )


def known(index: list[int], blocks: int) -> bool:
    """Each entry leads to a block of the pool, and no two to the same one."""
    return len(index) <= blocks <= 3 and all(
        0 <= block < blocks and index.count(block) == 1 for block in index
    )


def changed(counts: Counts, block: int, by: int) -> Counts:
    """The counts with one of them changed."""
    return [*counts[:block], counts[block] + by, *counts[block + 1 :]]


def allocate(refs: Counts, free: Counts, index: list[int], block: int) -> tuple[Pool, list[int]]:
    """Take a free block; what it cached is evicted now and not before (seed-systems R12).

    pre: sound(refs, free) and 0 <= block < len(refs) and free[block] == 1
    pre: known(index, len(refs))
    post: sound(*__return__[0]) and known(__return__[1], len(refs)) and block not in __return__[1]
    """
    pool = changed(refs, block, 1), changed(free, block, -1)
    return pool, [entry for entry in index if entry != block]


def release(refs: Counts, free: Counts, block: int) -> Pool:
    """Give back one reference; the last one frees the block (seed-systems P07, S01).

    pre: sound(refs, free) and 0 <= block < len(refs) and refs[block] >= 1
    post: sound(*__return__) and __return__[0] == changed(refs, block, -1)
    """
    return changed(refs, block, -1), changed(free, block, int(refs[block] == 1))


def share(refs: Counts, free: Counts, block: int) -> Pool:
    """A prefix hit: one more reference, to a cached-free or a referenced block.

    A cached-free one leaves the free list (seed-systems R15), a hit consumes capacity (R16).

    pre: sound(refs, free) and 0 <= block < len(refs)
    post: sound(*__return__) and __return__[0] == changed(refs, block, 1)
    post: sum(free) - sum(__return__[1]) == (refs[block] == 0)
    """
    return changed(refs, block, 1), changed(free, block, -free[block])


def admit(refs: Counts, free: Counts, hits: list[bool], fresh: int) -> Pool | None:
    """Share all blocks that are hit and take ``fresh`` more, or change nothing and refuse.

    The hits come first (seed-systems R15, P13): a cached-free block that is hit is no longer
    there to be taken.

    pre: sound(refs, free) and len(hits) == len(refs) and 0 <= fresh <= 3
    post: (__return__ is None) == (sum(refs[b] == 0 and not hits[b] for b in range(len(refs))) < fresh)
    post: __return__ is None or sound(*__return__)
    post: __return__ is None or sum(__return__[0]) == sum(refs) + sum(hits) + fresh
    """
    shared = [count + hit for count, hit in zip(refs, hits, strict=True)]
    left = [places * (not hit) for places, hit in zip(free, hits, strict=True)]
    return take(shared, left, fresh) if fresh <= sum(left) else None


def take(refs: Counts, free: Counts, fresh: int) -> Pool:
    """Take the first ``fresh`` free blocks."""
    taken = [places * (sum(free[:block]) < fresh) for block, places in enumerate(free)]
    return (
        [count + new for count, new in zip(refs, taken, strict=True)],
        [places - new for places, new in zip(free, taken, strict=True)],
    )


def publish(index: list[int], blocks: int, block: int) -> list[int]:
    """Make a full block findable under a key of its own (seed-systems R04).

    pre: 0 <= block < blocks and known(index, blocks) and block not in index
    post: known(__return__, blocks) and __return__[:-1] == index and __return__[-1] == block
    """
    return [*index, block]


def evict(index: list[int], blocks: int, block: int) -> list[int]:
    """Make a block unfindable, and no other (seed-systems R12).

    pre: known(index, blocks) and block in index
    post: known(__return__, blocks) and block not in __return__
    post: len(__return__) == len(index) - 1
    """
    return [entry for entry in index if entry != block]


def fork(refs: Counts, free: Counts, table: list[int]) -> Pool:
    """A child shares every block of its parent's table (seed-systems S02).

    pre: sound(refs, free) and known(table, len(refs)) and all(refs[block] >= 1 for block in table)
    post: sound(*__return__) and all(now == was + (block in table) for block, (now, was) in enumerate(zip(__return__[0], refs)))
    """
    return [count + table.count(block) for block, count in enumerate(refs)], free


def write(
    refs: Counts, free: Counts, last: int, length: int, block_size: int, spare: int
) -> tuple[Pool, int]:
    """Write the next token into the partial block ``last``, or else into its copy ``spare``.

    Returns the pool and the block that is written, of which the writer is the sole owner
    (seed-systems P12, S04).

    pre: sound(refs, free) and 0 <= last < len(refs) and refs[last] >= 1
    pre: 0 <= spare < len(refs) and free[spare] == 1
    pre: block_size >= 1 and length >= 0 and length % block_size >= 1
    post: sound(*__return__[0]) and __return__[0][0][__return__[1]] == 1
    post: sum(__return__[0][0]) == sum(refs) and __return__[0][0][last] >= refs[last] - 1
    post: (__return__[1] == last) == (refs[last] == 1)
    """
    if not copy_needed(length, block_size, refs[last]):
        return (refs, free), last
    return (changed(changed(refs, spare, 1), last, -1), changed(free, spare, -1)), spare
