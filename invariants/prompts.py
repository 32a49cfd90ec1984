"""What a prompt's segments and a grow's choice mean in tokens.

Tokens are a pure function of small integers, so that a case stays short and two prompts share a
prefix exactly when their segments say so.  Long prompts are expanded with numpy; both ways give
the same tokens (a test holds them together).
"""

from __future__ import annotations

from array import array
from functools import lru_cache

import numpy as np

from kvproof.invariants.operations import Media, Segment

PLACEHOLDER = 151_655
"""The token that stands for every piece of every media item, as in real vocabularies."""

_SMALL = 96
"""Up to this many tokens a Python loop beats numpy's start-up costs."""

_MULTIPLIER = 0x9E3779B1
_INCREMENT = 0x85EBCA6B
_TOKEN_MASK = 0x0FFF_FFFF


def _segment_small(source: int, length: int) -> list[int]:
    base = source * _INCREMENT + 1
    return [(base + i * _MULTIPLIER) >> 7 & _TOKEN_MASK for i in range(length)]


def _segment_large(source: int, length: int) -> np.ndarray:
    steps = np.arange(length, dtype=np.uint64) * np.uint64(_MULTIPLIER)
    base = np.uint64((source * _INCREMENT + 1) & 0xFFFF_FFFF_FFFF_FFFF)
    return ((base + steps) >> np.uint64(7) & np.uint64(_TOKEN_MASK)).astype(np.uint32)


def _expand(prompt: tuple[Segment, ...], media: tuple[Media, ...]) -> array[int]:
    tokens = array("I")
    for segment in prompt:
        if segment.length <= _SMALL:
            tokens.extend(_segment_small(segment.source, segment.length))
        else:
            tokens.frombytes(_segment_large(segment.source, segment.length).tobytes())
    for item in media:
        for position in range(item.start, min(item.start + item.length, len(tokens))):
            tokens[position] = PLACEHOLDER
    return tokens


_expand_cached = lru_cache(maxsize=512)(_expand)


def prompt_length(prompt: tuple[Segment, ...]) -> int:
    """Tokens of a prompt."""
    return sum(segment.length for segment in prompt)


def prompt_tokens(prompt: tuple[Segment, ...], media: tuple[Media, ...] = ()) -> array[int]:
    """The prompt's tokens, an ``array('I')`` that the caller must not change."""
    if prompt_length(prompt) <= 1024:
        return _expand_cached(prompt, media)
    return _expand(prompt, media)


def sampled_token(choice: int, position: int) -> int:
    """The token that ``choice`` samples at ``position``; equal choices continue equally."""
    return (choice * _INCREMENT + position * _MULTIPLIER + 0x1234567) >> 5 & _TOKEN_MASK
