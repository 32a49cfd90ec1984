"""How CAP compares an answer with what it predicted, and words the difference."""

from __future__ import annotations

from kvproof.invariants.operations import (
    Admit,
    Evict,
    Launch,
    Offload,
    Operation,
    Promote,
    Reserve,
    Reset,
    Resume,
    Retire,
    Withhold,
    kind_of,
)
from kvproof.invariants.outcomes import LARGER_THAN_POOL, NO_FREE_BLOCKS, Outcome
from kvproof.invariants.property import Check
from kvproof.invariants.verdict import were

_ABOUT_ROOM = (None, NO_FREE_BLOCKS, LARGER_THAN_POOL)
_COUNTED: dict[type[Operation], tuple[str, str]] = {
    Admit: ("cached token", "claimed"),
    Resume: ("cached token", "claimed"),
    Launch: ("token", "scheduled"),
    Evict: ("block", "evicted"),
    Reset: ("block", "evicted"),
    Reserve: ("block", "taken"),
    Offload: ("block", "copied"),
    Promote: ("block", "copied"),
    Withhold: ("block", "withheld"),
    Retire: ("request", "in the step"),
}
"""What an answer's figure is about, and what became of it."""


class Answers(Check):
    """A check that predicts outcomes."""

    def judge(
        self, operation: Operation, outcome: Outcome, reason: str | None, figure: int = 0
    ) -> None:
        """Compare the answer with the prediction: why refused, or which figure."""
        if outcome.reason != reason or (outcome.status == "done") != (reason is None):
            self.wrong_answer(operation, outcome, reason)
        elif reason is None:
            actual = outcome.cached_tokens or outcome.count
            if actual != figure:
                self.wrong_figure(operation, outcome, actual, figure)

    def wrong_answer(
        self,
        operation: Operation,
        outcome: Outcome,
        reason: str | None,
        status: str = "done",
        takes: str | None = None,
    ) -> None:
        """``takes``: what it takes of the free blocks, in words; None: as :meth:`takes` says."""
        did = outcome.status + (f" ({outcome.reason})" if outcome.reason else "")
        should = f"refused ({reason})" if reason else status
        about_room = reason in _ABOUT_ROOM and outcome.reason in _ABOUT_ROOM
        self.fail(
            f"{kind_of(operation)} was {did}, but it should have been {should}: {self._free()}"
            f"{(self.takes(operation, outcome) if takes is None else takes) if about_room else ''}",
            request=outcome.request,
        )

    def takes(self, operation: Operation, outcome: Outcome) -> str:
        """What the operation takes of the free blocks, in words, with the books as before it."""
        return ""

    def expected_hit(self) -> str:
        """Which blocks an admission was to find, in words."""
        return ""

    def _free(self) -> str:
        free = [group.free for group in self.groups]
        if len(free) == 1 or self.semantics.shared_pool:
            return f"{were(free[0], 'block')} free"
        return f"{', '.join(map(str, free))} blocks were free"

    def wrong_figure(
        self, operation: Operation, outcome: Outcome, actual: int, figure: int
    ) -> None:
        noun, verb = _COUNTED.get(type(operation), ("", "counted"))
        told = were(actual, noun) if noun else f"{actual} were"
        hit = self.expected_hit() if isinstance(operation, Admit | Resume) else ""
        self.fail(
            f"{kind_of(operation)}: {told} {verb}, but it should be {figure}{hit}",
            request=outcome.request,
        )

    def wrong_lookup(self, operation: Operation, outcome: Outcome, expected: str) -> None:
        self.fail(
            f"{kind_of(operation)}: the tiers below are said to answer "
            f"{outcome.lookup or 'nothing'!r}, but it should be {expected or 'nothing'!r}",
            request=outcome.request,
        )
