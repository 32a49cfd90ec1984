"""Provenance tags: what a slot must hold, as one 64-bit number per token position.

The tag of position *i* is a digest of (salt, adapter, media, tokens 0..i).  A write puts tags
into physical slots; a read compares them with what the sequence's own history says.  Equal tags
mean equal content, whoever wrote it, so a legal share never looks like a fault.

The digest is h[i] = h[i-1]·P + mix(token[i]) modulo 2^64 with an odd P, from a root that digests
salt and adapter.  It is linear in the mixed tokens, so a whole prompt is one numpy cumulative sum
(P is invertible), while a sampled token costs one multiplication.  It serves kvproof's books,
not security: tokens are not chosen by an adversary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from kvproof.invariants.operations import Media, Segment
from kvproof.invariants.prompts import (
    CHUNK,
    Numbers,
    clip_media,
    prompt_length,
    prompt_tokens,
    sampled_chunk,
)

Tags = array  # array("Q"), one tag per token position


def tag_at_end(content: bytes) -> int:
    """The last of the tags that these bytes are; 0 if there is none."""
    return array("Q", content[-8:])[0] if content else 0


MASK = (1 << 64) - 1
_P = 0x9E3779B97F4A7C15
_P_INVERSE = pow(_P, -1, 1 << 64)
_MIX = 0xD6E8FEB86659FD93

_STEM = 1024
"""First segments up to this length are cut from remembered tags …"""
_TAIL = 96
"""… and the rest, up to this length, is continued in Python; beyond, numpy is faster."""

# Poison: what a slot holds while nobody's bytes are in it.  No tag equals one, but by a chance of
# one in 2^64.
UNWRITTEN = 1
FREED = 2
EVICTED = 3
IN_FLIGHT = 4
POISON_NAMES = {
    UNWRITTEN: "never written",
    FREED: "freed",
    EVICTED: "evicted",
    IN_FLIGHT: "still on its way",
}


@lru_cache(maxsize=4096)
def root_tag(salt: int, adapter: int) -> int:
    """Where the chain of a sequence starts."""
    return _digest(f"root {salt} {adapter}")


@lru_cache(maxsize=1024)
def _media_marks(item: int, length: int) -> Tags[int]:
    """What a media item adds at each of its tokens."""
    return array("Q", [_digest(f"media {item} {offset}") for offset in range(length)])


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def extend_tags(tags: Tags[int], last: int, tokens: Iterable[int]) -> None:
    """Append the tags of further tokens after a position (or root) with tag ``last``."""
    for token in tokens:
        mixed = token * _MIX & MASK
        last = (last * _P + (mixed ^ mixed >> 29)) & MASK
        tags.append(last)


def extend_sampled(tags: Tags[int], choice: int, count: int) -> None:
    """Append the tags of ``count`` tokens that ``choice`` samples after a sequence's tags."""
    last = tags[-1]
    chunk, offset = divmod(len(tags), CHUNK)
    mixes = _mixed_samples(choice, chunk)[offset : offset + count]
    while len(mixes) < count:
        chunk += 1
        mixes += _mixed_samples(choice, chunk)[: count - len(mixes)]
    for mixed in mixes:
        last = (last * _P + mixed) & MASK
        tags.append(last)


def extend_each(sequences: Sequence[Tags[int]], choice: int) -> None:
    """Append to each sequence's tags that of the one token that ``choice`` samples after them."""
    for tags in sequences:
        chunk, offset = divmod(len(tags), CHUNK)
        tags.append((tags[-1] * _P + _mixed_samples(choice, chunk)[offset]) & MASK)


@lru_cache(maxsize=512)
def _mixed_samples(choice: int, chunk: int) -> list[int]:
    """What the sampled tokens of a chunk add to the tags."""
    mixes: list[int] = _mix(sampled_chunk(choice, chunk)).tolist()
    return mixes


def _mix(tokens: Numbers) -> Numbers:
    """The mixed tokens, of which tags are linear."""
    mixed = tokens * np.uint64(_MIX)
    return mixed ^ mixed >> np.uint64(29)


def prompt_tags(
    prompt: tuple[Segment, ...], salt: int, adapter: int, media: tuple[Media, ...]
) -> Tags[int]:
    """Tags of a prompt's positions; the caller must copy before it changes them."""
    stem = prompt[0]
    tail_length = prompt_length(prompt[1:]) if len(prompt) > 1 else 0
    if stem.length > _STEM or tail_length > _TAIL:
        return _bulk_tags(prompt, salt, adapter, media)
    if media:
        return _tags_with_media(prompt, salt, adapter, media)
    tags: Tags[int] = _stem_tags(salt, adapter, stem.source)[: stem.length]
    if tail_length:
        extend_tags(tags, tags[-1], prompt_tokens(prompt[1:]))
    return tags


@lru_cache(maxsize=2048)
def _tags_with_media(
    prompt: tuple[Segment, ...], salt: int, adapter: int, media: tuple[Media, ...]
) -> Tags[int]:
    """A short prompt with media, position by position."""
    tokens = prompt_tokens(prompt, media)
    if len(tokens) > _TAIL:
        return _bulk_tags(prompt, salt, adapter, media)
    marks = [0] * len(tokens)
    for item in clip_media(media, len(tokens)):
        marks[item.start : item.start + item.length] = _media_marks(item.item, item.length)
    tags: Tags[int] = array("Q")
    tag = root_tag(salt, adapter)
    for position, token in enumerate(tokens):
        mixed = token * _MIX & MASK
        tag = (tag * _P + (mixed ^ mixed >> 29 ^ marks[position])) & MASK
        tags.append(tag)
    return tags


@lru_cache(maxsize=512)
def _stem_tags(salt: int, adapter: int, source: int) -> Tags[int]:
    """Tags of the first positions of a prompt that starts with stream ``source``."""
    return _bulk_tags((Segment(source, _STEM),), salt, adapter, ())


def _bulk_tags(
    prompt: tuple[Segment, ...], salt: int, adapter: int, media: tuple[Media, ...]
) -> Tags[int]:
    tokens = np.frombuffer(prompt_tokens(prompt, media), dtype=np.uint32)
    mixed = _mix(tokens.astype(np.uint64))
    for item in clip_media(media, len(mixed)):
        marks = np.frombuffer(_media_marks(item.item, item.length), dtype=np.uint64)
        mixed[item.start : item.start + item.length] ^= marks
    powers, inverses = _powers(1 << (len(mixed) - 1).bit_length())
    sums = np.cumsum(mixed * inverses[: len(mixed)], dtype=np.uint64)
    hashed = (sums + np.uint64(root_tag(salt, adapter))) * powers[: len(mixed)]
    tags: Tags[int] = array("Q")
    tags.frombytes(hashed.tobytes())
    return tags


@lru_cache(maxsize=24)
def _powers(length: int) -> tuple[Numbers, Numbers]:
    """P^(i+1) and P^-(i+1) modulo 2^64."""
    powers = np.cumprod(np.full(length, _P, dtype=np.uint64), dtype=np.uint64)
    inverses = np.cumprod(np.full(length, _P_INVERSE, dtype=np.uint64), dtype=np.uint64)
    return powers, inverses
