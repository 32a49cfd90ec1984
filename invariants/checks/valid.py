"""VALID: what is findable is complete, and what was removed is not findable.

Verifies: that a block is published only when all of its slots hold the KV that its key stands for
(or, where the subject declares early publication, once the step that owes it is retired, or when
none does any more); that a completed block does become findable; that a hit names blocks that are
findable, and where there are tiers really hold what they are found as; that an evicted, reused or
reset block's key leads nowhere; that host and disk find exactly what was copied there and not
evicted since, and really hold it; that damage is met and not served; that a restart loses nothing
that was wholly written, and finds nothing that was not; that nothing that was computed before a
reset is findable after it, on any tier; in an audit, that the subject's indices hold exactly the
entries that the events left, each with its content.

Does not verify: that a block of a group with a window becomes findable, since it may be behind
the window before; that keys tell contents apart (KEY); which block is evicted (ORDER).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproof.invariants.checks.valid_tiers import Below
from kvproof.invariants.events import (
    BlockMerged,
    BlocksAllocated,
    BlocksPublished,
    BlocksReused,
    Event,
    KeyMoved,
    SlotsEvicted,
    StepRetired,
    TierReopened,
    TransferEnded,
)
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import (
    Cancel,
    Complete,
    Corrupt,
    Fail,
    Finish,
    Offload,
    Operation,
    Promote,
    Reset,
    Retire,
)
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.property import Check, Claim, EventHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.shadow import Shadow


class Valid(Check):
    """The prefix index tells the truth."""

    claims = (
        Claim(
            "A findable block holds, complete, the tokens of the prefix that its key stands for.",
            "chapter, tiering: no incomplete bytes; bugs B32, B37, B44; survey R04, D03",
        ),
        Claim(
            "A block that is reused, evicted or reset is not findable any more.",
            "chapter, life cycle: request evicted → state updated atomically; bugs B32, B33, B34",
        ),
        Claim(
            "A full, computed block is findable, until it is evicted.",
            "survey R04, R11 (cached-free); bug B52 (a cache that never hits)",
        ),
        Claim("A hit names findable blocks only.", "survey R06, E08"),
        Claim(
            "What was computed before a reset of the prefix cache is not findable after it.",
            "bugs B42, B43; survey R20, T28",
        ),
        Claim(
            "A lower tier finds what was copied there, and nothing that was evicted, damaged or "
            "half written.",
            "chapter, tiering: no incomplete bytes; bugs B33, B43, B60, B75, B85; survey T08, T25",
        ),
    )
    positive_control = "stale-key-after-reuse"
    concludes_on = (Retire, Finish, Offload, Promote, Complete, Fail, Cancel, Corrupt, Reset)
    concludes_when = ("done",)

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        tiers = self.books.tiers
        self._below = None if tiers is None else Below(self, tiers)

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {
            BlocksAllocated: self._allocated,
            BlocksReused: self._reused,
            BlockMerged: self._merged,
            KeyMoved: self._moved,
            BlocksPublished: self._published,
        }
        if self._below is not None:
            handlers |= {SlotsEvicted: self._below.evicted, TierReopened: self._below.reopened}
        return handlers

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        handlers: dict[type[Event], EventHandler] = {StepRetired: self._pay} if self._early else {}
        if self._below is not None:
            handlers[TransferEnded] = self._below.ended
        return handlers

    @property
    def _early(self) -> bool:
        return self.semantics.publishes == "at_allocation"

    def _allocated(self, event: BlocksAllocated) -> None:
        findable = self.groups[event.group].key_of
        if findable and not findable.keys().isdisjoint(event.blocks):
            block = next(b for b in event.blocks if b in findable)
            self.fail(
                f"block {block} was given to request {event.request} while its old content "
                "was still findable",
                group=event.group,
                block=block,
                request=event.request,
            )

    def _reused(self, event: BlocksReused) -> None:
        findable = self.groups[event.group].key_of
        self.checked += 1
        if not findable.keys() >= set(event.blocks):
            block = next(b for b in event.blocks if b not in findable)
            self.fail(
                f"request {event.request} got a prefix hit on block {block}, in which "
                "nothing is findable",
                group=event.group,
                block=block,
                request=event.request,
            )
        if self._below is not None:
            self._below.hit(event)

    def _merged(self, event: BlockMerged) -> None:
        self.checked += 1
        if event.target not in self.groups[event.group].key_of:
            self.fail(
                f"request {event.request} gave up block {event.source} for block {event.target}, "
                "in which nothing is findable",
                group=event.group,
                block=event.target,
                request=event.request,
            )

    def _moved(self, event: KeyMoved) -> None:
        self.checked += 1
        findable = self.groups[event.group].key_of
        if event.source not in findable or event.target in findable:
            there = event.source in findable
            self.fail(
                f"what is findable in block {event.source} was moved to block {event.target}, but "
                + ("the old content of that is still findable" if there else "nothing is"),
                group=event.group,
                block=event.target if there else event.source,
                request=event.request,
            )

    def _published(self, event: BlocksPublished) -> None:
        request = self.books.known.get(event.request)
        if request is None:
            return
        group, unit = self.books.groups[event.group], self.books.hit_tokens
        end = event.tokens or (event.row + len(event.blocks)) * group.block_size
        table = request.tables[event.group][event.row : event.row + len(event.blocks)]
        if event.tokens and not self._inside(event, group):
            self._incomplete(event, f"has no state of {event.tokens} tokens there")
        elif end > request.length:
            self._incomplete(event, f"has only {request.length} tokens, not {end}")
        elif end > request.length // unit * unit:
            self._incomplete(event, f"has {request.length} tokens, and groups end at each {unit}")
        elif list(event.blocks) != table:
            self._incomplete(event, f"holds blocks {table} there")
        elif event.row * group.block_size < request.outdated:
            outdated = f"{request.outdated} of its tokens"
            self._incomplete(event, f"computed {outdated} before the prefix cache was reset")
        elif not self._early and end > request.computed:
            self._incomplete(event, f"has computed only {request.computed} tokens, not {end}")
        elif not self._early and request.verified[event.group] < end:
            self._complete(group, request, event.row, len(event.blocks))
        self.checked += 1

    def _inside(self, event: BlocksPublished, group: GroupBooks) -> bool:
        """Whether it is of one state, in the row of that one, where a hit may end."""
        return (
            event.group in self.semantics.states
            and len(event.blocks) == 1
            and (event.tokens - 1) // group.block_size == event.row
            and event.tokens % self.books.hit_tokens == 0
        )

    def _incomplete(self, event: BlocksPublished, why: str) -> None:
        self.fail(
            f"rows {event.row} to {event.row + len(event.blocks) - 1} of request "
            f"{event.request} (blocks {list(event.blocks)}) became findable, "
            f"but the request {why}",
            group=event.group,
            block=event.blocks[-1],
            request=event.request,
        )

    def _complete(self, group: GroupBooks, request: RequestModel, row: int, rows: int) -> bool:
        """Whether the rows' slots hold what the request's history says."""
        size = group.block_size
        table = request.tables[group.group]
        position = self.shadows[group.group].first_mismatch(
            request.tags, row * size, (row + rows) * size, table
        )
        if position is None:
            return True
        block = table[position // size]
        holds = self.shadows[group.group].describe(block, position % size)
        self.fail(
            f"block {block} is findable as row {position // size} of request {request.id}, but "
            f"its offset {position % size} holds {holds}",
            group=group.group,
            block=block,
            request=request.id,
        )
        return False

    def _pay(self, event: StepRetired) -> None:
        self._collect()

    def _collect(self) -> None:
        """Blocks published early are complete once the step that owes them is retired, or they are
        not findable any more: nobody will write them when their request is gone."""
        for group in self.books.groups:
            for block, owed in list(group.owed.items()):
                if not self.books.due(owed):
                    continue
                request, row, shadow = owed.request, owed.row, self.shadows[group.group]
                whole = group.group in self.semantics.states
                if shadow.last_tag(block) == request.tags[owed.end - 1]:
                    del group.owed[block]
                    continue
                missing = "" if whole else self._missing(shadow, block, request, row)
                self.fail(
                    f"block {block} is findable as row {row} of request {request.id}, but "
                    f"no step has written it{missing}",
                    group=group.group,
                    block=block,
                    request=request.id,
                )
                return

    def _missing(self, shadow: Shadow, block: int, request: RequestModel, row: int) -> str:
        """Which positions of the row the block does not hold, unless it holds none of them."""
        size = shadow.block_size
        start, end = row * size, (row + 1) * size
        held = shadow.content[block * size : (block + 1) * size]
        pairs = zip(range(start, end), held, strict=True)
        missing = [str(position) for position, tag in pairs if tag != request.tags[position]]
        if len(missing) == size:
            return ""
        return f" whole: its positions {start} to {end - 1} lack {', '.join(missing)}"

    def concludes(self, kind: type[Operation], status: Status) -> bool:
        # Elsewhere what is computed is findable long before.
        late = self.semantics.publishes == "at_release"
        return (kind is not Finish or late) and super().concludes(kind, status)

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        if not isinstance(operation, Retire):
            if isinstance(operation, Reset):
                self._nothing_findable()
            elif isinstance(operation, Finish):
                self._stays_findable(self.books.ended[-1])
            if self._below is not None:
                self._below.conclude(operation)
            return
        retired, size = self.books.retired, self.books.hit_tokens
        if retired is None or not self.books.configuration.prefix_caching:
            return
        publishes = self.semantics.publishes
        # What was published early may be a copy that stayed private, of what is evicted by now.
        if publishes == "lazily" or (self._early and self.semantics.duplicates == "private"):
            return
        for item, request in retired.items:
            first, last = item.start // size, item.end // size
            if publishes == "at_release":
                last = min(last, request.asked // size)
            if first < last and request.epoch == item.epoch:
                self._completed_is_findable(request, first * size, last * size)

    def _stays_findable(self, request: RequestModel) -> None:
        """What a request computed, now that it has finished."""
        unit = self.books.hit_tokens
        if self.books.configuration.prefix_caching:
            for group in self.groups:
                size = group.block_size
                tags = request.tags[size - 1 : request.computed // unit * unit : size]
                row = next((r for r, tag in enumerate(tags) if tag not in group.key_of_tag), None)
                if row is not None:
                    self.fail(
                        f"request {request.id} finished, but its row {row}, which was complete, "
                        "is not findable",
                        group=group.group,
                        request=request.id,
                    )

    def _nothing_findable(self) -> None:
        """After a reset."""
        for group in self.groups:
            if group.key_of:
                block = next(iter(group.key_of))
                self.fail(
                    f"block {block} is still findable after a reset", group=group.group, block=block
                )

    def settle(self) -> None:
        if self._below is not None:
            self._below.settle()
        for group in self.groups:
            keys = group.touched_keys
            if keys:
                index, blocks_of = self.view.index(group.group), group.blocks_of
                if list(map(index.get, keys)) != list(map(blocks_of.get, keys)):
                    for key in keys:
                        self._entry_agrees(group, key, index.get(key, ()), blocks_of.get(key, ()))

    def _entry_agrees(
        self, group: GroupBooks, key: bytes, actual: Sequence[int], expected: Sequence[int]
    ) -> bool:
        if sorted(actual) == sorted(expected):
            return True
        blocks = actual or expected
        says = f"block {blocks[0]}" if actual else "nothing"
        self.fail(
            f"the prefix cache finds {says} under key {key.hex()[:12]}…, but it should find "
            f"{f'block {expected[0]}' if expected else 'nothing: its block lost that content'}",
            group=group.group,
            block=blocks[0],
        )
        return False

    def _completed_is_findable(self, request: RequestModel, start: int, end: int) -> None:
        """The blocks of these positions were completed by the step that was just retired."""
        for group in self.groups:
            if self.books.window(group.group):
                continue  # it may be behind the window already, or no step may have ended there
            size, known = group.block_size, group.key_of_tag
            tags = request.tags[start + size - 1 : end : size]
            missing = [tag for tag in tags if tag not in known]
            if not missing:
                continue
            row = start // size + tags.index(missing[0])
            block = request.tables[group.group][row]
            self.fail(
                f"row {row} of request {request.id} is complete in block {block}, "
                "but no block is findable with that content",
                group=group.group,
                block=block,
                request=request.id,
            )
            return

    def audit(self) -> None:
        if not self.books.requests:  # perhaps no step will ever be retired again
            self._collect()
        if self._below is not None:
            self._below.audit()
        for group in self.groups:
            index, blocks_of = self.view.index(group.group), group.blocks_of
            if index != blocks_of:  # always so, if it is no dict
                for key in (*index, *(key for key in blocks_of if key not in index)):
                    actual, expected = index.get(key, ()), blocks_of.get(key, ())
                    if not self._entry_agrees(group, key, actual, expected):
                        return
            findable = group.findable
            held = self.shadows[group.group].last_tags(findable)
            if held != list(map(group.tag_of.__getitem__, findable)):
                self._audit_content(group)

    def _audit_content(self, group: GroupBooks) -> None:
        """Name the block that does not hold what it should, unless it is still owed."""
        shadow = self.shadows[group.group]
        for block in group.findable:
            if block not in group.owed and shadow.last_tag(block) != group.tag_of[block]:
                holds = shadow.describe(block, group.block_size - 1)
                self.fail(
                    f"block {block} is findable, but its last slot holds {holds}",
                    group=group.group,
                    block=block,
                )
                return
