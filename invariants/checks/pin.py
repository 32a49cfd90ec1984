"""PIN: what a step in flight uses is neither freed nor evicted, and fences open exactly once.

Verifies: where the subject fences releases, that a request whose step is in flight gives up its
blocks to that step and not to the free ones; that a fence opens when its step retires, for all
that it holds, and not before; that no block behind a window is given back while a step in flight
reads it; where steps run in stream order and copies do not wait for them, that no copy between
tiers touches what a step in flight uses; that no block with a holder is evicted; that on lower
tiers nothing is evicted that a transfer uses or a swapped request owns, and that pins are the ends
of transfers in flight.

Does not verify: pins of device blocks, which are references (REF).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproof.invariants.events import (
    BlocksEvicted,
    BlocksOutlived,
    BlocksReleased,
    Event,
    ReleaseFenced,
    SlotsEvicted,
    TransferStarted,
    why_evicted,
)
from kvproof.invariants.operations import Operation, Retire
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.slot_books import ENDS, TierBooks


class Pin(Check):
    """Protection of blocks in use."""

    claims = (
        Claim(
            "Blocks that an unfinished step reads or writes are not free before it is finished.",
            "chapter, tiering: ownership released only after a safe state; bugs B76, B82; "
            "survey P18",
        ),
        Claim(
            "A block that somebody holds is not evicted.",
            "bugs B15, B21, B54, B55; survey R11",
        ),
        Claim(
            "Both ends of a copy between tiers are pinned from its start to its end, and what is "
            "pinned is not evicted.",
            "bugs B17, B78, B79, B81, B100; survey T10, T11, E13",
        ),
        Claim("A fence gives back exactly what it took, once.", "bugs B02, B17; survey E07"),
    )
    positive_control = "releases-ignore-steps-in-flight"
    concludes_on = (Retire,)
    concludes_when = ("done",)

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {BlocksEvicted: self._evicted}
        if self.semantics.fences_releases:
            handlers |= {BlocksReleased: self._released, ReleaseFenced: self._fenced}
            if not self.semantics.stream_order:
                handlers[BlocksOutlived] = self._outlived
        if self.books.tiers is not None:
            handlers[SlotsEvicted] = self._slots_evicted
            if self.semantics.stream_order and not self.semantics.copies_after_steps:
                handlers[TransferStarted] = self._copy_starts
        return handlers

    def _evicted(self, event: BlocksEvicted) -> None:
        held = self.groups[event.group].held
        if not held.isdisjoint(event.blocks):
            block = next(b for b in event.blocks if b in held)
            self.fail(
                f"block {block} was evicted {why_evicted(event.cause)} while it was held",
                group=event.group,
                block=block,
            )
        self.checked += 1

    def _outlived(self, event: BlocksOutlived) -> None:
        """A block behind the window of the next token may be within that of a step in flight."""
        self.checked += 1
        window, size = self.books.window(event.group), self.groups[event.group].block_size
        refs = self.groups[event.group].refs
        for step in self.books.steps:
            for (item, _), tables in zip(step.items, step.tables, strict=True):
                first = max(0, item.start - window + 1) // size if window else 0
                used = tables[event.group][first : -(-item.end // size)]
                block = next((b for b in event.blocks if b in used and refs[b] < 2), None)
                if block is not None:
                    self.fail(
                        f"request {event.request} gave back block {block}, which step "
                        f"{step.number}, in flight, uses",
                        group=event.group,
                        block=block,
                        request=event.request,
                    )
                    return

    def _copy_starts(self, event: TransferStarted) -> None:
        """It waits for no step: what one in flight uses, it must not write, nor read half done."""
        self.checked += 1
        source, target = ENDS[event.kind]
        for step in self.books.steps:
            for (item, _), tables in zip(step.items, step.tables, strict=True):
                end = -(-item.end // self.block_size)
                read = tables[event.group][:end]
                written = read[item.start // self.block_size :]
                ends = (
                    (target, event.targets, read, "overwrites"),
                    (source, event.sources, written, "reads"),
                )
                for tier, blocks, used, does in ends:
                    if tier == "device" and not set(used).isdisjoint(blocks):
                        block = next(b for b in blocks if b in used)
                        self._touches(event, block, f"{does} device block {block}", step.number)
                        return

    def _touches(self, event: TransferStarted, block: int, what: str, step: int) -> None:
        self.fail(
            f"transfer {event.transfer} ({event.kind}) {what}, which step {step}, in flight, uses",
            group=event.group,
            block=block,
            request=event.request,
            transfer=event.transfer,
        )

    def _slots_evicted(self, event: SlotsEvicted) -> None:
        self.checked += 1
        assert self.books.tiers is not None
        busy = self.books.tiers.of(event.tier)[event.group].busy
        if not busy.isdisjoint(event.slots):
            slot = next(s for s in event.slots if s in busy)
            self.fail(
                f"{event.tier} block {slot} was evicted {why_evicted(event.cause)} "
                "while a transfer used it or a request owned it",
                group=event.group,
                block=slot,
                tier=event.tier,
            )

    def settle(self) -> None:
        if self.books.tiers is not None:
            for tier in self.books.tiers.all:
                if tier.touched:
                    self._compare_pins(tier, tier.touched)

    def audit(self) -> None:
        if self.books.tiers is not None:
            for tier in self.books.tiers.all:
                if list(self.tiered.tier_pins(tier.tier, tier.group)) != tier.pins:
                    self._compare_pins(tier, range(tier.capacity))

    def _compare_pins(self, tier: TierBooks, slots: Sequence[int]) -> None:
        actual, expected = self.tiered.tier_pins(tier.tier, tier.group), tier.pins
        for slot in slots:
            if actual[slot] != expected[slot]:
                self.fail(
                    f"{tier.tier} block {slot} has {actual[slot]} pins, but {expected[slot]} "
                    "transfers in flight use it",
                    group=tier.group,
                    block=slot,
                    tier=tier.tier,
                )
                return

    def _released(self, event: BlocksReleased) -> None:
        self.checked += 1
        if event.step is None:
            request = self.books.known.get(event.request)
            if request is not None and request.launched:
                self.fail(
                    f"request {event.request} freed its blocks while step "
                    f"{request.last_step}, which uses them, was in flight",
                    group=event.group,
                    block=event.blocks[-1] if event.blocks else None,
                    request=event.request,
                )
        elif self.books.retired is None or self.books.retired.number != event.step:
            self.fail(
                f"the fence of step {event.step} gave back blocks {list(event.blocks)} of "
                f"request {event.request} while the step was in flight",
                group=event.group,
                block=event.blocks[-1] if event.blocks else None,
                request=event.request,
            )

    def _fenced(self, event: ReleaseFenced) -> None:
        self.checked += 1
        request = self.books.known.get(event.request)
        if request is None or event.step == request.last_step or self._is_later(event, request):
            return
        self.fail(
            f"the blocks of request {event.request} were left to step {event.step}, but "
            f"its last step in flight is {request.last_step}",
            request=event.request,
        )

    def _is_later(self, event: ReleaseFenced, request: RequestModel) -> bool:
        """In stream order steps end in their order: who waits for a later one has waited for its
        own, if there is one."""
        if not self.semantics.stream_order or not request.launched:
            return False
        return any(step.number == event.step > request.last_step for step in self.books.steps)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        retired = self.books.retired
        self.checked += 1
        if retired is None or not retired.fenced:
            return
        released = self.books.released_fences
        for number, tables in retired.fenced:
            for group, table in enumerate(tables):
                if table and (retired.number, number, group) not in released:
                    self.fail(
                        f"step {retired.number} is retired, but its fence still holds blocks "
                        f"{table} of request {number}",
                        group=group,
                        block=table[0],
                        request=number,
                    )
