"""ATOM: a refused or skipped operation leaves everything as it was.

Verifies: that such an operation emits no event; that its request's table, length and computed
tokens, and the references of the blocks that it would have reused, are what they were.

Does not verify: state that neither the view nor an event shows; the free count is left to CONS,
which looks after refused operations as well.
"""

from __future__ import annotations

from kvproof.invariants.operations import Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim


class Atom(Check):
    """Operations are all-or-nothing."""

    claims = (
        Claim(
            "An admission, growth or copy that does not fit changes nothing.",
            "bugs B01, B09, B100, B156; survey P13",
        ),
        Claim(
            "Ownership and references change together or not at all.",
            "chapter, life cycle: ownership/reference state updated atomically; survey E08",
        ),
    )
    positive_control = "refused-admission-keeps-its-hits"
    concludes_when = ("refused", "skipped")

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        name = type(operation).__name__.lower()
        if self.books.events_seen:
            self.fail(
                f"{name} was {outcome.status} ({outcome.reason or 'nothing to do'}), but it "
                f"changed state: {self.books.events_seen} event(s)",
                request=outcome.request,
            )
        if outcome.request is not None and outcome.request in self.books.requests:
            self._request_unchanged(name, outcome.request)
        if outcome.status == "refused":
            self._hits_unchanged(name)

    def _request_unchanged(self, name: str, number: int) -> None:
        request, view = self.books.requests[number], self.view
        rows = [len(view.table(number, g.group)) for g in self.books.groups]
        expected = [len(table) for table in request.tables]
        before = (request.length, request.computed, expected)
        after = (view.length(number), view.computed(number), rows)
        if before != after:
            self.fail(
                f"{name} was refused, but request {number} went from (tokens, computed, blocks) "
                f"{before} to {after}",
                request=number,
            )

    def _hits_unchanged(self, name: str) -> None:
        for group, blocks in self.books.predicted_hits:
            actual = self.view.ref_counts(group)
            expected = self.books.groups[group].refs
            for block in blocks:
                if actual[block] != expected[block]:
                    self.fail(
                        f"{name} was refused, but block {block}, which it would have reused, "
                        f"went from {expected[block]} to {actual[block]} references",
                        group=group,
                        block=block,
                    )
                    return
