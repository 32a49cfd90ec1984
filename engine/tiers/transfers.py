"""What is on its way between the tiers.

A transfer holds one reference on each device block, or one pin on each slot, at both of its ends,
from its start to its end, whatever becomes of the request it is about: so nothing that it reads or
writes is handed out meanwhile.  It moves all of its blocks or none: what landed of one that failed
or was cancelled counts for nothing.  Transfers are found by their ids, which are never reused: a
notice that comes late finds nothing, and not the transfer that has the slot now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvproof.engine.metrics import Counters
from kvproof.engine.pool import BlockPool
from kvproof.engine.request import Request
from kvproof.engine.tiers.disk import DiskFullError, Files, ShortWriteError
from kvproof.engine.tiers.memory import label, payload
from kvproof.engine.tiers.pool import TierPool
from kvproof.engine.tiers.storage import Storage
from kvproof.engine.tiers.transfer import ENDS, Notice, Transfer
from kvproof.invariants.events import (
    Event,
    SlotsReleased,
    TransferCancelled,
    TransferEnded,
    TransferKind,
    TransferLanded,
    TransferStarted,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.subject import Configuration

Result = Literal["completed", "failed", "cancelled"]
REMEMBERED = 8
"""Ended transfers of which a notice may still come."""


class Transfers(Storage):
    """The tiers with all transfers between them: the only one who uses or fills a slot."""

    def __init__(
        self,
        configuration: Configuration,
        device: list[BlockPool],
        events: list[Event],
        counters: Counters,
        *,
        folder: Path | None,
        files: Files | None,
    ) -> None:
        super().__init__(configuration, device, events, folder=folder, files=files)
        self.transfers: dict[int, Transfer] = {}
        """In flight, by id, which is by their start."""
        self.ended: deque[Notice] = deque(maxlen=REMEMBERED)
        """Of the latest to end, the newest first."""
        self.counters = counters
        self._next_transfer = 0
        self._count_damaged()

    # -- start -----------------------------------------------------------------------------------

    def _start(
        self,
        kind: TransferKind,
        group: int,
        sources: Sequence[int],
        targets: Sequence[int],
        keys: Sequence[bytes] = (),
        request: Request | None = None,
    ) -> Transfer:
        """A transfer into targets that have been taken for it."""
        transfer = Transfer(self._next_transfer, kind, group, sources, targets, keys, request)
        self._next_transfer += 1
        self.transfers[transfer.id] = transfer
        self._pin(transfer)
        transfer.generations = self._generations(transfer)
        self._announce(transfer)
        if request is not None:
            request.transfers = (*request.transfers, transfer.id)
        number = None if request is None else request.id
        self._events.append(
            TransferStarted(
                transfer.id, kind, group, transfer.sources, transfer.targets, transfer.keys, number
            )
        )
        return transfer

    def _pin(self, transfer: Transfer) -> None:
        """The sources are used; targets are, since they were taken, but for a request's own."""
        if ENDS[transfer.kind][0] == "device":
            self.device[transfer.group].share(transfer.sources)
        else:
            self._slots(transfer, 0).pin(transfer.sources)
        if transfer.kind == "swap_in":
            self.device[transfer.group].share(transfer.targets)

    def _unpin(self, transfer: Transfer) -> None:
        """Nothing uses the two ends any more; tail first, so that a prefix is evicted last."""
        for end, blocks in enumerate((transfer.sources, transfer.targets)):
            if ENDS[transfer.kind][end] == "device":
                self.device[transfer.group].release(blocks[::-1])
            else:
                # A copy to the disk serves no request.
                used = transfer.kind != "demote" or end == 1
                self._slots(transfer, end).unpin(blocks, used)

    def _slots(self, transfer: Transfer, end: int) -> TierPool:
        """The pool of slots at the source (0) or the target (1)."""
        return self.pools(ENDS[transfer.kind][end])[transfer.group]

    def _generations(self, transfer: Transfer) -> list[list[int]]:
        ends = []
        for end, blocks in enumerate((transfer.sources, transfer.targets)):
            if ENDS[transfer.kind][end] != "device":
                generations = self._slots(transfer, end).generations
                ends.append([generations[slot] for slot in blocks])
        return ends

    def _must_be_the_same(self, transfer: Transfer) -> None:
        """The slots at its ends have not been handed out anew: it had them pinned."""
        assert transfer.generations == self._generations(transfer), "a slot is in another use"

    def _announce(self, transfer: Transfer) -> None:
        """Its keys are on their way: no other transfer brings them to the same tier."""
        if transfer.kind == "promote":
            self.promoting[transfer.group].update(dict.fromkeys(transfer.keys))
        elif transfer.keys:
            self._slots(transfer, 1).reserve(transfer.targets, transfer.keys)
            self._queue(transfer, wait=False)

    def _renounce(self, transfer: Transfer) -> None:
        """Its keys are not on their way any more; what it was to save waits again."""
        if transfer.kind == "promote":
            for key in transfer.keys:
                del self.promoting[transfer.group][key]
        elif transfer.keys:
            self._slots(transfer, 1).unreserve(transfer.keys)
            self._queue(transfer, wait=True)

    def _queue(self, transfer: Transfer, wait: bool) -> None:
        """What a copy downwards takes from its queue, and puts at the end if it came to nothing."""
        if transfer.kind == "fetch":
            return
        store, group = transfer.kind == "store", transfer.group
        queue = self.unstored[group] if store else self.host[group].unsaved
        for key in transfer.keys:
            if wait:
                queue[key] = None
            else:
                del queue[key]

    # -- on its way ------------------------------------------------------------------------------

    def land(self, transfer: Transfer, parts: int) -> Outcome:
        """So many more of its blocks have arrived."""
        self._must_be_the_same(transfer)
        landed = min(transfer.landed + parts, len(transfer.sources))
        self._copy(transfer, transfer.landed, landed)
        transfer.landed = landed
        self._events.append(TransferLanded(transfer.id, landed))
        return Outcome("done", count=landed, transfers=(transfer.id,))

    def cancel(self, transfer: Transfer) -> Outcome:
        """Nobody wants its result any more; it goes on to its end."""
        transfer.cancelled = True
        self._renounce(transfer)
        self._events.append(TransferCancelled(transfer.id))
        return Outcome("done", transfers=(transfer.id,))

    def void(self, transfer: Transfer) -> bool:
        """Whether its result means nothing: cancelled, or its request has gone on without it, or
        has lost what it moves."""
        request = transfer.request
        return transfer.cancelled or (
            request is not None and (transfer.id not in request.transfers or not request.suspended)
        )

    @property
    def in_use(self) -> bool:
        """Whether anything is on its way, or kept for a suspended request."""
        return bool(self.transfers) or any(pool.owners for pool in self.host)

    # -- its end ---------------------------------------------------------------------------------

    def complete(self, transfer: Transfer) -> Outcome:
        """All its bytes have arrived, or so it says."""
        if self.void(transfer):
            self._finish(transfer, "cancelled")
        else:
            cause = self._deliver(transfer)
            self._finish(transfer, "failed" if cause else "completed", cause)
        return Outcome("done", transfers=(transfer.id,))

    def fail(self, transfer: Transfer, cause: str) -> Outcome:
        """It ends without all its bytes."""
        if self.void(transfer):
            self._finish(transfer, "cancelled")
        else:
            self._finish(transfer, "failed", cause)
        return Outcome("done", transfers=(transfer.id,))

    def notify(self, notice: Notice) -> Outcome:
        """A transfer that has ended says that it is complete."""
        transfer = self.find(notice)
        if transfer is not None:
            self.complete(transfer)
        return Outcome("done", transfers=(notice.transfer,))

    def find(self, notice: Notice) -> Transfer | None:
        """The transfer in flight that a notice is about."""
        return self.transfers.get(notice.transfer)

    def restart(self) -> Outcome:
        """The disk tier has died, with all that was on its way to or from it, and comes back."""
        crashed = [transfer for transfer in self.transfers.values() if transfer.on_disk]
        for transfer in crashed:
            self.fail(transfer, "crash")
        self._reopen()
        self._count_damaged()
        return Outcome("done", transfers=tuple([transfer.id for transfer in crashed]))

    def _count_damaged(self) -> None:
        """Of the files as they were opened."""
        self.counters.corrupt_blocks += sum([len(file.damaged) for file in self.files])

    def _deliver(self, transfer: Transfer) -> str:
        """Its bytes reach their target; otherwise says what kept them from it."""
        self._must_be_the_same(transfer)
        try:
            if transfer.kind == "demote":
                self.write(transfer)
            elif transfer.kind == "fetch":
                return self._read(transfer)
            else:
                self._copy(transfer, transfer.landed, len(transfer.sources))
        except ShortWriteError:
            return "short_write"
        except DiskFullError:
            return "disk_full"
        except OSError:
            return "error"
        return ""

    def write(self, transfer: Transfer) -> None:
        """Put a copy to disk into its file.  Raises ShortWriteError or DiskFullError."""
        group = transfer.group
        payloads = [payload(cell) for cell in self.memory.read("host", group, transfer.sources)]
        self.files[group].put(transfer.targets, transfer.keys, payloads)

    def _read(self, transfer: Transfer) -> str:
        """Get a copy from disk out of its file, unless any of it is damaged."""
        get = self.files[transfer.group].get
        found = map(get, transfer.sources, transfer.keys)
        labels = [label(payload) for payload in found if payload is not None]
        if len(labels) < len(transfer.sources):
            return "corrupt"
        self.memory.write("host", transfer.group, transfer.targets, labels)
        return ""

    def _copy(self, transfer: Transfer, first: int, end: int) -> None:
        """The blocks from ``first`` to ``end`` arrive."""
        source, target = ENDS[transfer.kind]
        labels = self.memory.read(source, transfer.group, transfer.sources[first:end])
        self.memory.write(target, transfer.group, transfer.targets[first:end], labels)

    def _finish(self, transfer: Transfer, result: Result, cause: str = "") -> None:
        """It is over: what it brought counts if it completed, and nothing is pinned any more."""
        del self.transfers[transfer.id]
        self._remember(transfer)
        request = transfer.request
        if request is not None:
            request.transfers = tuple([t for t in request.transfers if t != transfer.id])
        if result == "completed":
            self._arrived(transfer)
        elif result == "failed":
            self.counters.transfers_failed += 1
            self._came_to_nothing(transfer)
        self._events.append(TransferEnded(transfer.id, result, cause))
        self._unpin(transfer)
        if cause == "corrupt":
            dropped = self.drop_damaged(transfer.group, transfer.sources)
            self.counters.corrupt_blocks += dropped

    def _remember(self, transfer: Transfer) -> None:
        notice = Notice(transfer.id, transfer.kind, transfer.group, transfer.targets[0])
        self.ended.appendleft(notice)

    def _arrived(self, transfer: Transfer) -> None:
        """What it brought counts."""
        group, keys, targets = transfer.group, transfer.keys, transfer.targets
        self.counters.blocks_moved[transfer.kind] += len(targets)
        if transfer.kind == "promote":
            for block, key in zip(targets, keys, strict=True):
                del self.promoting[group][key]
                self.device[group].publish(block, key)
        elif transfer.kind == "swap_out":
            self._swapped_out(transfer)
        elif transfer.kind == "swap_in":
            self._swapped_in(transfer)
        else:
            self._slots(transfer, 1).publish(targets, keys)

    def _came_to_nothing(self, transfer: Transfer) -> None:
        """It failed: a suspended request has lost what it had computed.

        As long as other groups' blocks are being loaded into its table, it stays loading.
        """
        self._renounce(transfer)
        request = transfer.request
        if request is not None:
            loads = request.transfers if transfer.kind == "swap_in" else ()
            self._disown(transfer)
            self.release(request)
            request.transfers = loads
            request.swapped = False
            request.computed = request.scheduled = 0

    # -- suspended requests ----------------------------------------------------------------------

    def _swapped_out(self, transfer: Transfer) -> None:
        assert transfer.request is not None
        self.host[transfer.group].own(transfer.targets, transfer.request.id)

    def _swapped_in(self, transfer: Transfer) -> None:
        """One group's blocks are back; with the last group's, the tokens are."""
        request = transfer.request
        assert request is not None
        self._disown(transfer)
        if not request.transfers:
            request.computed = request.scheduled = request.suspended
            request.suspended = 0
            request.host_tables = []

    def _disown(self, transfer: Transfer) -> None:
        """The slots of a swap are not the request's, or not any more."""
        request, pool = transfer.request, self.host[transfer.group]
        assert request is not None
        slots = transfer.sources if transfer.kind == "swap_in" else transfer.targets
        pool.disown([slot for slot in slots if slot in pool.owners])
        request.host_tables[transfer.group] = []

    def release(self, request: Request) -> None:
        """A suspended request gives up what the host has of it, or is about to have.

        Transfers go on to their end, and their slots are free then.
        """
        for pool, slots in zip(self.host, request.host_tables, strict=False):
            if slots and slots[0] in pool.owners:
                self._events.append(SlotsReleased("host", pool.group, request.id, slots))
                pool.disown(slots)
        request.host_tables = []
        request.transfers = ()
        request.suspended = 0
