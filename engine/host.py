"""Host blocks: the swap space of preempted requests, one pool per KV cache group."""

from __future__ import annotations


class HostPool:
    """``blocks`` host blocks, ids 0 to ``blocks - 1``; each holds one device block's bytes."""

    __slots__ = ("_free", "blocks")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out free blocks; the caller has asked whether there are so many."""
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: list[int]) -> None:
        """Blocks are free again."""
        self._free += reversed(blocks)
