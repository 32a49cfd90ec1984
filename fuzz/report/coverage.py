"""Transition coverage: which operations were done in which abstract state, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from kvproof.fuzz.campaigns.novelty import state_words
from kvproof.fuzz.report.summary import TargetSummary
from kvproof.invariants.errors import InputError
from kvproof.invariants.operations import ALL_KINDS
from kvproof.invariants.verdict import counted


class Done(Struct):
    """One operation kind in one state."""

    statuses: Counter[str]
    after: set[str]
    """The states that it led to."""

    @property
    def magnitude(self) -> int:
        """Digits of the number of times."""
        return len(str(self.statuses.total()))

    def told(self, kind: str, state: str) -> str:
        how = ", ".join(f"{count:,} {status}" for status, count in self.statuses.most_common())
        return f"{kind} with {state}: {how}; led to {counted(len(self.after), 'state')}"


class Coverage(Struct, frozen=True):
    """A table: rows are states before the operation, columns operation kinds."""

    distinct: int
    """Transitions: operation, state before, state after, outcome."""
    kinds: list[str]
    states: list[str]
    cells: dict[tuple[str, str], Done]
    """By state and kind."""


def coverage(targets: Iterable[TargetSummary]) -> Coverage:
    """Of all targets together.  Raises InputError if a journal's transition cannot be read."""
    counts: Counter[str] = Counter()
    for target in targets:
        counts.update(target.transitions)
    cells: dict[tuple[str, str], Done] = {}
    for transition, count in counts.items():
        kind, before, after, status = _parts(transition)
        done = cells.setdefault((before, kind), Done(Counter(), set()))
        done.statuses[status] += count
        done.after.add(after)
    kinds = {kind for _, kind in cells}
    return Coverage(
        len(counts),
        [kind for kind in ALL_KINDS if kind in kinds],
        sorted({state for state, _ in cells}, key=lambda state: (state.count(","), state)),
        cells,
    )


def _parts(transition: str) -> tuple[str, str, str, str]:
    """Operation, the state before and after in words, outcome."""
    try:
        kind, before, after, status = transition.split(" | ")
        if kind not in ALL_KINDS:
            raise ValueError(kind)
        return kind, state_words(before), state_words(after), status
    except (ValueError, LookupError):
        raise InputError(f"a journal has {transition!r}, which is no transition") from None
