"""PROV: each slot that attention reads holds the KV of that very sequence and position.

Verifies: when a step retires (or, where steps run in stream order, at its launch), that every slot
it reads, for each request and group, carries the tag of that request's own history (salt, adapter,
media and all tokens up to the position): not poison, not another prefix; that what was swapped out
comes back; that steps read through the tables that the requests were given; in an audit, the same
for all computed positions of all running requests.  Of a group with a window, positions in it.

Does not verify: numerical values (a kernel's business); order of writes within one step, which
is taken to write before it reads, as attention does layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksEvicted,
    BlocksOutlived,
    BlocksReleased,
    Event,
    KeyMoved,
    StepItem,
    StepLaunched,
    StepRetired,
    TransferEnded,
)
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.request_books import RequestModel, StepModel
from kvproof.invariants.tags import EVICTED, FREED


class Prov(Check):
    """Provenance of what attention reads; also moves the shadow memory's bytes."""

    claims = (
        Claim(
            "Attention for a request at a position reads the KV of that request's own prefix.",
            "bugs B24, B29, B30, B36; survey P04",
        ),
        Claim(
            "A slot that was freed, evicted or not written yet is never read.",
            "chapter, tiering: attention cannot consume stale or incomplete bytes; survey E13",
        ),
        Claim(
            "What a sequence reads does not depend on which physical blocks it was given.",
            "survey P01, E16",
        ),
    )
    positive_control = "copy-on-write-copies-nothing"

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            StepLaunched: self._launched,
            BlockCopied: self._copied,
            BlockMerged: self._merged,
            KeyMoved: self._moved,
            BlocksReleased: self._released,
            BlocksOutlived: self._released,
            BlocksEvicted: self._evicted,
            StepRetired: self._retired,
            TransferEnded: self._transferred,
        }

    @property
    def _in_stream_order(self) -> bool:
        return self.semantics.stream_order

    def _computed(self, request: RequestModel, group: int) -> int:
        """Tokens whose KV must be in the blocks that the request names."""
        if group in self.semantics.states:
            return self.books.written(request)  # the only state that there is
        return request.computed

    # -- bytes move ----------------------------------------------------------------------------

    def _copied(self, event: BlockCopied) -> None:
        self.shadows[event.group].copy(event.source, event.target, event.tokens)
        request = self.books.known.get(event.request)
        if request is None:
            return
        # What was computed in the block must be in its copy, or it will be read from there.
        size = self.groups[event.group].block_size
        start = event.row * size
        end = min(self._computed(request, event.group), start + size)
        if start < end:
            self._compare(request, event.group, start, end, request.tables[event.group])

    def _merged(self, event: BlockMerged) -> None:
        self._poison_emptied(event.group)
        request = self.books.known.get(event.request)
        if request is None:
            return
        # The block must hold what the one that it replaces held.
        size = self.groups[event.group].block_size
        start = event.row * size
        end = min(self._computed(request, event.group), start + size)
        if start < end:
            self._compare(request, event.group, start, end, request.tables[event.group])

    def _moved(self, event: KeyMoved) -> None:
        self.shadows[event.group].copy(
            event.source, event.target, self.groups[event.group].block_size
        )

    def _released(self, event: BlocksReleased) -> None:
        self._poison_emptied(event.group)

    def _poison_emptied(self, group: int) -> None:
        emptied = self.groups[group].emptied
        if emptied and self.semantics.copies_hold:  # otherwise a copy may still be to read them
            self.shadows[group].poison(emptied, FREED)

    def _evicted(self, event: BlocksEvicted) -> None:
        held, dead = self.groups[event.group].held, event.blocks
        if not self.semantics.copies_hold:
            return
        if not held.isdisjoint(dead):
            dead = [block for block in dead if block not in held]  # PIN
        self.shadows[event.group].poison(dead, EVICTED)

    def _transferred(self, event: TransferEnded) -> None:
        """Only the copy brings a swapped request's bytes back: they are read as they are."""
        tiers = self.books.tiers
        if tiers is None or not tiers.ending or event.result != "completed":
            return
        transfer = tiers.ending[-1]
        request = transfer.request
        if transfer.kind == "swap_in" and request is not None:
            table = request.tables[transfer.group]
            self._compare(request, transfer.group, 0, transfer.tokens, table)

    # -- reads are checked -----------------------------------------------------------------------

    def _launched(self, event: StepLaunched) -> None:
        """The rows that the step reads are those that the request was given."""
        sizes = [group.block_size for group in self.groups]
        for item, request in self.books.steps[-1].items:
            for group, first in enumerate(request.trusted_rows):
                rows = (item.end + sizes[group] - 1) // sizes[group]
                if first >= rows:
                    continue
                table, own = item.tables[group], request.tables[group]
                given = own[first:rows]
                if table[first:rows] != given and list(table[first:rows]) != given:
                    self._wrong_table(item, group, first, table, own)
                    return
                # The last row may still be replaced by a copy-on-write: books reset this then.
                request.trusted_rows[group] = rows
        if self._in_stream_order:
            self._runs(self.books.steps[-1])

    def _wrong_table(
        self, item: StepItem, group: int, first: int, table: Sequence[int], own: list[int]
    ) -> None:
        differs = (r for r in range(first, len(own)) if r >= len(table) or table[r] != own[r])
        row = next(differs, len(own))
        named = f"block {table[row]}" if row < len(table) else "no block"
        given = f"block {own[row]}" if row < len(own) else "no block"
        self.fail(
            f"a step reads row {row} of request {item.request} through a table that names "
            f"{named}, but the request was given {given}",
            group=group,
            block=table[row] if row < len(table) else None,
            request=item.request,
        )

    def _retired(self, event: StepRetired) -> None:
        step = self.books.retired
        if step is not None and not self._in_stream_order:
            self._runs(step)

    def _runs(self, step: StepModel) -> None:
        """Its writes and reads happen now, as far as anybody can tell."""
        self.checked += 1
        items = step.items
        for group, shadow in enumerate(self.shadows):
            write = shadow.write
            if group in self.semantics.states:
                # A step starts from the states that it finds: of the same step none.
                for item, request in items:
                    if item.start:
                        before = item.start - 1
                        self._compare(request, group, before, item.start, item.tables[group])
                for item, request in items:
                    write(request.tags, item.start, item.end, item.tables[group])
                continue
            # All writes of a step come before its reads: in each layer, K and V before attention.
            for item, request in items:
                write(request.tags, item.start, item.end, item.tables[group])
            for item, request in items:
                # What the step has just written is in place; what was verified before has not
                # changed since, or EXCL or REF would have reported the write or the release.
                live = request.epoch == item.epoch
                verified = request.verified[group] if live else 0
                verified = max(verified, self._behind(group, item.start))
                if verified < item.start:
                    self._compare(request, group, verified, item.start, item.tables[group])
                if live:
                    request.verified[group] = item.end

    def _behind(self, group: int, position: int) -> int:
        """The first position that attention at this one may read."""
        window = self.books.window(group)
        return max(0, position + 1 - window) if window else 0

    def _compare(
        self, request: RequestModel, group: int, start: int, end: int, table: Sequence[int]
    ) -> bool:
        shadow = self.shadows[group]
        position = shadow.first_mismatch(request.tags, start, end, table)
        if position is None:
            return True
        row, offset = divmod(position, shadow.block_size)
        block = table[row]
        self.fail(
            f"request {request.id} reads position {position} from block {block}, offset "
            f"{offset} (row {row} of its table), which holds {shadow.describe(block, offset)}",
            group=group,
            block=block,
            request=request.id,
        )
        return False

    def audit(self) -> None:
        self._audit_steps()
        for request in self.books.running:
            for group, shadow in enumerate(self.shadows):
                table, size = request.tables[group], shadow.block_size
                end = min(self._computed(request, group), len(table) * size)
                owed = self.books.groups[group].owed
                if owed:
                    # A hit on content that a step has yet to write (see Semantics.publishes).
                    first = next((r for r, b in enumerate(table) if b in owed), len(table))
                    end = min(end, first * size)
                # What only steps in flight may read is for them to find.
                start = self._behind(group, self.books.written(request))
                if start < end and not self._compare(request, group, start, end, table):
                    return

    def _audit_steps(self) -> None:
        """All rows that steps in flight read, also those that earlier steps were seen to read."""
        for step in self.books.steps:
            for (item, _), tables in zip(step.items, step.tables, strict=True):
                for group, own in enumerate(tables):
                    size = self.groups[group].block_size
                    first, rows = self._behind(group, item.start) // size, -(-item.end // size)
                    if list(item.tables[group][first:rows]) != own[first:rows]:
                        self._wrong_table(item, group, first, item.tables[group], own)
                        return
