"""Chained block keys: a block's key stands for its whole prefix, and for who may share it.

key(block i) = SHA-256(key(block i-1), tokens of block i, media in block i); the first parent is
a root that carries group, salt and adapter, so that every descendant is separated by them.
The encoding is injective: parent and tokens have fixed lengths, each field of the root its own
place.  A strong digest, since a hit is not confirmed by comparing tokens (survey rows R02, R09,
R10, R25; bugs B45, B47, B50, B51 of the catalogue are keys that were not injective).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from struct import pack

from kvproof.invariants.operations import Media


@lru_cache(maxsize=4096)
def root_key(group: int, salt: int, adapter: int) -> bytes:
    """The parent of a first block."""
    return sha256(pack("<8sQQQ", b"kv-root", group, salt, adapter)).digest()


def media_part(media: Sequence[Media], start: int, end: int) -> bytes:
    """What tells media in tokens ``start`` to ``end`` apart: which items, and where they begin."""
    parts = [
        pack("<Qq", item.item, item.start - start)
        for item in media
        if item.start < end and start < item.start + item.length
    ]
    return b"".join(parts)


def block_key(parent: bytes, tokens: array[int], media: bytes) -> bytes:
    """Key of a full block with these tokens after the prefix ``parent``."""
    return sha256(parent + tokens.tobytes() + media).digest()
