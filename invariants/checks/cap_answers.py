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
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check


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
        self, operation: Operation, outcome: Outcome, reason: str | None, status: str = "done"
    ) -> None:
        did = outcome.status + (f" ({outcome.reason})" if outcome.reason else "")
        should = f"refused ({reason})" if reason else status
        free = ", ".join(str(g.free) for g in self.books.groups)
        self.fail(
            f"{kind_of(operation)} was {did}, but it should have been {should}: {free} blocks "
            "were free",
            request=outcome.request,
        )

    def wrong_figure(
        self, operation: Operation, outcome: Outcome, actual: int, figure: int
    ) -> None:
        what = {
            Admit: "cached tokens were claimed",
            Resume: "cached tokens were claimed",
            Launch: "tokens were scheduled",
            Evict: "blocks were evicted",
            Reset: "blocks were evicted",
            Reserve: "blocks were taken",
            Offload: "blocks are copied",
            Promote: "blocks are copied",
            Withhold: "blocks are withheld",
            Retire: "requests came back",
        }.get(type(operation), "were counted")
        self.fail(
            f"{kind_of(operation)}: {actual} {what}, but it should be {figure}",
            request=outcome.request,
        )

    def wrong_lookup(self, operation: Operation, outcome: Outcome, expected: str) -> None:
        self.fail(
            f"{kind_of(operation)}: the tiers below are said to answer "
            f"{outcome.lookup or 'nothing'!r}, but it should be {expected or 'nothing'!r}",
            request=outcome.request,
        )
