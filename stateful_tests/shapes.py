"""What the methods of an :class:`Adapter` may answer, and a clear word where it is not so."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvproof.invariants.subject import Configuration, Semantics


class WrongShape(Exception):
    """What a method of the adapter answers is not of the kind that is needed."""


def ids_of(what: str, answer: object) -> list[int]:
    """A copy of a list of block ids.  Raises WrongShape."""
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes | Mapping):
        answer = list(answer)
        if all(isinstance(block, int) for block in answer):
            return answer
    raise WrongShape(
        f"{what} answers {reprlib.repr(answer)}, but a list of block ids (int) is needed"
    )


def index_of(answer: object) -> Mapping[bytes, Sequence[int]]:
    """A prefix cache; what is in it, ``entries_of`` says.  Raises WrongShape."""
    if isinstance(answer, Mapping):
        return answer
    raise WrongShape(f"index() answers {reprlib.repr(answer)}, but a dict is needed")


def entries_of(answer: object) -> dict[tuple[bytes, int], None]:
    """Each key of a prefix cache with each of its blocks.  Raises WrongShape."""
    entries: dict[tuple[bytes, int], None] = {}
    for key, blocks in index_of(answer).items():
        if not isinstance(key, bytes):
            raise WrongShape(f"index() has the key {reprlib.repr(key)}, but bytes are needed")
        for block in ids_of(f"index() for the key {key.hex()[:12]}", blocks):
            entries[key, block] = None
    return entries


def counts_of(answer: Any, configuration: Configuration, semantics: Semantics) -> Sequence[int]:
    """One for each block id there is.  Raises WrongShape."""
    reserved, blocks = semantics.reserved, configuration.blocks
    if not hasattr(answer, "__len__") or not hasattr(answer, "__getitem__"):
        raise WrongShape(
            f"ref_counts() answers {reprlib.repr(answer)}, but a list of numbers is needed"
        )
    counts: Sequence[int] = answer
    entries = len(counts)
    if entries == blocks + len(reserved):
        return counts
    hint = "there is a null block, declare reserved=(0,)"
    if reserved:
        hint = f"block {reserved[0]} is yours to give, declare reserved=()"
    raise WrongShape(
        f"ref_counts() has {entries} entries, but blocks={blocks} plus reserved={reserved} make "
        f"{blocks + len(reserved)}; if {hint}"
    )
