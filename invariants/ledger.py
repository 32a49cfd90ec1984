"""The ownership ledger: what block events and steps say, written into the books.

Who holds which block and what is findable stands in the books of the groups; which blocks a request
has in its rows, and how far it is computed, in the requests' models.  An event about an unknown
request is noted for LIFE to report, and passed over.  Nothing here judges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksEvicted,
    BlocksOutlived,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    KeyMoved,
    ReleaseFenced,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.group_books import Owed
from kvproof.invariants.request_books import RequestModel, StepModel

if TYPE_CHECKING:
    from kvproof.invariants.books import Books


class Ledger:
    """Follows the events of the device's blocks, and of steps."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._semantics = books.semantics
        self._groups = books.groups
        self._requests = books.known
        self._touched = books.touched_requests
        self._steps = books.steps
        self._strays = books.strays
        self.event_handlers: dict[type[Event], Callable[..., None]] = {
            BlocksAllocated: self._blocks_allocated,
            BlocksReused: self._blocks_reused,
            BlocksShared: self._blocks_shared,
            BlockCopied: self._block_copied,
            BlockMerged: self._block_merged,
            KeyMoved: self._key_moved,
            BlocksReleased: self._blocks_released,
            BlocksOutlived: self._blocks_outlived,
            ReleaseFenced: self._release_fenced,
            BlocksPublished: self._blocks_published,
            BlocksEvicted: self._blocks_evicted,
            StepLaunched: self._step_launched,
            StepRetired: self._step_retired,
        }

    def _known(self, event: Event, number: int) -> RequestModel | None:
        request = self._requests.get(number)
        if request is None:
            self._strays.append(event)
        return request

    def _blocks_allocated(self, event: BlocksAllocated) -> None:
        group = self._groups[event.group]
        group.hold(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            table = request.tables[event.group]
            if event.group in self._semantics.states:
                table += self._semantics.reserved[:1] * (event.row - len(table))
            if event.row != len(table):
                self._strays.append(event)
            table += event.blocks
        if group.evicting:
            group.evicting.clear()

    def _blocks_reused(self, event: BlocksReused) -> None:
        self._groups[event.group].hold(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            table = request.tables[event.group]
            if self._semantics.windows:
                # What is behind the window need not be found.
                table += self._semantics.reserved[:1] * (event.row - len(table))
            if event.row != len(table):
                self._strays.append(event)
            table += event.blocks

    def _blocks_shared(self, event: BlocksShared) -> None:
        self._groups[event.group].hold(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            request.tables[event.group] = list(event.blocks)

    def _block_copied(self, event: BlockCopied) -> None:
        group = self._groups[event.group]
        group.hold((event.target,))
        group.drop((event.source,))
        if group.evicting:
            group.evicting.clear()
        self._replaced(event)

    def _block_merged(self, event: BlockMerged) -> None:
        group = self._groups[event.group]
        group.hold((event.target,))
        group.drop((event.source,))
        self._replaced(event)

    def _key_moved(self, event: KeyMoved) -> None:
        group = self._groups[event.group]
        key, tag = group.key_of.get(event.source), group.tag_of[event.source]
        owed = group.owed.pop(event.source, None)
        group.unpublish((event.source,))
        if key is not None:
            group.publish((event.target,), (key,), (tag,))
            if owed is not None:
                group.owed[event.target] = owed
        if group.evicting:
            group.evicting.clear()

    def _replaced(self, event: BlockCopied | BlockMerged) -> None:
        """Another block is named in the table."""
        request = self._known(event, event.request)
        if request is None:
            return
        # A new list: steps in flight may refer to the old one.
        table = request.tables[event.group] = request.tables[event.group][:]
        if event.row < len(table):  # EXCL
            table[event.row] = event.target
        self._doubted(request, event.group, event.row)

    def _doubted(self, request: RequestModel, group: int, row: int) -> None:
        """What was seen in that row, and behind it, has changed."""
        position = row * self._groups[group].block_size
        request.verified[group] = min(request.verified[group], position)
        request.trusted_rows[group] = min(request.trusted_rows[group], row)

    def _blocks_released(self, event: BlocksReleased) -> None:
        self._groups[event.group].drop(event.blocks)
        if event.step is not None:
            self._books.released_fences.add((event.step, event.request, event.group))
            self._books.passing = True
        else:
            request = self._known(event, event.request)
            if request is not None:
                request.tables[event.group] = []
                request.launched = 0

    def _blocks_outlived(self, event: BlocksOutlived) -> None:
        self._groups[event.group].drop(event.blocks)
        request = self._known(event, event.request)
        if request is not None:
            nobodys, gone = self._semantics.reserved[0], set(event.blocks)
            table = request.tables[event.group]
            first = self._books.first_row(event.group, self._books.written(request))
            if not gone.isdisjoint(table[first:]):  # too early, if its next step is ever launched
                self._doubted(request, event.group, first)
            # A new list: steps in flight may refer to the old one.
            request.tables[event.group] = [nobodys if block in gone else block for block in table]

    def _release_fenced(self, event: ReleaseFenced) -> None:
        """The tables move from the request to the step; references stay."""
        request = self._known(event, event.request)
        step = next((step for step in self._steps if step.number == event.step), None)
        if request is not None and step is not None:
            step.fenced.append((request.id, request.tables))
            tiers = self._books.tiers
            if tiers is not None and not self._semantics.copies_hold:
                tiers.left_to_a_fence(request)
            request.tables = [[] for _ in self._groups]
            request.launched = 0

    def _blocks_published(self, event: BlocksPublished) -> None:
        group, row = self._groups[event.group], event.row
        size = group.block_size
        request = self._known(event, event.request)
        if request is None:
            return
        # Tags end with the request's tokens: what is not a full block, VALID has reported.
        tags = self._books.published_tags(event, request)
        group.publish(event.blocks, event.keys, tags)
        tiers = self._books.tiers
        if tiers is not None:
            tiers.published(group, event.blocks, tags)
            if not self._semantics.copies_hold:
                tiers.stands_for(event.keys, request.tags[row * size :])
        if self._semantics.publishes == "at_allocation":
            written = self._books.written(request)
            for block, owed_row in zip(event.blocks, range(row, row + len(tags)), strict=False):
                end = event.tokens or (owed_row + 1) * size
                if end > written:
                    group.owed[block] = Owed(request, owed_row, request.epoch, end)

    def _blocks_evicted(self, event: BlocksEvicted) -> None:
        group = self._groups[event.group]
        group.unpublish(event.blocks)
        group.touched += event.blocks
        group.touched_keys += event.keys
        self._books.figures.evictions += len(event.blocks)
        if event.cause == "pressure":
            group.evicting += event.blocks

    # -- steps -----------------------------------------------------------------------------------

    def _step_launched(self, event: StepLaunched) -> None:
        items, tables = [], []
        for item in event.items:
            request = self._known(event, item.request)
            if request is None:
                continue
            items.append((item, request))
            tables.append(tuple(request.tables))
            if request.loaded:
                request.computed = min(request.scheduled, max(request.begins, item.start))
                request.loaded = False
            request.scheduled = item.end
            request.launched += 1
            request.last_step = event.step
            if self._books.tiers is not None and self._books.tiers.left:
                self._books.tiers.written_over(item)
        self._steps.append(StepModel(event.step, items, tables))
        figures = self._books.figures
        figures.iterations += 1
        figures.batch_size = len(event.items)

    def _step_retired(self, event: StepRetired) -> None:
        if not self._steps:
            return
        if self._steps[0].number != event.step:
            self._strays.append(event)
            return
        step = self._books.retired = self._steps.popleft()
        self._books.passing = True
        for item, request in step.items:
            if request.epoch == item.epoch:
                request.computed = item.end
                request.launched -= 1
            self._touched[request.id] = request
