"""QUIES: with no request, step or transfer alive, everything is back.

Verifies: whenever the last request and the last transfer have ended and the last step is retired,
that no block has a reference left and every usable block is free, and that on lower tiers no slot
is pinned, owned or awaited.  Every run ends by draining, so each reaches it.

Does not verify: contents of the prefix cache at rest (VALID).
"""

from __future__ import annotations

from kvproof.invariants.operations import Abort, Complete, Fail, Finish, Operation, Retire
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim
from kvproof.invariants.slot_books import TierBooks


class Quies(Check):
    """Quiescence."""

    claims = (
        Claim(
            "When all requests have ended, every block is free or free and findable.",
            "chapter, life cycle: request ends → blocks released or explicitly retained for "
            "reuse; bugs B01, B02, B04, B10, B102; survey E07",
        ),
    )
    positive_control = "finish-forgets-its-table"
    counts_itself = True
    concludes_on = (Finish, Abort, Retire, Complete, Fail)
    concludes_when = ("done",)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        tiers = self.books.tiers
        if self.books.requests or self.books.steps or (tiers is not None and tiers.in_flight):
            return
        self.checked += 1
        for tier in tiers.all if tiers is not None else ():
            self._at_rest(tier)
        for group in self.books.groups:
            free = self.view.free_count(group.group) + group.withheld
            if free == group.usable and not group.referenced:
                continue
            counts = self.view.ref_counts(group.group)
            held = [
                block
                for block in range(len(group.refs))
                if block not in self.semantics.reserved and (counts[block] or group.refs[block])
            ]
            self.fail(
                "no request and no step is alive, but "
                + (f"blocks {held[:8]} are still held" if held else "not all blocks are free"),
                group=group.group,
                block=held[0] if held else None,
            )

    def _at_rest(self, tier: TierBooks) -> None:
        """Nobody has or awaits anything there."""
        pins = self.tiered.tier_pins(tier.tier, tier.group)
        busy = sorted(tier.busy.union([slot for slot, count in enumerate(pins) if count]))
        if busy or tier.pending:
            what = f"{tier.tier} blocks {busy[:8]} are held" if busy else "a copy is awaited"
            self.fail(
                f"no request and no transfer is alive, but {what}",
                group=tier.group,
                block=busy[0] if busy else None,
                tier=tier.tier,
            )
