"""EXCL: a block that is written has one owner, and nobody else's step uses it.

Verifies: that an allocation or a copy-on-write target was free, not reserved and handed out
once; that a launched step writes only blocks of its own request's table that nobody shares and
nothing findable lies in; that a copy-on-write replaces the block that the table named; that a
copy between tiers writes only what was free, on its tier, and that no other transfer uses; in an
audit, that no two live tables share a block in which either still has positions to write.

Does not verify: what is read (PROV); that a copy's bytes are right (PROV).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    Event,
    KeyMoved,
    StepItem,
    StepLaunched,
    TransferStarted,
)
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import Tier
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.slot_books import ENDS


class Excl(Check):
    """Exclusive ownership of what is written."""

    claims = (
        Claim(
            "No two writable logical blocks are the same physical block.",
            "chapter, accounting: no unexpected alias; survey E03, P12",
        ),
        Claim(
            "A block with more than one owner, or one that is findable, is never written.",
            "bugs B22, B24, B29; survey S04",
        ),
        Claim(
            "A block is handed out only while nothing holds it: no table, no step in flight.",
            "bugs B21, B25, B76, B82; survey P18",
        ),
        Claim("No request owns a reserved block.", "survey P11; bug B39"),
        Claim(
            "A block of a lower tier that a transfer writes is read and written by no other.",
            "bug B81; survey T12",
        ),
    )
    positive_control = "writes-start-at-row-zero"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._reserved = frozenset(self.semantics.reserved)

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            BlocksAllocated: self._allocated,
            BlockCopied: self._copied,
            BlockMerged: self._replaced,
            KeyMoved: self._moved,
            TransferStarted: self._copy_starts,
        }

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {StepLaunched: self._launched}

    def _allocated(self, event: BlocksAllocated) -> None:
        group, blocks = self.groups[event.group], event.blocks
        self.checked += 1
        if len(blocks) > 1 and len(set(blocks)) != len(blocks):
            twice = next(b for b in blocks if list(blocks).count(b) > 1)
            self.fail(
                f"block {twice} was handed out twice in one allocation to request {event.request}",
                group=event.group,
                block=twice,
                request=event.request,
            )
        if not (group.held.isdisjoint(blocks) and self._reserved.isdisjoint(blocks)):
            for block in blocks:
                self._handed_out(group, block, event.request)

    def _handed_out(self, group: GroupBooks, block: int, request: int) -> None:
        if group.refs[block]:
            self.fail(
                f"block {block} was given to request {request} while {self._owners(group, block)} "
                "held it",
                group=group.group,
                block=block,
                request=request,
            )
        elif block in self.semantics.reserved:
            self.fail(
                f"reserved block {block} was given to request {request}",
                group=group.group,
                block=block,
                request=request,
            )

    # -- what a copy between tiers writes ---------------------------------------------------------

    def _copy_starts(self, event: TransferStarted) -> None:
        """A block to be written by it is nobody else's: no table, transfer or request has it."""
        self.checked += 1
        target, targets = ENDS[event.kind][1], list(event.targets)
        for block in targets:
            why = f"{targets.count(block)} times" if targets.count(block) > 1 else None
            if target != "device":
                why = why or self._slot_taken(target, event.group, block)
            elif event.kind == "promote":
                why = why or self._block_taken(self.groups[event.group], block, event.request)
            if why:
                self.fail(
                    f"transfer {event.transfer} ({event.kind}) is to write {target} block "
                    f"{block}, {why}",
                    group=event.group,
                    block=block,
                    request=event.request,
                    tier=target,
                )
                return

    def _block_taken(self, group: GroupBooks, block: int, request: int | None) -> str | None:
        model = self.books.known.get(request) if request is not None else None
        own = model is not None and block in model.tables[group.group]
        if request is not None and not own:
            return f"which request {request} does not have"
        if group.refs[block] > own:
            return f"which {self._owners(group, block)} holds"
        if block in self._reserved:
            return "which is reserved"
        return "in which something is findable" if block in group.key_of else None

    def _slot_taken(self, target: Tier, group: int, slot: int) -> str | None:
        tiers = self.books.tiers
        books = tiers.of(target) if tiers is not None else []
        if not books or not 0 <= slot < books[group].capacity:
            return "which is not there"
        tier = books[group]
        if tier.pins[slot]:
            return "which another transfer uses"
        if slot in tier.owner:
            return f"which holds request {tier.owner[slot]}"
        return "in which something is findable" if slot in tier.key_of else None

    def _owners(self, group: GroupBooks, block: int) -> str:
        names = [
            f"request {request.id}"
            for request in self.books.requests.values()
            if block in request.tables[group.group]
        ]
        names += [
            f"step {step.number}, in flight, for request {number}"
            for step in self.books.steps
            for number, tables in step.fenced
            if block in tables[group.group]
        ]
        if self.books.tiers is not None and self.semantics.copies_hold:
            names += [
                f"transfer {number}"
                for number, transfer in self.books.tiers.in_flight.items()
                if transfer.group == group.group
                and (
                    (transfer.source == "device" and block in transfer.sources)
                    or (transfer.target == "device" and block in transfer.targets)
                )
            ]
        return " and ".join(names) or "somebody"

    def _copied(self, event: BlockCopied) -> None:
        group = self.books.groups[event.group]
        self._handed_out(group, event.target, event.request)
        self._replaced(event)

    def _moved(self, event: KeyMoved) -> None:
        self._handed_out(self.books.groups[event.group], event.target, event.request)
        self.checked += 1

    def _replaced(self, event: BlockCopied | BlockMerged) -> None:
        """The table named the block that it names no longer."""
        request = self.books.known.get(event.request)
        if request is None:
            return
        table = request.tables[event.group]
        if event.row >= len(table) or table[event.row] != event.source:
            did = "copied" if isinstance(event, BlockCopied) else "gave up"
            self.fail(
                f"request {event.request} {did} block {event.source} for its row {event.row}, "
                "which its table does not name there",
                group=event.group,
                block=event.source,
                request=event.request,
            )
        self.checked += 1

    def _launched(self, event: StepLaunched) -> None:
        self.checked += 1
        for item, request in self.books.steps[-1].items:
            for group in self.groups:
                size = group.block_size
                first, end = item.start // size, (item.end - 1) // size + 1
                if group.group in self.semantics.states:
                    first = end - 1
                number, refs, key_of = group.group, group.refs, group.key_of
                written = request.tables[number][first:end]
                named = item.tables[number][first:end]
                if len(written) < end - first or (named != written and list(named) != written):
                    self._foreign(group, item, request, first)
                    return
                for block in written:
                    if (refs[block] != 1 or block in key_of) and not self._owes(
                        group, block, request
                    ):
                        self._shared(group, item, block)
                        return

    def _owes(self, group: GroupBooks, block: int, request: RequestModel) -> bool:
        """Published early, its future content may be shared before its writer has run."""
        return bool(group.refs[block]) and group.owed.get(block, (None,))[0] is request

    def _foreign(self, group: GroupBooks, item: StepItem, request: RequestModel, row: int) -> None:
        table, own = item.tables[group.group], request.tables[group.group]
        while row < min(len(table), len(own)) and table[row] == own[row]:
            row += 1
        named = f"block {table[row]}" if row < len(table) else "no block"
        self.fail(
            f"a step writes row {row} of request {item.request} through a table that names "
            f"{named} there, not the one the request was given",
            group=group.group,
            block=table[row] if row < len(table) else None,
            request=item.request,
        )

    def _shared(self, group: GroupBooks, item: StepItem, block: int) -> None:
        if group.refs[block] > 1:
            why = f"while {self._owners(group, block)} hold it"
        elif group.refs[block] == 0:
            why = "which nothing holds"
        else:
            why = "which is findable in the prefix cache"
        self.fail(
            f"a step writes positions {item.start} to {item.end} of request {item.request} "
            f"into block {block}, {why}",
            group=group.group,
            block=block,
            request=item.request,
        )

    def audit(self) -> None:
        for group in self.groups:
            for request in self.books.running:
                written = self.books.written(request)
                if written < request.length and not request.loading:
                    self._yet_to_write(group, request, written // group.block_size)

    def _yet_to_write(self, group: GroupBooks, request: RequestModel, row: int) -> None:
        """From ``row`` on nobody else has the request's blocks."""
        for block in request.tables[group.group][row:]:
            if group.refs[block] > 1 and block not in group.owed:
                self.fail(
                    f"request {request.id} has yet to write block {block}, which "
                    f"{self._owners(group, block)} hold",
                    group=group.group,
                    block=block,
                    request=request.id,
                )
                return
