"""Verdicts and violations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from kvproof.invariants.operations import Tier

Verdict = Literal["pass", "fail", "unknown"]

_RANK: dict[Verdict, int] = {"pass": 0, "unknown": 1, "fail": 2}


def merge(*verdicts: Verdict) -> Verdict:
    """fail dominates unknown dominates pass."""
    return max(verdicts, key=_RANK.__getitem__, default="pass")


_SPECIFIC_FIRST = (
    "CRASH",
    "KEY",
    "PROV",
    "EXCL",
    "VALID",
    "PIN",
    "XFER",
    "ATOM",
    "REF",
    "ORDER",
    "RESUME",
    "QUIES",
    "CONS",
    "MET",
    "LIFE",
    "CAP",
    "PLAN",
    "FIT",
    "BUDGET",
    "HOLD",
    "PROGRESS",
    "NOEVICT",
    "FCFS",
    "PRIORITY",
    "BATCH",
    "STARVE",
    "LIVE",
    "METER",
)
SCHEDULING_PROPERTIES = frozenset(_SPECIFIC_FIRST[_SPECIFIC_FIRST.index("PLAN") :])
"""Those of a scheduler: their requests are named by arrival."""


class Violation(Struct, frozen=True):
    """A property that did not hold, in the subject's nouns."""

    property: str
    """Property code, as ``kvproof invariants`` lists it; CRASH if the subject itself raised."""
    message: str
    """One sentence: what was seen, and what should have been."""
    op: int = -1
    """Index of the operation after which it was seen; -1 before the first one."""
    group: int = 0
    block: int | None = None
    request: int | None = None
    tier: Tier = "device"
    """Where the block lies."""
    transfer: int | None = None
    block_size: int = 0
    """Of the group, where its blocks are not of the configuration's size."""


BEFORE_THE_FIRST = "before the first operation"
"""Where a violation was seen of which no operation is to blame: the fresh subject shows it."""


def place_of(violation: Violation) -> str:
    """``at operation 4``: after which operation it was seen."""
    return place(violation.op)


def place(op: int) -> str:
    """``at operation 4``; -1 is before the first one."""
    return BEFORE_THE_FIRST if op < 0 else f"at operation {op}"


def primary(violations: Sequence[Violation]) -> Violation:
    """The violation that says most, of those seen at one operation.

    One mistake often breaks several properties at once; a wrong hit, say, is also a wrong
    number of cached tokens.
    """
    return min(violations, key=lambda violation: _rank_of(violation.property))


def _rank_of(name: str) -> int:
    return _SPECIFIC_FIRST.index(name) if name in _SPECIFIC_FIRST else -1


def counted(count: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def were(count: int, noun: str) -> str:
    """``1 block was``, ``2 blocks were``."""
    return f"{counted(count, noun)} {'was' if count == 1 else 'were'}"


def tallied(count: int, noun: str) -> str:
    """As ``counted``, of what is many: ``1 run``, ``12,345 runs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
