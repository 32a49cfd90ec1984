"""QUIES: with no request and no step alive, everything is back.

Verifies: whenever the last request has ended and the last step is retired, that no block has a
reference left and every usable block is free.  Every run ends by draining, so each reaches it.

Does not verify: contents of the prefix cache at rest (VALID).
"""

from __future__ import annotations

from kvproof.invariants.operations import Abort, Finish, Operation, Retire
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim


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
    concludes_on = (Finish, Abort, Retire)
    concludes_when = ("done",)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        if self.books.requests or self.books.steps:
            return
        self.checked += 1
        for group in self.books.groups:
            if group.host_holder:
                self.fail(
                    f"no request is alive, but host blocks {list(group.host_holder)[:8]} are held",
                    group=group.group,
                )
            if self.view.free_count(group.group) == group.usable and not group.referenced:
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
