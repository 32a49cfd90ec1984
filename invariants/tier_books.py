"""The checkers' books of what lies below the device: tiers of slots, and transfers in flight.

They follow events, as the books of the device do, and nothing here judges.  The device's end of a
transfer is one more holder of its blocks, in the books of its group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvproof.invariants.events import (
    Event,
    SlotsEvicted,
    SlotsReleased,
    StepItem,
    TierReopened,
    TransferCancelled,
    TransferEnded,
    TransferLanded,
    TransferStarted,
)
from kvproof.invariants.operations import Corrupt, Offload, Operation, Promote, Slow, Tier
from kvproof.invariants.outcomes import Answer, Outcome
from kvproof.invariants.slot_books import ENDS, TierBooks, TransferModel
from kvproof.invariants.subject import EvictionOrder
from kvproof.invariants.tags import Tags, tag_at_end
from kvproof.invariants.tier_figures import TierFigures
from kvproof.invariants.tier_plans import CopyPlan, offload_plan, promote_plan

if TYPE_CHECKING:
    from kvproof.invariants.books import Books
    from kvproof.invariants.group_books import GroupBooks
    from kvproof.invariants.request_books import RequestModel

USED_BY = frozenset({"promote", "fetch", "store", "swap_in", "swap_out"})
"""Kinds that count as a use of their sources: a demotion does not, it serves no request."""
REMEMBERED = 8
"""Ended transfers of which a notice may still come."""


class Tiers:
    """Books of all tiers below the device, and of the transfers between them."""

    def __init__(self, books: Books) -> None:
        self._books = books
        configuration = self.configuration = books.configuration
        self.groups = books.groups
        self.host = self._tier("host", configuration.host_blocks, configuration.host_eviction)
        self.disk = self._tier("disk", configuration.disk_blocks, configuration.disk_eviction)
        self.all = [*self.host, *self.disk]

        self.in_flight: dict[int, TransferModel] = {}
        """By number, which rises with their start."""
        self.ended: deque[int] = deque(maxlen=REMEMBERED)
        """The latest that ended, the newest first."""
        self.content: dict[bytes, bytes] = {}
        """What each key stands for, as bytes of the shadow memory; where copies do not hold."""
        self.left: dict[int, bytes] = {}
        """What is to be in full blocks of the device that were left to a fence; likewise."""
        self.slow = False
        self.figures = TierFigures(self.groups, self.host, self.disk)

        self.moved = False
        """Whether slots were taken or given back since they were last counted."""
        self.promoted: list[tuple[int, int, bytes]] = []
        """Group, block and key of what was promoted since the last settlement."""
        self.ending: list[TransferModel] = []
        """Transfers that the present operation ended."""
        self.planned: CopyPlan | None = None
        """What the present operation is to copy, if somebody has asked."""

        self.operation_handlers: dict[type[Operation], Callable[..., None]] = {
            Corrupt: self._corrupt,
            Slow: self._slow,
        }
        self.event_handlers: dict[type[Event], Callable[..., None]] = {
            TransferStarted: self._started,
            TransferLanded: self._landed,
            TransferCancelled: self._cancelled,
            TransferEnded: self._ended,
            SlotsEvicted: self._evicted,
            SlotsReleased: self._released,
            TierReopened: self._reopened,
        }

    def _tier(self, tier: Tier, blocks: int, eviction: EvictionOrder) -> list[TierBooks]:
        """Its books, by group; none without blocks."""
        size = self.configuration.block_size
        groups = self.groups if blocks else ()
        return [TierBooks(tier, group.group, blocks, eviction, size) for group in groups]

    def of(self, tier: Tier) -> list[TierBooks]:
        """The tier's books, by group; none if it is not there, or is the device."""
        return self.host if tier == "host" else self.disk if tier == "disk" else []

    @property
    def in_use(self) -> bool:
        """Whether anything is on its way, or kept for a suspended request."""
        return bool(self.in_flight) or any(host.owner for host in self.host)

    def begin(self) -> None:
        """A new operation: what held for the one before is over."""
        self.ending = []
        self.planned = None

    def settled(self) -> None:
        """What was touched has been compared with the view."""
        for tier in self.all:
            tier.touched = []
            tier.touched_keys = []
        self.promoted = []

    def plan(self, operation: Offload | Promote) -> CopyPlan:
        """What it is to copy; to be asked before the books follow its events."""
        if self.planned is None:
            if isinstance(operation, Offload):
                self.planned = offload_plan(self, operation)
            else:
                rows = self._books.rows_to_hit(self._books.tags_of(operation))
                self.planned = promote_plan(self, operation, rows)
            self._books.passing = True
        return self.planned

    # -- what is where ---------------------------------------------------------------------------

    def answer(self, tag: int) -> Answer:
        """What the tiers below the device say of a row that it lacks, in the worst group."""
        if len(self.groups) == 1:
            return self._answer(0, tag)
        lacking = [group.group for group in self.groups if tag not in group.key_of_tag]
        answers = [self._answer(group, tag) for group in lacking]
        return min(answers, key=_WORST_FIRST.index)

    def _answer(self, group: int, tag: int) -> Answer:
        host = self.host[group]
        if tag in self.groups[group].arriving:
            return "hit_pending"
        if tag in host.slot_of:
            return "hit"
        if tag in host.pending:
            return "hit_pending"
        if not self.disk:
            return "miss"
        if self.slow:
            return "retry"
        return "hit" if tag in self.disk[group].slot_of else "miss"

    def admitted(self, tags: Tags[int], cached: int) -> None:
        """A prompt with these tags enters for the first time, with so many cached tokens."""
        if self.configuration.offloads_prefixes:
            self.figures.look_up(self._books.rows_to_hit(tags))
            self.hit(tags, cached)

    def hit(self, tags: Tags[int], cached: int) -> None:
        """What was found on the device is recent on the host, too."""
        if cached and self.configuration.offloads_prefixes:
            size = self.configuration.block_size
            for host in self.host:
                host.touch(tags[size - 1 : cached : size])

    # -- operations ------------------------------------------------------------------------------

    def _slow(self, operation: Slow, outcome: Outcome) -> None:
        self.slow = operation.factor > 1

    def _corrupt(self, operation: Corrupt, outcome: Outcome) -> None:
        found = self.damaged(operation)
        if found is not None:
            tier, slot = found
            (tier.corrupt if operation.file == "data" else tier.unlisted).add(slot)

    def damaged(self, operation: Corrupt) -> tuple[TierBooks, int] | None:
        """The block on disk that such an operation damages."""
        count = sum([len(tier.key_of) for tier in self.disk])
        if not count:
            return None
        index = operation.block % count
        for tier in self.disk:
            if index < len(tier.key_of):
                return tier, list(tier.slot_of_key.values())[index]
            index -= len(tier.key_of)
        return None

    def published(self, group: GroupBooks, blocks: Sequence[int], tags: Sequence[int]) -> None:
        """Blocks became findable on the device: they are to be stored, unless they are."""
        if self.configuration.offloads_prefixes:
            host = self.host[group.group]
            for block, tag in zip(blocks, tags, strict=False):
                if not host.awaits_or_has(tag):
                    group.unstored[block] = None

    def stands_for(self, keys: Sequence[bytes], tags: Tags[int]) -> None:
        """These keys are of rows that follow each other, with these tags."""
        size = self.configuration.block_size
        for row, key in enumerate(keys):
            self.content[key] = tags[row * size : (row + 1) * size].tobytes()

    def left_to_a_fence(self, request: RequestModel) -> None:
        """What a step in flight completes is findable nowhere, and may be stored all the same."""
        size = self.configuration.block_size
        for table in request.tables:
            for row, block in enumerate(table):
                row_tags = request.tags[row * size : (row + 1) * size]
                if len(row_tags) == size:
                    self.left[block] = row_tags.tobytes()
                else:
                    self.left.pop(block, None)

    def written_over(self, item: StepItem) -> None:
        size = self.configuration.block_size
        for table in item.tables:
            for block in table[item.start // size : -(-item.end // size)]:
                self.left.pop(block, None)

    def meant(self, key: bytes, block: int) -> bytes | None:
        """What a key stands for under which that block of the device is to be stored."""
        return self.content.get(key) or self.left.get(block)

    # -- transfers -------------------------------------------------------------------------------

    def _started(self, event: TransferStarted) -> None:
        self.moved = True
        request = self._request(event, event.request)
        group, holds = self.groups[event.group], self._books.semantics.copies_hold
        if event.kind == "store" and not holds:
            meant = map(self.meant, event.keys, event.sources)
            self.content.update({k: c for k, c in zip(event.keys, meant, strict=False) if c})
        transfer = TransferModel(event, self._tags(event), request)
        self.in_flight[event.transfer] = transfer
        if transfer.source != "device":
            self.of(transfer.source)[event.group].pin(transfer.sources)
        elif holds:
            group.hold(transfer.sources)
        if transfer.target == "device":
            if holds:
                group.hold(transfer.targets)
                group.evicting = []
            group.arriving.update(dict.fromkeys(transfer.tags, event.transfer))
            group.touched_keys += transfer.keys  # not to be found yet
        else:
            tier = self.of(transfer.target)[event.group]
            tier.evicting = []
            tier.pin(transfer.targets)
            tier.await_(transfer.tags, event.transfer)
            tier.touched_keys += transfer.keys
        self._leave_queue(transfer)
        if request is not None:
            if event.kind == "swap_out":
                request.departing |= {event.transfer}
            else:
                request.loading |= {event.transfer}

    def _request(self, event: Event, number: int | None) -> RequestModel | None:
        if number is None:
            return None
        request = self._books.known.get(number)
        if request is None:
            self._books.strays.append(event)
        return request

    def _tags(self, event: TransferStarted) -> list[int]:
        """Of what is copied; a block in which nothing is findable has none (XFER)."""
        source = ENDS[event.kind][0]
        if event.kind in ("swap_out", "swap_in"):
            return []
        if source == "device":
            group = self.groups[event.group]
            if not self._books.semantics.copies_hold:
                return [tag_at_end(self.content.get(key, b"")) for key in event.keys]
            return [group.tag_of[block] for block in event.sources]
        tag_of = self.of(source)[event.group].tag_of
        return [tag_of.get(slot, 0) for slot in event.sources]

    def _leave_queue(self, transfer: TransferModel) -> None:
        queue = self._queue(transfer)
        for entry in transfer.sources if queue else ():
            queue.pop(entry, None)

    def _queue(self, transfer: TransferModel) -> dict[int, None]:
        """Where the sources of a copy downwards wait."""
        if transfer.kind == "store":
            return self.groups[transfer.group].unstored
        return self.host[transfer.group].queue if transfer.kind == "demote" else {}

    def _landed(self, event: TransferLanded) -> None:
        transfer = self.in_flight.get(event.transfer)
        if transfer is not None:
            transfer.landed = event.parts

    def _cancelled(self, event: TransferCancelled) -> None:
        transfer = self.in_flight.get(event.transfer)
        if transfer is not None:
            transfer.cancelled = True
            self._expect_no_more(transfer)

    def _expect_no_more(self, transfer: TransferModel) -> None:
        """What a transfer was to bring does not come; what it was to save waits again."""
        if transfer.target == "device":
            self.groups[transfer.group].touched_keys += transfer.keys
            arriving = self.groups[transfer.group].arriving
            for tag in transfer.tags:
                if arriving.get(tag) == transfer.number:
                    del arriving[tag]
            return
        tier = self.of(transfer.target)[transfer.group]
        tier.await_no_more(transfer)
        tier.touched_keys += transfer.keys
        queue = self._queue(transfer)
        queue.update(dict.fromkeys(transfer.sources))

    def _ended(self, event: TransferEnded) -> None:
        self.moved = True
        transfer = self.in_flight.pop(event.transfer, None)
        if transfer is None:
            return  # XFER
        self.ended.appendleft(transfer.number)
        self.ending.append(transfer)
        self._books.passing = True
        completed = event.result == "completed"
        self.figures.failed += event.result == "failed"
        if completed:
            self.figures.moved[transfer.kind] += len(transfer.sources)
        if transfer.kind in ("swap_out", "swap_in"):
            self._swap_ended(transfer, event)
        elif transfer.loads:
            self._loaded(transfer, completed=completed)
        elif completed:
            self._arrived(transfer)
        elif not transfer.cancelled:
            self._expect_no_more(transfer)
        self._let_go(transfer)

    def _arrived(self, transfer: TransferModel) -> None:
        """What was copied is findable at its target, too."""
        group, keys, tags = self.groups[transfer.group], transfer.keys, transfer.tags
        if transfer.target != "device":
            tier = self.of(transfer.target)[transfer.group]
            tier.await_no_more(transfer)
            tier.publish(transfer.targets, keys, tags)
            if transfer.target == "host":
                self._to_save(tier, transfer.targets)
            return
        for block, key, tag in zip(transfer.targets, keys, tags, strict=True):
            group.arriving.pop(tag, None)
            if key not in group.blocks_of:
                group.publish([block], [key], [tag])
                self.promoted.append((transfer.group, block, key))
                self.published(group, [block], [tag])

    def _loaded(self, transfer: TransferModel, *, completed: bool) -> None:
        """The request has what it waited for, or goes on without."""
        request, arriving = transfer.request, self.groups[transfer.group].arriving
        for tag in transfer.tags:
            if arriving.get(tag) == transfer.number:
                del arriving[tag]
        if request is None or request.epoch != transfer.epoch:
            return
        request.loading -= {transfer.number}
        self._books.touched_requests[request.id] = request
        table = request.tables[transfer.group]
        if completed and transfer.targets[-1] in table:
            rows = table.index(transfer.targets[-1]) + 1
            request.computed = request.scheduled = rows * self.configuration.block_size
            request.loaded = True

    def _to_save(self, host: TierBooks, slots: Sequence[int]) -> None:
        """New on the host: to be copied to the disk, unless it is there."""
        if self.disk:
            disk = self.disk[host.group]
            for slot in slots:
                if not disk.awaits_or_has(host.tag_of[slot]):
                    host.queue[slot] = None

    def _swap_ended(self, transfer: TransferModel, event: TransferEnded) -> None:
        request, host, void = transfer.request, self.host[transfer.group], transfer.void
        if request is None:
            return
        request.departing -= {transfer.number}
        request.loading -= {transfer.number}
        self._books.touched_requests[request.id] = request
        if void:
            return  # what it had, it has given up when it went on without
        if transfer.kind == "swap_in":
            host.disown(request.id)
        if event.result == "failed":
            # Other groups' copies back go on: until they have ended, it is still loading.
            request.lose()
            request.swapped = False
            request.departing = frozenset()
        elif transfer.kind == "swap_out":
            host.own(transfer.targets, request.id)
        elif not request.loading:
            request.computed = request.scheduled = request.suspended
            request.suspended = 0

    def _let_go(self, transfer: TransferModel) -> None:
        used, holds = transfer.kind in USED_BY, self._books.semantics.copies_hold
        if transfer.source != "device":
            self.of(transfer.source)[transfer.group].unpin(transfer.sources, used)
        elif holds:
            self.groups[transfer.group].drop(transfer.sources[::-1])
        if transfer.target != "device":
            self.of(transfer.target)[transfer.group].unpin(transfer.targets, used=True)
        elif holds:
            self.groups[transfer.group].drop(transfer.targets[::-1])

    # -- slots -----------------------------------------------------------------------------------

    def _evicted(self, event: SlotsEvicted) -> None:
        self.moved = True
        tier = self.of(event.tier)[event.group]
        for slot in event.slots:
            if event.cause == "corrupt":
                tier.order.forget(slot)
            else:
                tier.order.evicted(slot)
        tier.unpublish(event.slots)
        tier.touched_keys += event.keys
        if event.cause == "pressure":
            tier.evicting += event.slots
        if event.cause in ("pressure", "request"):
            self.figures.evictions[event.tier] += len(event.slots)
        self.figures.corrupt += len(event.slots) if event.cause == "corrupt" else 0

    def _released(self, event: SlotsReleased) -> None:
        self.moved = True
        tier = self.of(event.tier)[event.group]
        if tier.owned.get(event.request) != list(event.slots):
            self._books.strays.append(event)
        tier.disown(event.request)

    def _reopened(self, event: TierReopened) -> None:
        """The disk holds just these, in this order, as if each had become findable now."""
        self.moved = True
        self.figures.corrupt += len(event.damaged)
        disk, host = self.disk[event.group], self.host[event.group]
        tag_of_key = {key: disk.tag_of[slot] for slot, key in disk.key_of.items()}
        for transfer in self.ending:
            if transfer.kind == "demote" and transfer.group == event.group:
                tag_of_key |= zip(transfer.keys, transfer.tags, strict=True)
        damaged = [(slot, disk.key_of[slot]) for slot in disk.corrupt]
        before = list(disk.key_of)
        for slot in before:
            disk.order.forget(slot)
        disk.touched_keys += disk.key_of.values()
        disk.unpublish(before)
        tags = [tag_of_key.get(key, 0) for key in event.keys]
        disk.publish(event.slots, event.keys, tags)
        for slot, key in zip(event.slots, event.keys, strict=True):
            disk.order.insert(slot, key)
        disk.emptied = [slot for slot in before if slot not in disk.key_of]
        disk.corrupt.update([slot for slot, key in damaged if disk.key_of.get(slot) == key])
        for tag in tags:
            host.queue.pop(host.slot_of.get(tag, -1), None)


_WORST_FIRST: tuple[Answer, ...] = ("miss", "retry", "hit_pending", "hit")
