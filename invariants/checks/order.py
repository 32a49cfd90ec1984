"""ORDER: blocks are evicted in the stated order, and only when needed.

Verifies: where the subject promises it, that the evicted block is the one whose last reference
went the longest time ago; that nothing is evicted while an empty-free block is left, be it for a
block that is taken or for none; that a request gives back its last block first; where the
configuration names an order for a tier, least recently used or ARC, the same of that tier; in an
audit, that the free blocks stand in that order; where content goes in pieces, that none goes when
there is enough; where the subject shows when each was last used, that hits and publications are
uses, and that the longest unused go first.

Does not verify: that every cached extension has its prefix cached too (least recently used
evicts duplicates' children out of that order, see survey R14); orders of other policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise

from kvproof.invariants.books import Books
from kvproof.invariants.checks.order_pieces import Pieces
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    Event,
    KeyMoved,
    SlotsEvicted,
    TransferStarted,
    why_evicted,
)
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import Operation, Promote, Tier
from kvproof.invariants.orders import Adaptive
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.property import Check, Claim, EventHandler, OperationHandler
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.slot_books import ENDS, TierBooks
from kvproof.invariants.subject import Semantics
from kvproof.invariants.verdict import Violation, were
from kvproof.invariants.view import View


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

    def __init__(
        self,
        books: Books,
        shadows: list[Shadow],
        view: View,
        report: Callable[[Violation], None],
    ) -> None:
        super().__init__(books, shadows, view, report)
        self._pieces = Pieces(self) if _in_pieces(self.semantics) else None

    @classmethod
    def promised(cls, semantics: Semantics) -> bool:
        tiers: tuple[Tier, ...] = ("device", "host", "disk") if semantics.tiers else ("device",)
        ordered = any(semantics.promises_order(tier) for tier in tiers)
        return ordered or semantics.release_order == "tail_first" or _in_pieces(semantics)

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {}
        if self.semantics.promises_order("device"):
            handlers[BlocksEvicted] = self._evicted
            if self.semantics.exact_eviction:
                handlers[BlocksAllocated] = self._allocated
                handlers |= {BlockCopied: self._copied, KeyMoved: self._copied}
        if self.books.tiers is not None:
            handlers[BlocksEvicted] = self._evicted
            handlers[SlotsEvicted] = self._slots_evicted
            handlers[TransferStarted] = self._copy_starts
        if self.semantics.release_order == "tail_first":
            handlers[BlocksReleased] = self._released
        if self._pieces is not None:
            handlers |= {
                kind: _both(handlers.get(kind), handler)
                for kind, handler in self._pieces.handlers().items()
            }
        return handlers

    def concludes(self, kind: type[Operation], status: Status) -> bool:
        return self._pieces is not None and super().concludes(kind, status)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        if self._pieces is not None:
            self._pieces.conclude(operation, outcome)

    def expecting(self, kind: type[Operation]) -> OperationHandler | None:
        exact = self.books.tiers is not None and self.semantics.exact_tiers
        return self._promoting if exact and kind is Promote else None

    def expects(self, kind: type[Operation], status: Status) -> bool:
        return status == "done" and super().expects(kind, status)

    def _promoting(self, operation: Promote, outcome: Outcome) -> None:
        """What it must not evict is to be told from the books as they are now."""
        if self.books.tiers is not None:
            self.books.tiers.plan(operation)

    def _spared(self, tier: Tier, group: int) -> frozenset[int]:
        """What the present operation must not evict there: it is about the same prompt."""
        plan = None if self.books.tiers is None else self.books.tiers.planned
        return frozenset() if plan is None or plan.target != tier else plan.spared[group]

    def _goes_too_far(self, tier: Tier, group: int, blocks: Sequence[int]) -> bool:
        """Whether a copy upwards evicts what it is to be found behind."""
        spared = self._spared(tier, group)
        if spared.isdisjoint(blocks):
            return False
        block = next(block for block in blocks if block in spared)
        self.fail(
            f"{tier} block {block} was evicted for a copy of other blocks of the same prompt",
            group=group,
            block=block,
            tier=tier,
        )
        return True

    def _evicted(self, event: BlocksEvicted) -> None:
        group, blocks = self.groups[event.group], event.blocks
        self.checked += 1
        if self._goes_too_far("device", event.group, blocks):
            return
        if not self.semantics.promises_order("device"):
            return
        if event.cause == "pressure" and self._in_vain(event, group):
            return
        cached_free = group.cached_free if group.adaptive is None else group.adaptive
        spared = self._spared("device", event.group)
        next_ones = cached_free if not spared else (b for b in cached_free if b not in spared)
        oldest = list(islice(next_ones, len(blocks)))
        if oldest == list(blocks):
            return
        for block, expected in zip(blocks, oldest, strict=False):
            if block != expected and block in cached_free:  # else PIN, VALID
                why = "was released before it and never used since"
                if group.adaptive is not None:
                    why = f"is before it in the order of ARC: {group.adaptive.describe()}"
                self.fail(
                    f"block {block} was evicted {why_evicted(event.cause)}, "
                    f"but block {expected} {why}",
                    group=event.group,
                    block=block,
                )
                return

    def _in_vain(self, event: BlocksEvicted, group: GroupBooks) -> bool:
        """Whether nothing is taken after it, though a block was empty; tells what nobody held."""
        empty = group.empty_free - len(group.evicting)
        if empty <= 0 or not self.semantics.exact_eviction or not self._is_last_to_move(event):
            return False
        blocks = [block for block in event.blocks if block in group.cached_free]
        if blocks:  # else PIN, VALID
            self.fail(
                f"{_named(blocks)} evicted {why_evicted(event.cause)}, but the operation takes no "
                f"block after that, and {were(empty, 'free block')} empty{self._rekeyed(event)}",
                group=event.group,
                block=blocks[0],
            )
        return bool(blocks)

    def _is_last_to_move(self, event: BlocksEvicted) -> bool:
        """Whether nothing is taken from its pool in the same operation after it."""
        shared = self.semantics.shared_pool
        for later in reversed(self.books.events):
            if later is event:
                return True
            if (
                isinstance(later, BlocksAllocated | BlockCopied | KeyMoved)
                or (isinstance(later, TransferStarted) and ENDS[later.kind][1] == "device")
            ) and (shared or later.group == event.group):
                return False
        return False

    def _rekeyed(self, event: BlocksEvicted) -> str:
        """Which other block became findable under the same key, in the same operation."""
        for other in self.books.events:
            if isinstance(other, BlocksPublished) and other.group == event.group:
                for block, key in zip(other.blocks, other.keys, strict=False):
                    if key in event.keys:
                        return f": block {block} became findable under its key"
        return ""

    def _slots_evicted(self, event: SlotsEvicted) -> None:
        """The next victims go, but for those that the operation is about."""
        tiers = self.books.tiers
        if tiers is None or event.cause not in ("pressure", "request"):
            return
        self.checked += 1
        tier = tiers.of(event.tier)[event.group]
        if self._goes_too_far(event.tier, event.group, event.slots):
            return
        if not self.semantics.promises_order(event.tier):
            return
        spared = self._spared(event.tier, event.group)
        victims = islice((s for s in tier.order if s not in spared), len(event.slots))
        for slot, expected in zip(event.slots, victims, strict=False):
            if slot != expected and slot not in tier.busy and slot in tier.key_of:
                by = (
                    f": by ARC, {tier.order.describe()}" if isinstance(tier.order, Adaptive) else ""
                )
                self.fail(
                    f"{event.tier} block {slot} was evicted {why_evicted(event.cause)}, "
                    f"but block {expected} was to go before it{by}",
                    group=event.group,
                    block=slot,
                    tier=event.tier,
                )
                return

    def _copy_starts(self, event: TransferStarted) -> None:
        """What it evicted is what it lacked."""
        tiers, target = self.books.tiers, ENDS[event.kind][1]
        if not self.semantics.promises_order(target):
            return
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
                    f"{were(evicted, f'{target} block')} evicted for the {len(event.targets)} that "
                    f"transfer {event.transfer} needs, though {were(empty, 'block')} empty",
                    group=event.group,
                    tier=target,
                )

    def _allocated(self, event: BlocksAllocated) -> None:
        if self.groups[event.group].evicting:
            self._needed(self.groups[event.group], len(event.blocks), event.request)

    def _copied(self, event: BlockCopied | KeyMoved) -> None:
        if self.groups[event.group].evicting:
            self._needed(self.groups[event.group], 1, event.request)

    def _needed(self, group: GroupBooks, blocks: int, request: int) -> None:
        evicted = len(group.evicting)
        empty = group.empty_free - evicted
        if evicted > max(0, blocks - empty):
            self.fail(
                f"{were(evicted, 'block')} evicted for the {blocks} that request {request} needs"
                f"{self._before(group)}, though {were(empty, 'free block')} empty"
                f"{self._empty_ones(group)}",
                group=group.group,
                block=group.evicting[-1],
                request=request,
            )
        self.checked += 1

    def _before(self, group: GroupBooks) -> str:
        """Which of the blocks were evicted by operations before this one."""
        now = [
            block
            for event in self.books.events
            if isinstance(event, BlocksEvicted)
            for block in event.blocks
        ]
        before = [block for block in group.evicting if block not in now]
        return f" ({_named(before)} evicted by an operation before it)" if before else ""

    def _empty_ones(self, group: GroupBooks) -> str:
        """Some that are free and hold nothing findable."""
        skipped = group.key_of.keys() | {*self.semantics.reserved, *group.evicting}
        ids = (b for b, refs in enumerate(group.refs) if not refs and b not in skipped)
        named = ", ".join(map(str, islice(ids, 4)))
        return f", such as {named}, and block {group.evicting[-1]} was cached" if named else ""

    def _released(self, event: BlocksReleased) -> None:
        table, blocks = self.books.given_up(event), event.blocks
        if table is None:
            return
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
        for group in self.groups if self.semantics.promises_order("device") else ():
            self._device_stands(group)
        for tier in self.books.tiers.all if self.books.tiers is not None else ():
            if self.semantics.promises_order(tier.tier):
                self._stands(tier)

    def _device_stands(self, group: GroupBooks) -> None:
        order = group.cached_free if group.adaptive is None else group.adaptive
        expected = list(order)
        actual = list(self.view.free_blocks(group.group)[group.empty_free :])
        if actual != expected:
            first = next(
                (a for a, e in zip(actual, expected, strict=False) if a != e),
                (actual or expected)[-1],
            )
            by = "by the time of their release"
            if group.adaptive is not None:
                by = f"by ARC ({group.adaptive.describe()})"
            self.fail(
                f"the next victims are blocks {actual[:8]}, but {by} they should be {expected[:8]}"
                f"{self._misplaced(group)}",
                group=group.group,
                block=first,
            )

    def _misplaced(self, group: GroupBooks) -> str:
        """The first empty block that is to be taken only after a cached one, if there is one."""
        free, cached = self.view.free_blocks(group.group), group.cached_free
        for before, block in pairwise(free):
            if before in cached and block not in cached:
                return f": block {block} holds nothing findable, but stands behind cached {before}"
        return ""

    def _stands(self, tier: TierBooks) -> None:
        expected, actual = list(tier.order), list(self.tiered.victims(tier.tier, tier.group))
        if actual != expected:
            by = f" by ARC ({tier.order.describe()})" if isinstance(tier.order, Adaptive) else ""
            self.fail(
                f"the next victims are {tier.tier} blocks {actual[:8]}, but{by} they should be "
                f"{expected[:8]}",
                group=tier.group,
                block=(actual or expected)[0],
                tier=tier.tier,
            )


def _named(blocks: Sequence[int]) -> str:
    return f"block {blocks[0]} was" if len(blocks) == 1 else f"blocks {list(blocks)} were"


def _in_pieces(semantics: Semantics) -> bool:
    return semantics.eviction_order == "shown" or not semantics.exact_eviction


def _both(first: EventHandler | None, second: EventHandler) -> EventHandler:
    """One handler that does what two do."""
    if first is None:
        return second

    def handle(event: Event) -> None:
        first(event)
        second(event)

    return handle
