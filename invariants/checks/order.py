"""ORDER: blocks are evicted in the stated order, and only when needed.

Verifies: where the subject promises it, that the evicted block is the one whose last reference
went the longest time ago; that nothing is evicted while an empty-free block is left; that a
request gives back its last block first; where the configuration names an order for a tier, least
recently used or ARC, the same of that tier; in an audit, that the free blocks stand in that order.

Does not verify: that every cached extension has its prefix cached too (least recently used
evicts duplicates' children out of that order, see survey R14); orders of other policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from kvproof.invariants.books import GroupBooks
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksReleased,
    Event,
    SlotsEvicted,
    TransferStarted,
)
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.slot_books import ENDS
from kvproof.invariants.subject import Semantics


class Order(Check):
    """Eviction follows the stated policy."""

    claims = (
        Claim(
            "The victim is the cached-free block whose last reference went longest ago; a hit "
            "makes a block recent.",
            "bugs B56, B59, B64; survey R12, R13",
        ),
        Claim(
            "Cached content is evicted only when no empty-free block is left.",
            "survey P08, R12",
        ),
        Claim(
            "A request gives back its tail before its head, so prefixes outlive extensions.",
            "bugs B56, B57; survey P09",
        ),
    )
    positive_control = "evicts-the-hottest"
    counts_itself = True

    @classmethod
    def promised(cls, semantics: Semantics) -> bool:
        return semantics.eviction_order != "any" or semantics.release_order == "tail_first"

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {}
        if self.semantics.eviction_order != "any":
            handlers[BlocksEvicted] = self._evicted
            handlers[BlocksAllocated] = self._allocated
            handlers[BlockCopied] = self._copied
            if self.books.tiers is not None:
                handlers[SlotsEvicted] = self._slots_evicted
                handlers[TransferStarted] = self._copy_starts
        if self.semantics.release_order == "tail_first":
            handlers[BlocksReleased] = self._released
        return handlers

    def _evicted(self, event: BlocksEvicted) -> None:
        group, blocks = self.groups[event.group], event.blocks
        self.checked += 1
        cached_free = group.cached_free if group.adaptive is None else group.adaptive
        oldest = list(islice(cached_free, len(blocks)))
        if oldest == list(blocks):
            return
        for block, expected in zip(blocks, oldest, strict=False):
            if block != expected and block in cached_free:  # else PIN, VALID
                why = "was released before it and never used since"
                if group.adaptive is not None:
                    why = "is before it in the order of ARC"
                self.fail(
                    f"block {block} was evicted ({event.cause}), but block {expected} {why}",
                    group=event.group,
                    block=block,
                )
                return

    def _slots_evicted(self, event: SlotsEvicted) -> None:
        """The next victims go, but for those that the operation is about."""
        tiers = self.books.tiers
        if tiers is None or event.cause not in ("pressure", "request"):
            return
        self.checked += 1
        tier = tiers.of(event.tier)[event.group]
        spared = tiers.protected[event.group] if event.tier == "host" else ()
        victims = islice((s for s in tier.order if s not in spared), len(event.slots))
        for slot, expected in zip(event.slots, victims, strict=False):
            if slot != expected and slot not in tier.busy and slot in tier.key_of:
                self.fail(
                    f"{event.tier} block {slot} was evicted ({event.cause}), but block {expected} "
                    "was to go before it",
                    group=event.group,
                    block=slot,
                    tier=event.tier,
                )
                return

    def _copy_starts(self, event: TransferStarted) -> None:
        """What it evicted is what it lacked."""
        tiers, target = self.books.tiers, ENDS[event.kind][1]
        if target == "device":
            evicted = len(self.groups[event.group].evicting)
            empty = self.groups[event.group].empty_free - evicted
        else:
            tier = tiers.of(target)[event.group] if tiers is not None else None
            evicted = len(tier.evicting) if tier is not None else 0
            empty = tier.empty - evicted if tier is not None else 0
        if evicted:
            self.checked += 1
            if evicted > max(0, len(event.targets) - empty):
                self.fail(
                    f"{evicted} {target} blocks were evicted for the {len(event.targets)} that "
                    f"transfer {event.transfer} needs, though {empty} were empty",
                    group=event.group,
                    tier=target,
                )

    def _allocated(self, event: BlocksAllocated) -> None:
        if self.groups[event.group].evicting:
            self._needed(self.groups[event.group], len(event.blocks), event.request)

    def _copied(self, event: BlockCopied) -> None:
        if self.groups[event.group].evicting:
            self._needed(self.groups[event.group], 1, event.request)

    def _needed(self, group: GroupBooks, blocks: int, request: int) -> None:
        evicted = len(group.evicting)
        empty = group.empty_free - evicted
        if evicted > max(0, blocks - empty):
            self.fail(
                f"{evicted} blocks were evicted for the {blocks} that request {request} needs, "
                f"though {empty} free blocks were empty",
                group=group.group,
                block=group.evicting[-1],
                request=request,
            )
        self.checked += 1

    def _released(self, event: BlocksReleased) -> None:
        request = self.books.known.get(event.request)
        if event.step is not None or request is None:
            return
        table, blocks = request.tables[event.group], event.blocks
        self.checked += 1
        if table[::-1] != list(blocks) and sorted(blocks) == sorted(table):
            self.fail(
                f"request {event.request} gave back its blocks as {list(blocks)}, not from the "
                f"tail of its table {table}",
                group=event.group,
                block=blocks[0],
                request=event.request,
            )

    def audit(self) -> None:
        if self.semantics.eviction_order == "any":
            return
        for group in self.books.groups:
            expected = list(group.cached_free if group.adaptive is None else group.adaptive)
            actual = list(self.view.free_blocks(group.group)[group.empty_free :])
            if actual != expected:
                first = next(
                    (a for a, e in zip(actual, expected, strict=False) if a != e),
                    (actual or expected)[-1],
                )
                order = "the time of their release" if group.adaptive is None else "ARC"
                self.fail(
                    f"the next victims are blocks {actual[:8]}, but by {order} they should be "
                    f"{expected[:8]}",
                    group=group.group,
                    block=first,
                )
        for tier in self.books.tiers.all if self.books.tiers is not None else ():
            expected = list(tier.order)
            actual = list(self.tiered.victims(tier.tier, tier.group))
            if actual != expected:
                self.fail(
                    f"the next victims are {tier.tier} blocks {actual[:8]}, but they should be "
                    f"{expected[:8]}",
                    group=tier.group,
                    tier=tier.tier,
                )
