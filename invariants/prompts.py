"""What a prompt's segments and a grow's choice mean in tokens.

Tokens are a pure function of small integers, so that a case stays short and two prompts share a
prefix exactly when their segments say so.  Long prompts are expanded with numpy; both ways give
the same tokens (a test holds them together).
"""

from __future__ import annotations

from array import array
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvproof.invariants.operations import Media, Segment

Numbers = NDArray[np.uint64]

PLACEHOLDER = 151_655
"""The token that stands for every piece of every media item, as in real vocabularies."""

_STREAM = 1024
"""Prompts up to this length are cut from remembered streams."""
CHUNK = 1024
"""Sampled tokens are remembered in chunks of so many positions."""

_MULTIPLIER = 0x9E3779B1
_INCREMENT = 0x85EBCA6B
_TOKEN_MASK = 0x0FFF_FFFF


@lru_cache(maxsize=256)
def _stream(source: int) -> array[int]:
    """The first tokens of a stream; short segments are slices of it."""
    tokens = array("I")
    tokens.frombytes(_long_segment(source, _STREAM))
    return tokens


@lru_cache(maxsize=2)  # subject and checker ask for the same prompt, one after the other
def _long_prompt(prompt: tuple[Segment, ...]) -> array[int]:
    tokens = array("I")
    for segment in prompt:
        tokens.frombytes(_long_segment(segment.source, segment.length))
    return tokens


def _long_segment(source: int, length: int) -> bytes:
    return _scramble(source * _INCREMENT + 1, 0, length, 7).astype(np.uint32).tobytes()


def _scramble(base: int, position: int, count: int, shift: int) -> Numbers:
    """Token ids at ``count`` positions from ``position`` on, from one multiplication each."""
    positions = np.arange(position, position + count, dtype=np.uint64)
    mixed = positions * np.uint64(_MULTIPLIER) + np.uint64(base & 0xFFFF_FFFF_FFFF_FFFF)
    return mixed >> np.uint64(shift) & np.uint64(_TOKEN_MASK)


def prompt_length(prompt: tuple[Segment, ...]) -> int:
    """Tokens of a prompt."""
    return sum([segment.length for segment in prompt])


def prompt_tokens(prompt: tuple[Segment, ...], media: tuple[Media, ...] = ()) -> array[int]:
    """The prompt's tokens, a new ``array("I")``."""
    if prompt_length(prompt) <= _STREAM:
        tokens = array("I")
        for segment in prompt:
            tokens += _stream(segment.source)[: segment.length]
    else:
        tokens = _long_prompt(prompt)[:]
    for item in clip_media(media, len(tokens)) if media else ():
        for position in range(item.start, item.start + item.length):
            tokens[position] = PLACEHOLDER
    return tokens


def clip_media(media: tuple[Media, ...], length: int) -> tuple[Media, ...]:
    """Media items as they lie in a prompt of ``length`` tokens, in order.

    A position shows one item: those that begin within another, or beyond the prompt, are dropped,
    and the last is cut at the prompt's end.
    """
    placed: list[Media] = []
    end = 0
    for item in sorted(media, key=_place):
        if end <= item.start < length:
            placed.append(Media(item.item, item.start, min(item.length, length - item.start)))
            end = item.start + item.length
    return tuple(placed)


def _place(item: Media) -> tuple[int, int, int]:
    return item.start, item.item, item.length


def sampled_tokens(choice: int, position: int, count: int) -> list[int]:
    """The tokens that ``choice`` samples from ``position`` on; equal choices continue equally."""
    chunk, offset = divmod(position, CHUNK)
    tokens = _sampled_list(choice, chunk)[offset : offset + count]
    while len(tokens) < count:
        chunk += 1
        tokens += _sampled_list(choice, chunk)[: count - len(tokens)]
    return tokens


def sampled_token(choice: int, position: int) -> int:
    """The one token that ``choice`` samples at ``position``."""
    return _sampled_list(choice, position // CHUNK)[position % CHUNK]


def sampled_chunk(choice: int, chunk: int) -> Numbers:
    """The tokens that ``choice`` samples at the ``CHUNK`` positions from ``chunk·CHUNK`` on."""
    return _scramble(choice * _INCREMENT + 0x1234567, chunk * CHUNK, CHUNK, 5)


@lru_cache(maxsize=512)
def _sampled_list(choice: int, chunk: int) -> list[int]:
    tokens: list[int] = sampled_chunk(choice, chunk).tolist()
    return tokens
