"""CONS: no block is lost, invented or counted twice.

Verifies: after each operation that was not skipped, that the free count the subject reports and
the blocks that tables and fences hold add up to the pool, per group; in an audit, that the free
blocks are as many as the count says, without repetition, none reserved, and that each usable
block is either free or referenced.

Does not verify: who holds a referenced block (REF, EXCL); that a free block is ever used again
(no statement about liveness is made at this level).
"""

from __future__ import annotations

from kvproof.invariants.books import GroupBooks
from kvproof.invariants.operations import Operation
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim


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
            if free + group.referenced != group.usable:
                self.fail(
                    f"{free} blocks are reported free and {group.referenced} are held by tables "
                    f"or fences, which does not make the pool of {group.usable}",
                    group=group.group,
                )
            if self._host_blocks:
                self._host(group)

    def _host(self, group: GroupBooks) -> None:
        free, held = self.view.free_host_count(group.group), len(group.host_holder)
        if free + held != self._host_blocks:
            self.fail(
                f"{free} host blocks are reported free and {held} hold swapped requests, which "
                f"does not make the swap space of {self._host_blocks}",
                group=group.group,
            )

    @property
    def _host_blocks(self) -> int:
        return self.books.configuration.host_blocks

    def audit(self) -> None:
        reserved = self.semantics.reserved
        for group in self.books.groups:
            number = group.group
            listed = self.view.free_blocks(number)
            free = set(listed)
            if len(free) != len(listed):
                twice = next(b for b in listed if listed.count(b) > 1)
                self.fail(f"block {twice} is free twice", group=number, block=twice)
            if len(listed) != self.view.free_count(number):
                self.fail(
                    f"{len(listed)} blocks are in the free list, "
                    f"but the counter says {self.view.free_count(number)}",
                    group=number,
                )
            for block in free.intersection(reserved):
                self.fail(f"reserved block {block} is free", group=number, block=block)
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
