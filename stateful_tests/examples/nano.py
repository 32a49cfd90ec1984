"""A small engine: block manager and scheduler in the manner of nano-vllm, written anew.

From the public description of that engine: blocks with a reference count, a hash that chains over
the prefix and the tokens it stands for; one queue of free blocks, which keep their content until
they are taken; a map from hash to block; prompts computed in chunks, and hashed once they are.
The names are nano-vllm's.  It differs where that keeps it small: a block equal to one in the map
stays out of it, and a step may compute prompts and outputs together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from hashlib import blake2b

NO_HASH = -1


class Block:
    """One physical block."""

    def __init__(self) -> None:
        self.ref_count = 0
        self.hash = NO_HASH
        self.token_ids: Items[int] = ()


class Sequence:
    """A request."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = 0
        """Leading tokens whose KV is there."""
        self.num_pending_tokens = 0
        """Those that steps have still to compute."""
        self.block_table: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)


class BlockManager:
    """Who has which block, and what is in it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block() for _ in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids = deque(range(num_blocks))

    def full_block(self, seq: Sequence, row: int) -> list[int]:
        return seq.token_ids[row * self.block_size : (row + 1) * self.block_size]

    def num_blocks(self, seq: Sequence) -> int:
        return -(-len(seq) // self.block_size)

    def num_matchable(self, seq: Sequence) -> int:
        """Full blocks that may come from the cache: one token at least is to be computed."""
        return (len(seq) - 1) // self.block_size

    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks of the longest prefix."""
        found: list[int] = []
        prefix = NO_HASH
        for row in range(self.num_matchable(seq)):
            token_ids = self.full_block(seq, row)
            prefix = compute_hash(token_ids, prefix)
            block_id = self.hash_to_block_id.get(prefix, -1)
            if block_id < 0 or self.blocks[block_id].token_ids != token_ids:
                break
            found.append(block_id)
        return found

    def can_allocate(self, seq: Sequence) -> bool:
        hits = self.match(seq)
        taken = sum(self.blocks[block_id].ref_count == 0 for block_id in hits)
        return len(self.free_block_ids) >= self.num_blocks(seq) - len(hits) + taken

    def allocate(self, seq: Sequence) -> None:
        for block_id in self.match(seq):
            if self.blocks[block_id].ref_count == 0:
                self.free_block_ids.remove(block_id)
            self.blocks[block_id].ref_count += 1
            seq.block_table.append(block_id)
        seq.num_cached_tokens = len(seq.block_table) * self.block_size
        self.may_append(seq)

    def can_append(self, seq: Sequence) -> bool:
        return len(self.free_block_ids) >= self.num_blocks(seq) - len(seq.block_table)

    def may_append(self, seq: Sequence) -> None:
        """As many further blocks as its tokens need."""
        while len(seq.block_table) < self.num_blocks(seq):
            block_id = self.free_block_ids.popleft()
            self.forget(block_id)
            self.blocks[block_id].ref_count = 1
            seq.block_table.append(block_id)

    def forget(self, block_id: int) -> None:
        """A block is reused: what was in it is not to be found any more."""
        block = self.blocks[block_id]
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.hash, block.token_ids = NO_HASH, ()

    def deallocate(self, seq: Sequence) -> None:
        for block_id in reversed(seq.block_table):
            self.blocks[block_id].ref_count -= 1
            if self.blocks[block_id].ref_count == 0:
                self.free_block_ids.append(block_id)
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    def hash_blocks(self, seq: Sequence) -> None:
        """Its blocks that are computed to their end can be found from now on."""
        prefix = NO_HASH
        for row in range(seq.num_cached_tokens // self.block_size):
            block_id, token_ids = seq.block_table[row], self.full_block(seq, row)
            prefix = compute_hash(token_ids, prefix)
            if self.hash_to_block_id.setdefault(prefix, block_id) == block_id:
                self.blocks[block_id].hash = prefix
                self.blocks[block_id].token_ids = token_ids


class Scheduler:
    """Runs sequences, the first admitted first."""

    def __init__(self, block_manager: BlockManager) -> None:
        self.block_manager = block_manager
        self.running: list[Sequence] = []

    def start(self, seq: Sequence) -> bool:
        """A sequence that waits, or was preempted, runs from now on if there is room for it."""
        if not self.block_manager.can_allocate(seq):
            return False
        self.block_manager.allocate(seq)
        seq.num_pending_tokens = len(seq) - seq.num_cached_tokens
        self.running.append(seq)
        return True

    def append(self, seq: Sequence, token_ids: Items[int]) -> bool:
        """It has sampled these tokens, and needs slots for them."""
        seq.token_ids += token_ids
        if not self.block_manager.can_append(seq):
            del seq.token_ids[len(seq) - len(token_ids) :]
            return False
        self.block_manager.may_append(seq)
        seq.num_pending_tokens += len(token_ids)
        return True

    def first_token(self, seq: Sequence) -> int:
        """Where its part of a step begins."""
        return seq.num_cached_tokens

    def schedule(self, budget: int) -> list[tuple[Sequence, int, int]]:
        """A step: sequences, and which of their tokens it computes."""
        parts = []
        for seq in self.running:
            num_tokens = min(seq.num_pending_tokens, budget)
            if num_tokens:
                start = self.first_token(seq)
                parts.append((seq, start, start + num_tokens))
                budget -= num_tokens
        return parts

    def postprocess(self, seq: Sequence, num_computed: int) -> None:
        """A step has computed it that far."""
        seq.num_pending_tokens -= num_computed - seq.num_cached_tokens
        seq.num_cached_tokens = num_computed
        self.block_manager.hash_blocks(seq)

    def stop(self, seq: Sequence) -> None:
        """It has ended, or is preempted."""
        self.running.remove(seq)
        self.block_manager.deallocate(seq)


def compute_hash(token_ids: Items[int], prefix: int) -> int:
    text = f"{prefix} {token_ids}"
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())
