"""REF: a block's reference count is the number of its holders.

Verifies: for each block that an operation touched, that the subject's count equals the number of
block tables, fences and transfers that hold it by the events; that a request gives back exactly
the blocks of its table, none twice, none below zero; in an audit, all counts, and that a block is
free exactly when its count is 0.

Does not verify: counts of subjects that keep none (their adapters derive them from tables, so
the comparison says little there); whether a shared block may be written (EXCL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvproof.invariants.events import BlocksOutlived, BlocksReleased, Event
from kvproof.invariants.operations import Complete, Fail, Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim, EventHandler

_SMALL = 128
"""Counts of pools up to this size are faster to compare all at once than touched one by one."""


class Ref(Check):
    """Reference counts."""

    claims = (
        Claim(
            "The reference count of a block is the number of its holders; it is never negative.",
            "bugs B03, B16, B18, B20; survey S01, E04",
        ),
        Claim(
            "When a request ends, each of its blocks loses exactly one reference, and a block "
            "without reference is free or explicitly kept findable.",
            "chapter, life cycle: request ends → blocks released or retained; bugs B04, B11, B19",
        ),
        Claim(
            "A prefix hit on a free block takes it out of the free ones in the same operation.",
            "chapter, life cycle: ownership state updated atomically; bug B20; survey R15",
        ),
    )
    positive_control = "fork-takes-no-reference"
    concludes_on = (Complete, Fail)
    concludes_when = ("done",)

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {BlocksReleased: self._released, BlocksOutlived: self._outlived}

    def _outlived(self, event: BlocksOutlived) -> None:
        request = self.books.known.get(event.request)
        table = request.tables[event.group] if request else []
        self.checked += 1
        if not set(table).issuperset(event.blocks):
            self._over_released(event, next(b for b in event.blocks if b not in table))

    def _released(self, event: BlocksReleased) -> None:
        blocks, held_blocks = event.blocks, self.groups[event.group].held
        if not held_blocks.issuperset(blocks):
            self._over_released(event, next(b for b in blocks if b not in held_blocks))
        table = self.books.given_up(event)
        if table is not None and table[::-1] != blocks and sorted(table) != sorted(blocks):
            self.fail(
                f"request {event.request} gave back blocks {list(event.blocks)}, "
                f"but its table held {table}",
                group=event.group,
                block=_first_difference(table, blocks),
                request=event.request,
            )
        self.checked += 1

    def _over_released(self, event: BlocksReleased, block: int) -> None:
        self.fail(
            f"block {block} was released by request {event.request}, but nothing held it",
            group=event.group,
            block=block,
            request=event.request,
        )

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        """What a transfer let go is free now, and soon another's."""
        tiers = self.books.tiers
        for transfer in tiers.ending if tiers is not None else ():
            for tier, blocks in (
                (transfer.source, transfer.sources),
                (transfer.target, transfer.targets),
            ):
                if tier == "device":
                    self._compare(transfer.group, blocks)

    def _compare(self, group: int, blocks: Sequence[int]) -> None:
        actual, expected = self.view.ref_counts(group), self.groups[group].refs
        for block in blocks:
            if actual[block] != expected[block]:
                self._wrong_count(group, block, actual[block], expected[block])
                return

    def settle(self) -> None:
        for group in self.groups:
            touched = group.touched
            if touched:
                actual, expected = self.view.ref_counts(group.group), group.refs
                if len(expected) <= _SMALL and actual == expected:
                    continue
                counts = map(actual.__getitem__, touched)
                if list(counts) != list(map(expected.__getitem__, touched)):
                    block = next(b for b in touched if actual[b] != expected[b])
                    self._wrong_count(group.group, block, actual[block], expected[block])

    def _wrong_count(self, group: int, block: int, actual: int, expected: int) -> None:
        self.fail(
            f"block {block} has a reference count of {actual}, but {expected} "
            f"{'holder has' if expected == 1 else 'holders have'} it",
            group=group,
            block=block,
        )

    def audit(self) -> None:
        for group in self.books.groups:
            actual: Any = self.view.ref_counts(group.group)
            if actual == group.refs:
                continue
            for block, expected in enumerate(group.refs):
                if block not in self.semantics.reserved and actual[block] != expected:
                    self._wrong_count(group.group, block, actual[block], expected)
                    break


def _first_difference(held: list[int], released: Any) -> int:
    left = list(released)
    for block in held:
        if block not in left:
            return block
        left.remove(block)
    return int(left[0]) if left else held[0]
