"""CONS: no block is lost, invented or counted twice.

Verifies: after each operation that was not skipped, that the free count the subject reports and
the blocks that tables, fences and transfers hold add up to the pool, per group, and likewise on
each lower tier, where transfers and swapped requests hold slots; in an audit, that the free
blocks are as many as the count says, without repetition, none reserved, and that each usable
block is either free or referenced.

Does not verify: who holds a referenced block (REF, EXCL); that a free block is ever used again
(no statement about liveness is made at this level).
"""

from __future__ import annotations

from kvproof.invariants.operations import (
    Offload,
    Operation,
    Preempt,
    Promote,
    Resume,
    Withhold,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim
from kvproof.invariants.slot_books import TierBooks
from kvproof.invariants.tier_books import Tiers

_ON_TIERS = frozenset({Offload, Promote, Preempt, Resume, Withhold})
"""What takes slots of lower tiers, or is refused for want of them."""


class Cons(Check):
    """Conservation of blocks."""

    claims = (
        Claim(
            "Free blocks and allocated blocks together are the pool, at every moment.",
            "chapter, accounting: free_blocks + allocated_blocks = pool_blocks; survey E02",
        ),
        Claim(
            "At least as many blocks are allocated as live block tables name different ones.",
            "chapter, accounting: allocated_blocks >= blocks referenced; survey E01",
        ),
        Claim(
            "A counter of free blocks equals the length of the free list, without clamping.",
            "bugs B06, B160",
        ),
        Claim(
            "The null block and other reserved blocks are never free.",
            "survey P11, D02",
        ),
    )
    positive_control = "counter-drifts"
    concludes_when = ("done", "refused")

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        for group in self.groups:
            free = self.view.free_count(group.group)
            if free != group.free:
                withheld = f", {group.withheld} are withheld" if group.withheld else ""
                self.fail(
                    f"{free} blocks are reported free{withheld} and {group.referenced} are held by "
                    f"tables, fences or transfers, which does not make the pool of {group.usable}",
                    group=group.group,
                )
        tiers = self.books.tiers
        if tiers is not None and (tiers.moved or operation.__class__ in _ON_TIERS):
            self._count_slots(tiers)

    def _count_slots(self, tiers: Tiers) -> None:
        tiers.moved = False
        for tier in tiers.all:
            free = self.tiered.free_tier_count(tier.tier, tier.group)
            if free != tier.free:
                self._wrong_slots(tier, free)

    def settle(self) -> None:
        if self.books.tiers is not None:
            self._count_slots(self.books.tiers)

    def _wrong_slots(self, tier: TierBooks, free: int) -> None:
        pins = self.tiered.tier_pins(tier.tier, tier.group)
        differs = (slot for slot, count in enumerate(tier.pins) if pins[slot] != count)
        withheld = f", {tier.withheld} are withheld" if tier.withheld else ""
        self.fail(
            f"{free} {tier.tier} blocks are reported free{withheld} and {len(tier.busy)} are "
            "pinned by transfers or hold swapped requests, which does not make the tier's "
            f"{tier.capacity}",
            group=tier.group,
            block=next(differs, None),
            tier=tier.tier,
            transfer=self._latest(tier),
        )

    def _latest(self, tier: TierBooks) -> int | None:
        """The transfer that took slots of the tier, or gave them back, last."""
        tiers = self.books.tiers
        known = [] if tiers is None else [*tiers.in_flight.values(), *tiers.ending]
        here = [
            transfer.number
            for transfer in known
            if transfer.group == tier.group and tier.tier in (transfer.source, transfer.target)
        ]
        return here[-1] if here else None

    def audit(self) -> None:
        reserved = self.semantics.reserved
        for group in self.books.groups:
            number = group.group
            listed = self.view.free_blocks(number)
            free = set(listed)
            if len(free) != len(listed):
                twice = next(b for b in listed if listed.count(b) > 1)
                self.fail(f"block {twice} is free twice", group=number, block=twice)
            counted = self.view.free_count(number) + group.withheld
            if len(listed) != counted:
                self.fail(
                    f"{len(listed)} blocks are in the free list, but the counter says {counted}",
                    group=number,
                )
            for block in free.intersection(reserved):
                hint = f"; if block {block} is yours to give, declare reserved=()"
                hint *= len(reserved) == 1 and not self.books.known
                self.fail(f"reserved block {block} is free{hint}", group=number, block=block)
            held = len(group.refs) - len(reserved) - len(free)
            if held != group.referenced or any(map(group.refs.__getitem__, listed)):
                self._name_the_lost(number, free)

    def _name_the_lost(self, number: int, free: set[int]) -> None:
        refs = self.books.groups[number].refs
        for block, count in enumerate(refs):
            if block not in self.semantics.reserved and (count == 0) != (block in free):
                where = "neither free nor held" if count == 0 else f"free, and held {count} times"
                self.fail(f"block {block} is {where}", group=number, block=block)
                return
