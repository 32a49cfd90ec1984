"""Block arithmetic of the paged cache: from tokens to blocks and slots.

Plain ints on purpose: CrossHair can reason about them (and not about arrays or tensors), so
every ``post:`` below is confirmed over all paths by ``tests/test_symbolic.py``.  Nothing reads
the contracts at run time.  Each body is one expression: the engine evaluates it per token.
No contract calls a function of this module, or one mistake could hide in both.

The checkers in ``invariants/`` have an arithmetic of their own, independent on purpose: an
oracle that shared these functions would share their mistakes.

Rows such as "seed-systems P04" are those of the survey of systems.
"""

from collections.abc import Sequence


def blocks_needed(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens, the last one perhaps in part (seed-systems P05).

    pre: tokens >= 0 and block_size >= 1
    post: (__return__ - 1) * block_size < tokens <= __return__ * block_size
    """
    return -(-tokens // block_size)


def full_blocks(tokens: int, block_size: int) -> int:
    """Blocks that ``tokens`` tokens fill to the last position (seed-systems R04).

    pre: tokens >= 0 and block_size >= 1
    post: __return__ * block_size <= tokens < (__return__ + 1) * block_size
    """
    return tokens // block_size


def slot(table: Sequence[int], position: int, block_size: int) -> int:
    """Physical slot of the token at ``position``, found through a block table (seed-systems P04).

    pre: block_size >= 1
    pre: 0 <= position < len(table) * block_size
    post: __return__ // block_size == table[position // block_size]
    post: __return__ % block_size == position % block_size
    """
    return table[position // block_size] * block_size + position % block_size


def hit_tokens(matched_blocks: int, length: int, block_size: int) -> int:
    """Tokens of a prompt of ``length`` tokens that a prefix hit spares (seed-systems R05).

    The last token is never spared, it must be computed to yield logits.  So a block-aligned
    prompt that is cached to its end computes one whole block again.

    pre: matched_blocks >= 0 and length >= 1 and block_size >= 1
    post: __return__ % block_size == 0
    post: 0 <= __return__ <= min(matched_blocks * block_size, length - 1)
    post: min(matched_blocks * block_size, length - 1) < __return__ + block_size
    """
    return min(matched_blocks, (length - 1) // block_size) * block_size


def copy_needed(length: int, block_size: int, last_ref_count: int) -> bool:
    """Whether the token after ``length`` goes into a block that others read (seed-systems S04).

    ``last_ref_count`` is the reference count of the last block.  A full last block is not
    written again, however many share it.

    pre: length >= 0 and block_size >= 1 and last_ref_count >= 0
    post: __return__ == (length // block_size * block_size != length and last_ref_count >= 2)
    """
    return length % block_size > 0 and last_ref_count > 1


def blocks_to_take(
    length: int, new_length: int, block_size: int, held_blocks: int, copy: bool
) -> int:
    """Blocks that a request takes from the pool to grow (seed-systems P05, S04).

    Those beyond the ``held_blocks`` in its table, and one more for a ``copy`` of the last block
    (see ``copy_needed``), which is made only if a token is written.

    pre: 0 <= length <= new_length and block_size >= 1
    pre: length <= held_blocks * block_size
    post: __return__ >= (copy and new_length > length)
    post: new_length <= (held_blocks + __return__ - (copy and new_length > length)) * block_size
    post: __return__ <= copy or (held_blocks + __return__ - copy - 1) * block_size < new_length
    post: new_length > length or __return__ == 0
    """
    return max(0, blocks_needed(new_length, block_size) - held_blocks) + (
        copy and new_length > length
    )


def capacity_blocks(kv_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """Blocks that ``kv_bytes`` bytes of KV memory have room for (seed-systems B08).

    ``bytes_per_token`` covers every tensor that a block id addresses.

    pre: kv_bytes >= 0 and bytes_per_token >= 1 and block_size >= 1
    post: __return__ * bytes_per_token * block_size <= kv_bytes
    post: kv_bytes < (__return__ + 1) * bytes_per_token * block_size
    """
    return kv_bytes // (bytes_per_token * block_size)
