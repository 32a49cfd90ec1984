"""Shadow memory: the tag that every physical slot of a group holds, or poison.

No tensors and no model: writes and copies are replayed from the subject's events, so it works
for any block manager that exposes its tables.  One flat ``array("Q")`` per group is indexed by
slot for single tokens and viewed by numpy for long ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kvproof.invariants.tags import POISON_NAMES, UNWRITTEN, Tags

_BULK_ROWS = 8
"""From this many rows on, numpy beats slices of arrays."""
_BULK_BLOCKS = 12


class Shadow:
    """The content of one group's slots; slot = block · block size + offset."""

    __slots__ = ("_poison_rows", "_rows", "block_size", "content")

    def __init__(self, ids: int, block_size: int) -> None:
        self.block_size = block_size
        self.content: Tags[int] = array("Q", [UNWRITTEN]) * (ids * block_size)
        self._rows = np.frombuffer(self.content, dtype=np.uint64).reshape(ids, block_size)
        self._poison_rows = {poison: array("Q", [poison]) * block_size for poison in POISON_NAMES}

    def write(self, tags: Tags[int], start: int, end: int, table: Sequence[int]) -> None:
        """Positions ``start`` to ``end`` land in the slots that ``table`` names."""
        size = self.block_size
        if end - start == 1:
            self.content[table[start // size] * size + start % size] = tags[start]
            return
        position = start
        if end - start >= _BULK_ROWS * size:
            position = -(-start // size) * size  # whole rows in one assignment
            last = end // size * size
            if position < last:
                rows = np.frombuffer(tags, dtype=np.uint64)[position:last].reshape(-1, size)
                self._rows[list(table[position // size : last // size])] = rows
            self._write_rows(tags, start, min(position, end), table)
            position = max(position, last)
        self._write_rows(tags, position, end, table)

    def _write_rows(self, tags: Tags[int], start: int, end: int, table: Sequence[int]) -> None:
        size, content = self.block_size, self.content
        row, offset = divmod(start, size)
        while start < end:
            stop = start + size - offset
            if stop > end:
                stop = end
            slot = table[row] * size + offset
            content[slot : slot + stop - start] = tags[start:stop]
            start, row, offset = stop, row + 1, 0

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` slots of a block."""
        size, content = self.block_size, self.content
        for offset in range(tokens):  # fewer than a block: only a partial block is copied
            content[target * size + offset] = content[source * size + offset]

    def copy_blocks(self, sources: Sequence[int], other: Shadow, targets: Sequence[int]) -> None:
        """Copy whole blocks into another shadow."""
        if len(sources) > _BULK_BLOCKS and len(sources) == len(targets):
            other._rows[list(targets)] = self._rows[list(sources)]
            return
        size = self.block_size
        for source, target in zip(sources, targets, strict=False):
            row = self.content[source * size : (source + 1) * size]
            other.content[target * size : (target + 1) * size] = row

    def read(self, blocks: Sequence[int]) -> bytes:
        """The content of whole blocks, one after another."""
        if len(blocks) > _BULK_BLOCKS:
            return self._rows[list(blocks)].tobytes()
        size, content = self.block_size, self.content
        return b"".join([content[b * size : (b + 1) * size].tobytes() for b in blocks])

    def put(self, blocks: Sequence[int], content: bytes) -> None:
        """What was once read from blocks is in these."""
        rows = np.frombuffer(content, dtype=np.uint64)
        self._rows[list(blocks)] = rows.reshape(-1, self.block_size)

    def poison(self, blocks: Sequence[int], poison: int) -> None:
        """Nobody's bytes are in these blocks any more."""
        if len(blocks) > _BULK_BLOCKS:
            self._rows[list(blocks)] = poison
            return
        size, content, row = self.block_size, self.content, self._poison_rows[poison]
        for block in blocks:
            content[block * size : (block + 1) * size] = row

    def first_mismatch(
        self, tags: Tags[int], start: int, end: int, table: Sequence[int]
    ) -> int | None:
        """The first position of ``start`` to ``end`` whose slot does not hold its tag."""
        if end - start >= _BULK_ROWS * self.block_size:
            return self._first_mismatch_bulk(tags, start, end, table)
        size, content = self.block_size, self.content
        row, offset = divmod(start, size)
        while start < end:
            stop = start + size - offset
            if stop > end:
                stop = end
            slot = table[row] * size + offset
            if content[slot : slot + stop - start] != tags[start:stop]:
                return next(p for p in range(start, stop) if content[slot + p - start] != tags[p])
            start, row, offset = stop, row + 1, 0
        return None

    def _first_mismatch_bulk(
        self, tags: Tags[int], start: int, end: int, table: Sequence[int]
    ) -> int | None:
        size = self.block_size
        first_row = start // size
        rows = self._rows[list(table[first_row : -(-end // size)])].reshape(-1)
        offset = first_row * size
        expected = np.frombuffer(tags, dtype=np.uint64)[start:end]
        differ = np.flatnonzero(rows[start - offset : end - offset] != expected)
        return start + int(differ[0]) if len(differ) else None

    def last_tag(self, block: int) -> int:
        """What the block's last slot holds."""
        return self.content[(block + 1) * self.block_size - 1]

    def last_tags(self, blocks: Iterable[int]) -> list[int]:
        """What each block's last slot holds."""
        content, size = self.content, self.block_size
        return [content[block * size + size - 1] for block in blocks]

    def describe(self, block: int, offset: int) -> str:
        """What a slot holds, in words."""
        value = self.content[block * self.block_size + offset]
        return POISON_NAMES.get(value, "another token's KV")


class States(Shadow):
    """The content of a group whose blocks hold a state each: its tag, in all slots of the block."""

    __slots__ = ()

    def write(self, tags: Tags[int], start: int, end: int, table: Sequence[int]) -> None:
        """The state after position ``end`` - 1 lands in that one's row."""
        block = table[(end - 1) // self.block_size]
        self._rows[block] = tags[end - 1]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """States are copied whole."""
        if tokens:
            self._rows[target] = self._rows[source]

    def first_mismatch(
        self, tags: Tags[int], start: int, end: int, table: Sequence[int]
    ) -> int | None:
        """The last position, unless the state after it is in its row."""
        slot = table[(end - 1) // self.block_size] * self.block_size
        return None if self.content[slot] == tags[end - 1] else end - 1
