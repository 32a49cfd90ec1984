"""ATOM: a refused or skipped operation leaves everything as it was.

Verifies: that such an operation emits no event; that its request's table, length and computed
tokens, the references of the blocks that it would have reused, and the pins of the slots that it
would have copied, are what they were.

Does not verify: state that neither the view nor an event shows; the free count is left to CONS,
which looks after refused operations as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.events import BlocksOutlived
from kvproof.invariants.operations import (
    Admit,
    Decode,
    Offload,
    Operation,
    Promote,
    Resume,
    kind_of,
)
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.property import Check, Claim, OperationHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.view import Standing


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
        self._refused: set[int] = set()
        self._hits: list[tuple[int, list[int]]] = []
        """What refused operations since the last settlement were about."""

    def expecting(self, kind: type[Operation]) -> OperationHandler | None:
        tiers = self.books.tiers
        return None if tiers is None or kind not in (Offload, Promote) else self._to_copy

    def expects(self, kind: type[Operation], status: Status) -> bool:
        return status == "refused" and super().expects(kind, status)

    def _to_copy(self, operation: Offload | Promote, outcome: Outcome) -> None:
        """What it would have copied is to be told from the books as they are now."""
        if self.books.tiers is not None and self.books.configuration.offloads_prefixes:
            self.books.tiers.plan(operation)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        books = self.books
        if [event for event in books.events if not isinstance(event, BlocksOutlived)]:
            name = type(operation).__name__.lower()
            self.fail(
                f"{name} was {outcome.status} ({outcome.reason or 'nothing to do'}), but it "
                f"changed state: {len(books.events)} event(s)",
                request=outcome.request,
            )
        # What it might have touched is to be looked at as if it had.
        if outcome.request is not None and outcome.request in books.requests:
            self._look_at(books.requests[outcome.request])
        elif isinstance(operation, Decode) and books.running:
            for index in operation.requests:
                self._look_at(books.running[index % len(books.running)])
        if outcome.status == "refused" and isinstance(operation, Admit | Resume):
            self._hits += books.predicted_hits
        if outcome.status == "refused" and isinstance(operation, Offload | Promote):
            self._slots_untouched(operation)

    def _slots_untouched(self, operation: Operation) -> None:
        """What a refused copy would have read is not pinned by it."""
        tiers = self.books.tiers
        plan = None if tiers is None else tiers.planned
        if tiers is None or plan is None or plan.source == "device":
            return  # REF
        for group, slots in plan.chosen:
            tier = tiers.of(plan.source)[group]
            actual = self.tiered.tier_pins(tier.tier, group)
            for slot in slots:
                if actual[slot] != tier.pins[slot]:
                    self.fail(
                        f"{kind_of(operation)} was refused, but {tier.tier} block {slot} went from "
                        f"{tier.pins[slot]} to {actual[slot]} pins",
                        group=tier.group,
                        block=slot,
                        tier=tier.tier,
                    )
                    return

    def _look_at(self, request: RequestModel) -> None:
        self._refused.add(request.id)
        self.books.touched_requests[request.id] = request

    def judge_standing(self, request: RequestModel, actual: Standing, expected: Standing) -> None:
        if request.id in self._refused:
            self.fail(
                f"an operation on request {request.id} was refused, but it stands as (state, "
                f"tokens, computed, rows) {actual}, not {expected}",
                request=request.id,
            )

    def settle(self) -> None:
        self._refused.clear()
        for group, blocks in self._hits:
            self._hits_unchanged(group, blocks)
        self._hits.clear()

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
