"""VALID below the device: what host and disk find is what was copied there, and is really there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvproof.invariants.events import (
    BlocksReused,
    SlotsEvicted,
    TierReopened,
    TransferEnded,
    why_evicted,
)
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import Corrupt, Operation, Reset, Tier
from kvproof.invariants.property import Check
from kvproof.invariants.slot_books import TierBooks
from kvproof.invariants.tier_books import Tiers


class Below:
    """The part of VALID that looks at tiers below the device; it reports through that check."""

    def __init__(self, check: Check, tiers: Tiers) -> None:
        self._check = check
        self._tiers = tiers
        self._written: list[tuple[TierBooks, int]] = []
        """Slots that became findable, or survived a restart, since the last settlement."""
        self._damaged: list[tuple[TierBooks, list[int]]] = []
        """Slots whose damage was met and that must go, of this operation."""

    def _fail(self, tier: TierBooks, slot: int | None, message: str) -> None:
        self._check.fail(message, group=tier.group, block=slot, tier=tier.tier)

    # -- events ----------------------------------------------------------------------------------

    def evicted(self, event: SlotsEvicted) -> None:
        """Before the books: what goes was there, under these keys."""
        tier = self._tiers.of(event.tier)[event.group]
        for slot, key in zip(event.slots, event.keys, strict=True):
            if tier.key_of.get(slot) != key:
                self._fail(
                    tier,
                    slot,
                    f"{tier.tier} block {slot} is evicted {why_evicted(event.cause)}, "
                    f"but nothing is findable there under key {key.hex()[:12]}…",
                )
        if event.cause == "corrupt":
            self._drop(tier, list(event.slots))

    def _drop(self, tier: TierBooks, slots: list[int]) -> None:
        expected = [damaged for books, damaged in self._damaged if books is tier]
        self._damaged = [(books, damaged) for books, damaged in self._damaged if books is not tier]
        if expected != [slots]:
            self._fail(
                tier,
                slots[0] if slots else None,
                f"{tier.tier} blocks {slots} are dropped as damaged, but damage was met in "
                f"{expected[0] if expected else []}",
            )

    def ended(self, event: TransferEnded) -> None:
        """After the books: what a completed copy brought is to be looked at."""
        if not self._tiers.ending:
            return
        transfer = self._tiers.ending[-1]
        if event.result == "completed" and transfer.keys and transfer.outdated:
            self._check.fail(
                f"transfer {transfer.number} ({transfer.kind}) brings {transfer.target} blocks "
                f"{transfer.targets}, of what was computed before the prefix cache was reset",
                group=transfer.group,
                block=transfer.targets[0],
                tier=transfer.target,
                transfer=transfer.number,
            )
        if event.result == "completed" and transfer.keys and transfer.target != "device":
            tier = self._tiers.of(transfer.target)[transfer.group]
            self._written += [(tier, slot) for slot in transfer.targets]
        elif event.cause == "corrupt" and self._tiers.disk:
            disk = self._tiers.disk[transfer.group]
            damaged = [s for s in transfer.sources if s in disk.corrupt and not disk.pins[s]]
            if damaged:
                self._damaged.append((disk, damaged))

    def reopened(self, event: TierReopened) -> None:
        """Before the books: all that the disk had is there, and nothing that it never had.

        What was on its way and wanted may be there or not; so may what is damaged.  What the index
        says damagedly is not there.
        """
        disk = self._tiers.disk[event.group]
        found = dict(zip(event.slots, event.keys, strict=True))
        may_be: dict[int, set[bytes]] = {slot: {key} for slot, key in disk.key_of.items()}
        for transfer in self._tiers.ending:
            if transfer.kind == "demote" and transfer.group == event.group:
                for slot, key in zip(transfer.targets, transfer.keys, strict=True):
                    may_be.setdefault(slot, set()).update(() if transfer.cancelled else (key,))
        self._lost(event, disk, found, may_be.keys() - disk.key_of.keys())
        for slot, key in found.items():
            if key not in may_be.get(slot, ()):
                self._fail(
                    disk,
                    slot,
                    f"after a restart the disk finds key {key.hex()[:12]}… in block {slot}, which "
                    "did not hold it",
                )
                return
        self._written += [(disk, slot) for slot in found]

    def _lost(
        self, event: TierReopened, disk: TierBooks, found: dict[int, bytes], awaited: set[int]
    ) -> None:
        """Of what was wholly written, only that of which the entry in the index is damaged."""
        damaged = set(event.damaged)
        for slot in damaged - disk.unlisted - awaited:
            self._fail(
                disk, slot, f"the entry of disk block {slot} is said to be damaged: it is not"
            )
            return
        for slot in disk.unlisted:
            if slot not in damaged or slot in found:
                self._fail(
                    disk, slot, f"the entry of disk block {slot} is damaged, but counts as if whole"
                )
                return
        if not self._check.semantics.disk_survives:
            return
        for slot, key in disk.key_of.items():
            kept = found.get(slot) == key or slot in disk.corrupt or slot in disk.unlisted
            if not kept:
                self._fail(
                    disk, slot, f"disk block {slot} was wholly written, but is lost by a restart"
                )
                return

    def hit(self, event: BlocksReused) -> None:
        """Before the books: what is hit holds what its key stands for."""
        self._device_holds(self._check.groups[event.group], event.blocks)

    def _device_holds(self, group: GroupBooks, blocks: Iterable[int]) -> None:
        """Of these blocks, those that are findable, and written, hold what they should."""
        if not self._check.semantics.tier_bytes:
            return
        content, number = self._check.tiered.tier_content, group.group
        key_of, owed = group.key_of, group.owed
        for block in blocks:
            key = key_of.get(block)
            if key is not None and content("device", number, block) != key and block not in owed:
                self._content("device", number, block, key, damaged=False)
                return

    # -- what the operation did, and what is there now -------------------------------------------

    def conclude(self, operation: Operation) -> None:
        """Damage that was met is not findable any more, nor is anything after a reset."""
        if isinstance(operation, Corrupt):
            found = self._tiers.damaged(operation)
            self._written += [found] if found is not None else []
        emptied = isinstance(operation, Reset) and self._check.semantics.resets_tiers
        for tier in self._tiers.all if emptied else ():
            if tier.key_of:
                slot = next(iter(tier.key_of))
                self._fail(tier, slot, f"{tier.tier} block {slot} is still findable after a reset")
        for tier, slots in self._damaged:
            self._fail(
                tier, slots[0], f"{tier.tier} blocks {slots} are damaged, but were not dropped"
            )
        self._damaged = []
        self._compare_touched()

    def _compare_touched(self) -> None:
        """At once: a slot may be taken again soon."""
        for tier in self._tiers.all:
            if tier.touched_keys:
                self._compare(tier, tier.touched_keys)
                tier.touched_keys = []

    def settle(self) -> None:
        self._compare_touched()
        for tier, slot in self._written:
            if slot in tier.key_of:
                self._holds(tier, slot)
        self._written = []
        for group, block, key in self._tiers.promoted:
            if self._check.groups[group].key_of.get(block) == key:
                self._content("device", group, block, key, damaged=False)

    def _compare(self, tier: TierBooks, keys: Iterable[bytes]) -> None:
        index = self._check.tiered.tier_index(tier.tier, tier.group)
        slots = tier.slot_of_key
        for key in keys:
            actual, expected = index.get(key), slots.get(key)
            if actual != expected:
                says = "nothing" if actual is None else f"block {actual}"
                should = "nothing" if expected is None else f"block {expected}"
                self._fail(
                    tier,
                    actual if expected is None else expected,
                    f"the {tier.tier} finds {says} under key {key.hex()[:12]}…, but it should "
                    f"find {should}",
                )
                return

    def _holds(self, tier: TierBooks, slot: int) -> None:
        key, damaged = tier.key_of[slot], slot in tier.corrupt
        self._content(tier.tier, tier.group, slot, key, damaged=damaged)

    def _content(self, tier: Tier, group: int, block: int, key: bytes, *, damaged: bool) -> None:
        if not self._check.semantics.tier_bytes:
            return
        content = self._check.tiered.tier_content(tier, group, block)
        if content == (None if damaged else key):
            return
        if damaged:
            what = "is damaged, but is read as if it were whole"
        elif content is None:
            what = "is findable, but its bytes are damaged"
        else:
            what = "is findable, but it holds other bytes than those of its key"
        self._check.fail(f"{tier} block {block} {what}", group=group, block=block, tier=tier)

    def audit(self) -> None:
        for group in self._check.groups:
            self._device_holds(group, group.key_of)
        for tier in self._tiers.all:
            index = self._check.tiered.tier_index(tier.tier, tier.group)
            if dict(index) != tier.slot_of_key:
                self._compare(tier, {**index, **tier.slot_of_key})
            for slot in tier.key_of:
                self._holds(tier, slot)
            self._bytes(tier)

    def _bytes(self, tier: TierBooks) -> None:
        """By the shadow memory: each findable slot holds the tokens that its key stands for."""
        slots: Sequence[int] = [slot for slot in tier.key_of if slot not in tier.corrupt]
        tags = tier.shadow.last_tags(slots)
        if tags != [tier.tag_of[slot] for slot in slots]:
            slot = next(s for s, tag in zip(slots, tags, strict=True) if tag != tier.tag_of[s])
            holds = tier.shadow.describe(slot, tier.block_size - 1)
            self._fail(
                tier, slot, f"{tier.tier} block {slot} is findable, but its last slot holds {holds}"
            )
