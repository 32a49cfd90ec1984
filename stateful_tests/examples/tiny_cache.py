"""A paged cache with a prefix cache, as small as can be: what the template drives.

It knows tokens and blocks and nothing of kvproof.  Tables are lists that it fills and empties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import takewhile


class Cache:
    """Blocks 1 to ``blocks``; those without content are taken first, then the longest free."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(1, blocks + 1))
        """To be taken from the front."""
        self.refs = [0] * (blocks + 1)
        self.block_of: dict[bytes, int] = {}
        """The prefix cache."""
        self.key_of: dict[int, bytes] = {}

    def hits(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix; at least one token is left to compute."""
        found = (self.block_of.get(key, 0) for key in self._keys(tokens[:-1]))
        return list(takewhile(bool, found))

    def take(self, table: list[int], tokens: int, hits: Sequence[int] = ()) -> bool:
        """Add the hits and as many blocks as so many tokens need; False, and nothing, if too few
        are free."""
        lacking = -(-tokens // self.block_size) - len(table) - len(hits)
        room = [block for block in self.free if block not in hits]
        if lacking > len(room):
            return False
        self.forget(room[:lacking])
        taken = [*hits, *room[:lacking]]
        for block in taken:
            self.refs[block] += 1
        table += taken
        self.free = [block for block in self.free if not self.refs[block]]
        return True

    def give_back(self, table: list[int]) -> None:
        """The last block first, so that it is the first to be taken."""
        while table:
            block = table.pop()
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.insert(len(self.free) if block in self.key_of else 0, block)

    def publish(self, table: Sequence[int], tokens: Sequence[int]) -> None:
        """The full blocks of these tokens are computed."""
        for block, key in zip(table, self._keys(tokens), strict=False):
            if self.block_of.setdefault(key, block) == block:
                self.key_of[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """Nothing is to be found in these blocks any more."""
        for block in blocks:
            self.block_of.pop(self.key_of.pop(block, b""), None)

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of all full blocks; each stands for all the tokens up to its end."""
        keys, key, size = [], b"", self.block_size
        for end in range(size, len(tokens) + 1, size):
            key = sha256(key + repr(tokens[end - size : end]).encode()).digest()
            keys.append(key)
        return keys
