"""Planted faults: wrong versions of the block arithmetic and of the pool's steps.

A fault replaces one piece of one function's body.  Its contract stays, so that what refutes the
fault is the very contract that the right version is confirmed against.
"""

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``wrong`` in place of ``right`` in the body of ``function``."""

    function: str
    says: str
    right: str
    wrong: str

    @property
    def name(self) -> str:
        """An identifier: the function and what the fault does."""
        return f"{self.function}_{self.says}".replace(" ", "_")


def rewrite(source: str, function: str, right: str, wrong: str) -> str:
    """The source with one piece of one function replaced; it must be there exactly once."""
    node = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    lines = source.splitlines(keepends=True)
    text = "".join(lines[node.lineno - 1 : node.end_lineno])
    if text.count(right) != 1:
        raise ValueError(f"{right!r} stands {text.count(right)} times in {function}")
    changed = text.replace(right, wrong)
    return "".join([*lines[: node.lineno - 1], changed, *lines[node.end_lineno :]])


ARITHMETIC = (
    Fault(
        "blocks_needed",
        "floor for ceil",
        "return -(-tokens // block_size)",
        "return tokens // block_size",
    ),
    Fault(
        "blocks_needed",
        "one too many at a block boundary",
        "return -(-tokens // block_size)",
        "return tokens // block_size + 1",
    ),
    Fault(
        "full_blocks",
        "ceil for floor",
        "return tokens // block_size",
        "return -(-tokens // block_size)",
    ),
    Fault(
        "full_blocks",
        "one too few at a block boundary",
        "return tokens // block_size",
        "return max(0, tokens - 1) // block_size",
    ),
    Fault(
        "slot",
        "div and mod swapped",
        "table[position // block_size] * block_size + position % block_size",
        "table[position % block_size] * block_size + position // block_size",
    ),
    Fault(
        "slot",
        "block size forgotten",
        "table[position // block_size] * block_size +",
        "table[position // block_size] +",
    ),
    Fault(
        "slot",
        "next block one token early",
        "table[position // block_size] *",
        "table[min((position + 1) // block_size, len(table) - 1)] *",
    ),
    Fault(
        "slot",
        "table cut after eight blocks",
        "table[position // block_size] *",
        "table[min(position // block_size, 7)] *",
    ),
    Fault(
        "hit_tokens",
        "covers the whole prompt",
        "(length - 1) // block_size",
        "length // block_size",
    ),
    Fault(
        "hit_tokens",
        "ends inside a block",
        "min(matched_blocks, (length - 1) // block_size) * block_size",
        "min(matched_blocks * block_size, length - 1)",
    ),
    Fault(
        "hit_tokens",
        "needlessly short after a block boundary",
        "(length - 1) // block_size",
        "max(0, length - 2) // block_size",
    ),
    Fault(
        "copy_needed",
        "copies a full block",
        "return length % block_size > 0 and ",
        "return length > 0 and ",
    ),
    Fault(
        "copy_needed",
        "copies for a sole owner",
        "return length % block_size > 0 and last_ref_count > 1",
        "return length % block_size > 0 and last_ref_count > 0",
    ),
    Fault(
        "copy_needed",
        "writes into a block of two",
        "return length % block_size > 0 and last_ref_count > 1",
        "return length % block_size > 0 and last_ref_count > 2",
    ),
    Fault(
        "blocks_to_take",
        "copy forgotten",
        " + (\n        copy and new_length > length\n    )",
        "",
    ),
    Fault(
        "blocks_to_take",
        "copy without a write",
        "        copy and new_length > length\n",
        "        copy\n",
    ),
    Fault(
        "blocks_to_take",
        "floor for ceil",
        "blocks_needed(new_length, block_size) - held_blocks",
        "full_blocks(new_length, block_size) - held_blocks",
    ),
    Fault(
        "blocks_to_take",
        "spare blocks given back",
        "max(0, blocks_needed(new_length, block_size) - held_blocks)",
        "(blocks_needed(new_length, block_size) - held_blocks)",
    ),
    Fault(
        "blocks_to_take",
        "room in the last block ignored",
        "max(0, blocks_needed(new_length, block_size) - held_blocks)",
        "blocks_needed(new_length - length, block_size)",
    ),
    Fault(
        "capacity_blocks",
        "rounded up",
        "return kv_bytes // (bytes_per_token * block_size)",
        "return -(-kv_bytes // (bytes_per_token * block_size))",
    ),
    Fault(
        "capacity_blocks",
        "one block held back",
        "return kv_bytes // (bytes_per_token * block_size)",
        "return max(0, kv_bytes // (bytes_per_token * block_size) - 1)",
    ),
    Fault(
        "capacity_blocks",
        "tokens for blocks",
        "return kv_bytes // (bytes_per_token * block_size)",
        "return kv_bytes // bytes_per_token",
    ),
)

STEPS = (
    Fault(
        "allocate",
        "old entry still found",
        "[entry for entry in index if entry != block]",
        "index",
    ),
    Fault(
        "allocate",
        "stays in the free list",
        "changed(pool.free, block, -1)",
        "pool.free",
    ),
    Fault(
        "release",
        "frees a block whose count is still 1",
        "int(pool.refs[block] == 1)",
        "int(pool.refs[block] <= 2)",
    ),
    Fault(
        "release",
        "never frees",
        "int(pool.refs[block] == 1)",
        "0",
    ),
    Fault(
        "release",
        "frees twice",
        "changed(pool.free, block, frees)",
        "changed(pool.free, block, 2 * frees)",
    ),
    Fault(
        "share",
        "stays in the free list",
        "changed(pool.free, block, -pool.free[block])",
        "pool.free",
    ),
    Fault(
        "share",
        "count set to 1",
        "changed(pool.refs, block, 1), changed",
        "changed(pool.refs, block, 1 - pool.refs[block]), changed",
    ),
    Fault(
        "admit",
        "counts cached-free hits twice",
        "fresh <= sum(hit.free)",
        "fresh <= sum(pool.free)",
    ),
    Fault(
        "admit",
        "takes before it touches the hits",
        "take(hit, fresh)",
        "touch(take(pool, fresh), hits)",
    ),
    Fault(
        "admit",
        "hits stay in the free list",
        "hit = touch(pool, hits)",
        "hit = Pool(touch(pool, hits).refs, pool.free)",
    ),
    Fault(
        "admit",
        "refuses what fits exactly",
        "fresh <= sum(hit.free)",
        "fresh < sum(hit.free)",
    ),
    Fault("publish", "a second key for one block", "entry > block", "entry >= block"),
    Fault("publish", "leads past the pool", "*below, block,", "*below, block + 1,"),
    Fault("publish", "forgets what was there", "*below, block,", "block,"),
    Fault(
        "evict",
        "empties the index",
        "return [entry for entry in index if entry != block]",
        "return []",
    ),
    Fault(
        "evict",
        "only the newest block",
        "return [entry for entry in index if entry != block]",
        "return index[:-1] if index and index[-1] == block else index",
    ),
    Fault(
        "fork",
        "counts only what was shared before",
        "[count + mine for count",
        "[count + (mine and count > 1) for count",
    ),
    Fault(
        "fork",
        "frees what it shares",
        "strict=True)], pool.free)",
        "strict=True)], [places + mine for places, mine in zip(pool.free, held, strict=True)])",
    ),
    Fault(
        "write",
        "in place although shared",
        "pool.refs[last]):",
        "pool.refs[last] - 1):",
    ),
    Fault(
        "write",
        "keeps its reference to the original",
        "changed(changed(pool.refs, spare, 1), last, -1)",
        "changed(pool.refs, spare, 1)",
    ),
    Fault(
        "write",
        "copy stays in the free list",
        "changed(pool.free, spare, -1)",
        "pool.free",
    ),
)
