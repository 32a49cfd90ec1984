"""The bytes that transfers move, in the shadow memory: XFER's part that PROV and VALID read."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.events import (
    SlotsEvicted,
    SlotsReleased,
    TierReopened,
    TransferEnded,
    TransferLanded,
    TransferStarted,
)
from kvproof.invariants.operations import Corrupt, Tier
from kvproof.invariants.property import Check
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.slot_books import TransferModel
from kvproof.invariants.tags import EVICTED, FREED, IN_FLIGHT
from kvproof.invariants.tier_books import Tiers


class Bytes:
    """Replays copies after the books have followed their events, and reports what changed under
    one."""

    def __init__(self, check: Check, tiers: Tiers) -> None:
        self._check = check
        self._tiers = tiers

    def _shadow(self, tier: Tier, group: int) -> Shadow:
        return (
            self._check.shadows[group] if tier == "device" else self._tiers.of(tier)[group].shadow
        )

    def copy_begins(self, event: TransferStarted) -> None:
        transfer = self._tiers.in_flight[event.transfer]
        transfer.bytes = self._shadow(transfer.source, event.group).read(transfer.sources)
        self._shadow(transfer.target, event.group).poison(transfer.targets, IN_FLIGHT)

    def copy_goes_on(self, event: TransferLanded) -> None:
        transfer = self._tiers.in_flight.get(event.transfer)
        if transfer is not None:
            self._copy(transfer, transfer.copied, event.parts)

    def copy_ends(self, event: TransferEnded) -> None:
        tiers = self._tiers
        if not tiers.ending or tiers.ending[-1].number != event.transfer:
            return
        transfer = tiers.ending[-1]
        if event.result == "completed":
            self._copy(transfer, transfer.copied, len(transfer.sources))
        else:
            self._shadow(transfer.target, transfer.group).poison(transfer.targets, FREED)
        self._let_go(transfer.source, transfer.group)
        self._let_go(transfer.target, transfer.group)

    def _copy(self, transfer: TransferModel, first: int, end: int) -> None:
        """These blocks of it arrive: what their sources hold now, which is what they held."""
        sources = transfer.sources[first:end]
        source = self._shadow(transfer.source, transfer.group)
        width = self._check.block_size * 8
        now, then = source.read(sources), transfer.bytes[first * width : end * width]
        if now != then:
            index = next(
                i
                for i in range(len(sources))
                if now[i * width : (i + 1) * width] != then[i * width : (i + 1) * width]
            )
            self._check.fail(
                f"{transfer.source} block {sources[index]} changed while transfer "
                f"{transfer.number} ({transfer.kind}) copied it",
                group=transfer.group,
                block=sources[index],
                tier=transfer.source,
            )
        target = self._shadow(transfer.target, transfer.group)
        source.copy_blocks(sources, target, transfer.targets[first:end])
        transfer.copied = end

    def _let_go(self, tier: Tier, group: int) -> None:
        """Nobody's bytes are in what lost its last holder."""
        books = self._check.groups[group] if tier == "device" else self._tiers.of(tier)[group]
        if books.emptied:
            self._shadow(tier, group).poison(books.emptied, FREED)
            books.emptied = []

    def slots_evicted(self, event: SlotsEvicted) -> None:
        tier = self._tiers.of(event.tier)[event.group]
        tier.shadow.poison(tier.emptied, EVICTED)

    def slots_released(self, event: SlotsReleased) -> None:
        self._let_go(event.tier, event.group)

    def reopened(self, event: TierReopened) -> None:
        """What was wholly written before the crash is there, whether or not it was acknowledged."""
        disk = self._tiers.disk[event.group]
        disk.shadow.poison(disk.emptied, FREED)
        for transfer in self._tiers.ending:
            if transfer.kind == "demote" and transfer.group == event.group:
                found = [
                    index
                    for index, (slot, key) in enumerate(
                        zip(transfer.targets, transfer.keys, strict=True)
                    )
                    if disk.key_of.get(slot) == key
                ]
                self._written(transfer, found)

    def _written(self, transfer: TransferModel, found: Sequence[int]) -> None:
        width = self._check.block_size * 8
        content = [transfer.bytes[i * width : (i + 1) * width] for i in found]
        slots = [transfer.targets[i] for i in found]
        self._shadow("disk", transfer.group).put(slots, b"".join(content))

    def damage(self, operation: Corrupt) -> None:
        found = self._tiers.damaged(operation)
        if found is not None:
            tier, slot = found
            tier.shadow.poison([slot], EVICTED)
