"""ATOM: a refused or skipped operation leaves everything as it was.

Verifies: that such an operation emits no event; that its request's table, length and computed
tokens, and the references of the blocks that it would have reused, are what they were.

Does not verify: state that neither the view nor an event shows; the free count is left to CONS,
which looks after refused operations as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.books import RequestModel
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

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._refused: dict[int, RequestModel] = {}
        self._hits: list[tuple[int, list[int]]] = []
        """What refused operations since the last settlement were about."""

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        books = self.books
        if books.events_seen:
            name = type(operation).__name__.lower()
            self.fail(
                f"{name} was {outcome.status} ({outcome.reason or 'nothing to do'}), but it "
                f"changed state: {books.events_seen} event(s)",
                request=outcome.request,
            )
        # What it might have touched is to be looked at as if it had.
        if outcome.request is not None and outcome.request in books.requests:
            self._refused[outcome.request] = books.requests[outcome.request]
        if outcome.reason is not None:
            self._hits += books.predicted_hits
            books.predicted_hits = []

    def settle(self) -> None:
        for request in self._refused.values():
            if self.books.requests.get(request.id) is request:
                self._request_unchanged(request)
        self._refused.clear()
        for group, blocks in self._hits:
            self._hits_unchanged(group, blocks)
        self._hits.clear()

    def _request_unchanged(self, request: RequestModel) -> None:
        view, number = self.view, request.id
        expected = [len(table) for table in request.tables]
        rows = [len(view.table(number, group.group)) for group in self.groups]
        before = (request.length, request.computed, expected)
        after = (view.length(number), view.computed(number), rows)
        if before != after:
            self.fail(
                f"an operation was refused, but request {number} went from (tokens, computed, "
                f"blocks) {before} to {after}",
                request=number,
            )

    def _hits_unchanged(self, group: int, blocks: Sequence[int]) -> None:
        actual, expected = self.view.ref_counts(group), self.groups[group].refs
        for block in blocks:
            if actual[block] != expected[block]:
                self.fail(
                    f"an admission was refused, but block {block}, which it would have reused, "
                    f"went from {expected[block]} to {actual[block]} references",
                    group=group,
                    block=block,
                )
                return
