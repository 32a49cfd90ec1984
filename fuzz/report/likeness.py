"""Which findings look like others: one mistake may show with more operations than it needs.

Findings are told apart by what their shrunk cases need.  Where one needs all that another does and
something besides, and both say the same but for numbers, it may be the same mistake again, or a
second one.  Nobody can tell from here: both stay findings, and the one names the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvproof.fuzz.campaigns.known import owner_of
from kvproof.fuzz.campaigns.records import FindingRecord

_KEY = re.compile(r"\b[0-9a-f]{12,}…?")
_NUMBERS = re.compile(r"\d+(?:, \d+)*")


def sentence_of(message: str) -> str:
    """What it says, whichever blocks and requests it is about."""
    return _NUMBERS.sub("#", _KEY.sub("#", message))


def likenesses(findings: Sequence[FindingRecord]) -> Mapping[str, str]:
    """Of each that looks like others, the one of them that needs least."""
    alike: dict[str, str] = {}
    for finding in findings:
        others = [other for other in findings if _looks_like(finding, other)]
        if others:
            alike[finding.id] = min(others, key=_needs).id
    return alike


def _looks_like(finding: FindingRecord, other: FindingRecord) -> bool:
    """Whether it needs more than the other, and says the same.  Of what was never shrunk nobody
    knows what it needs."""
    needed, less = [{*f.kinds, *f.features} for f in (finding, other)]
    return (
        bool(other.kinds)
        and needed > less
        and finding.property == other.property
        and owner_of(finding.subject) == owner_of(other.subject)
        and sentence_of(finding.message) == sentence_of(other.message)
    )


def _needs(finding: FindingRecord) -> tuple[int, int, str]:
    return len(finding.kinds) + len(finding.features), finding.operations, finding.id
