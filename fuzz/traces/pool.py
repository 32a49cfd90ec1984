"""How large a pool is that users give in bytes: ``--kv-memory 16GiB``."""

from __future__ import annotations

import re
from fractions import Fraction

from kvproof.engine.arithmetic import capacity_blocks
from kvproof.invariants.errors import InputError

_UNITS_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "PIB": 2**50,
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Z]*)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``16GiB``, ``1.5 GB`` or ``17179869184``.

    Raises :class:`InputError` for anything else, and for nothing at all: a size is positive.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None or match[2] not in _UNITS_BYTES:
        raise InputError(f"not a size: {text!r} (write it as 16GiB, 800MB or a number of bytes)")
    size_bytes = int(Fraction(match[1]) * _UNITS_BYTES[match[2]])
    if size_bytes == 0:
        raise InputError(f"a size must be positive: {text!r}")
    return size_bytes


def blocks_in(memory_bytes: int, kv_bytes_per_token: int, block_size: int) -> int:
    """Whole blocks of ``block_size`` tokens that ``memory_bytes`` hold.

    Raises :class:`InputError` if not even one does.
    """
    blocks = capacity_blocks(memory_bytes, kv_bytes_per_token, block_size)
    if blocks < 1:
        raise InputError(
            f"{memory_bytes} bytes of KV memory hold no block: one of {block_size} tokens, "
            f"{kv_bytes_per_token} bytes each, takes {kv_bytes_per_token * block_size}"
        )
    return blocks
