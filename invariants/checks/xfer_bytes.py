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
        self._away: dict[tuple[int, int], list[bytes | None]] = {}
        """By request and group: what was really in the blocks that were swapped out."""

    def _shadow(self, tier: Tier, group: int) -> Shadow:
        return (
            self._check.shadows[group] if tier == "device" else self._tiers.of(tier)[group].shadow
        )

    @property
    def _holds(self) -> bool:
        return self._check.semantics.copies_hold

    def copy_begins(self, event: TransferStarted) -> None:
        transfer = self._tiers.in_flight[event.transfer]
        if transfer.source == "device" and not self._holds:
            content = self._tiers.content
            transfer.bytes = b"".join([content.get(key, b"") for key in transfer.keys])
        else:
            transfer.bytes = self._shadow(transfer.source, event.group).read(transfer.sources)
        if transfer.target != "device" or self._holds:
            self._shadow(transfer.target, event.group).poison(transfer.targets, IN_FLIGHT)
        if event.kind == "swap_out" and event.request is not None:
            self._away[event.request, event.group] = self._really(
                "device", event.group, transfer.sources
            )

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
            self._came_across(transfer)
        elif transfer.target != "device" or self._holds:
            self._shadow(transfer.target, transfer.group).poison(transfer.targets, FREED)
        if event.result != "completed" and transfer.request is not None:
            self._away.pop((transfer.request.id, transfer.group), None)
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
            at_rest = transfer.source != "device" or self._holds
            what = "changed" if at_rest else "does not hold what its key stands for"
            self._check.fail(
                f"{transfer.source} block {sources[index]} {what} while transfer "
                f"{transfer.number} ({transfer.kind}) copied it",
                group=transfer.group,
                block=sources[index],
                tier=transfer.source,
                transfer=transfer.number,
            )
        target = self._shadow(transfer.target, transfer.group)
        source.copy_blocks(sources, target, transfer.targets[first:end])
        transfer.copied = end

    def _really(self, tier: Tier, group: int, blocks: Sequence[int]) -> list[bytes | None]:
        """What is in these blocks by the subject's own look, whatever it reports."""
        if not self._check.semantics.tier_bytes:
            return [None] * len(blocks)
        content = self._check.tiered.tier_content
        return [content(tier, group, block) for block in blocks]

    def _came_across(self, transfer: TransferModel) -> None:
        """What was swapped, out or in, really is at its target as it was on the device before."""
        request = transfer.request
        if request is None or transfer.loads:
            return
        row = self._not_as_before(transfer.target, transfer.group, request.id, transfer.targets)
        if row is not None:
            self._check.fail(
                f"{transfer.target} block {transfer.targets[row]} does not hold what row {row} of "
                f"request {request.id} held when it was swapped out, though transfer "
                f"{transfer.number} ({transfer.kind}) completed",
                group=transfer.group,
                block=transfer.targets[row],
                request=request.id,
                tier=transfer.target,
                transfer=transfer.number,
            )
        if transfer.kind == "swap_in":
            self._away.pop((request.id, transfer.group), None)

    def _not_as_before(
        self, tier: Tier, group: int, request: int, blocks: Sequence[int]
    ) -> int | None:
        """The first row that is not in these blocks as it was when it was swapped out."""
        then = self._away.get((request, group), [])
        rows = zip(self._really(tier, group, blocks), then, strict=False)
        return next((row for row, (now, before) in enumerate(rows) if now != before), None)

    def audit(self) -> None:
        """What was swapped out is still there."""
        for host in self._tiers.host:
            for request, slots in host.owned.items():
                row = self._not_as_before("host", host.group, request, slots)
                if row is not None:
                    self._check.fail(
                        f"host block {slots[row]} does not hold any more what was swapped out "
                        f"into it, row {row} of request {request}",
                        group=host.group,
                        block=slots[row],
                        request=request,
                        tier="host",
                    )
                    return

    def _let_go(self, tier: Tier, group: int) -> None:
        """Nobody's bytes are in what lost its last holder."""
        if tier == "device" and not self._holds:
            return
        books = self._check.groups[group] if tier == "device" else self._tiers.of(tier)[group]
        if books.emptied:
            self._shadow(tier, group).poison(books.emptied, FREED)
            books.emptied = []

    def slots_evicted(self, event: SlotsEvicted) -> None:
        tier = self._tiers.of(event.tier)[event.group]
        tier.shadow.poison(tier.emptied, EVICTED)

    def slots_released(self, event: SlotsReleased) -> None:
        self._away.pop((event.request, event.group), None)
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
