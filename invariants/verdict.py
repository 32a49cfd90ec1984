"""Verdicts and violations."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Verdict = Literal["pass", "fail", "unknown"]

_RANK: dict[Verdict, int] = {"pass": 0, "unknown": 1, "fail": 2}


def merge(*verdicts: Verdict) -> Verdict:
    """fail dominates unknown dominates pass."""
    return max(verdicts, key=_RANK.__getitem__, default="pass")


class Violation(Struct, frozen=True):
    """A property that did not hold, in the subject's nouns."""

    property: str
    """Property code, as ``kvproof invariants`` lists it; CRASH if the subject itself raised."""
    message: str
    """One sentence: what was seen, and what should have been."""
    op: int = -1
    """Index of the operation after which it was seen."""
    group: int = 0
    block: int | None = None
    request: int | None = None
    by_audit: bool = False
    """Seen by a full audit only: the operation to blame may be an earlier one."""
