"""Keys of pages.  SGLang's tree has none: a key here is a digest of what is on a page's path."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any


def keys_of_pages(root: Any, nodes: Iterable[tuple[Any, list[int]]], size: int) -> dict[int, bytes]:
    """Page by page, heads before their extensions; ``nodes`` come parents first."""
    keys: dict[int, bytes] = {}
    last = {root: b""}
    for node, pages in nodes:
        tokens, key = node.key.token_ids, last[node.parent]
        key = key or _root_key(node.key.extra_key, node.key.cache_salt)
        for row in range(len(tokens) // size):
            key = _page_key(key, tokens[row * size : (row + 1) * size].tobytes())
            if pages:
                keys[pages[row]] = key
        last[node] = key
    return keys


@lru_cache(maxsize=1024)
def _root_key(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Where the keys of a namespace start."""
    return blake2b(repr((extra_key, cache_salt)).encode(), digest_size=16).digest()


@lru_cache(maxsize=1 << 16)
def _page_key(prefix: bytes, tokens: bytes) -> bytes:
    return blake2b(prefix + tokens, digest_size=16).digest()
