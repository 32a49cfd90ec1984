"""XFER: a copy between tiers counts when all of it has arrived, once, and for whoever asked.

Verifies: that transfers have numbers of their own, which rise; that a transfer is started, moved
on, cancelled and ended only by the operation that names it, and that a notice about one that has
ended changes nothing; that its result is the one that it must have: void if it was cancelled or
its request went on without it, failed if it was made to fail or read damage, else completed;
that its sources hold, complete, what it is to copy, and still do when they are copied; that what
was swapped really arrives, there and back, as it was; that it has as many targets as sources, and
brings nothing that is there or on its way already.

Does not verify: which blocks are chosen (CAP); who else uses its targets (EXCL); how long a copy
takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from kvproof.invariants.checks.xfer_bytes import Bytes
from kvproof.invariants.events import (
    Event,
    SlotsEvicted,
    SlotsReleased,
    TierReopened,
    TransferCancelled,
    TransferEnded,
    TransferKind,
    TransferLanded,
    TransferStarted,
)
from kvproof.invariants.operations import (
    Cancel,
    Complete,
    Corrupt,
    Fail,
    Land,
    Notify,
    Offload,
    Operation,
    Preempt,
    Promote,
    Restart,
    Resume,
    kind_of,
)
from kvproof.invariants.outcomes import Outcome, Status
from kvproof.invariants.property import Check, Claim, EventHandler, OperationHandler
from kvproof.invariants.request_books import RequestModel
from kvproof.invariants.slot_books import ENDS, TransferModel
from kvproof.invariants.subject import Semantics
from kvproof.invariants.tags import tag_at_end
from kvproof.invariants.tier_books import Tiers

_STARTED_BY: dict[type[Operation], tuple[TransferKind, ...]] = {
    Offload: ("store", "demote"),
    Promote: ("promote", "fetch"),
    Preempt: ("swap_out",),
    Resume: ("swap_in",),
}


class Xfer(Check):
    """Transfers between tiers; also moves the shadow memory's bytes."""

    claims = (
        Claim(
            "A copied block counts at its target only when all of the copy has arrived.",
            "chapter, tiering: attention cannot consume stale or incomplete bytes; bugs B75, B84, "
            "B90; survey T10, E12",
        ),
        Claim(
            "A transfer ends once: failed, cancelled and timed-out copies never count, whatever "
            "notice comes later.",
            "bugs B83, B87, B98, B99, B104; survey T08, T25",
        ),
        Claim(
            "What is copied is complete and stays as it is while the copy is under way.",
            "chapter, tiering: ownership released only after a safe state; bugs B75, B78, B79; "
            "survey T11",
        ),
        Claim(
            "What a suspended request gets back is, block by block, what was taken from it.",
            "bug B190; survey T18, T19, K09",
        ),
        Claim(
            "Nothing is copied to a place that has it or awaits it, and a request has one swap "
            "under way.",
            "bugs B77, B95; survey T09, T27",
        ),
    )
    positive_control = "partly-landed-counts-as-whole"
    concludes_on = (
        *_STARTED_BY,
        Land,
        Complete,
        Fail,
        Cancel,
        Notify,
        Corrupt,
        Restart,
    )

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._last = -1
        """The number of the newest transfer."""
        self._operation: Operation | None = None
        """The one under way, if it may start, move on or end transfers."""
        self._to_end: dict[int, tuple[str, str]] = {}
        """The transfers that it must end, each with its result and cause."""
        self._named: TransferModel | None = None
        """The transfer that it is about."""
        if self.books.tiers is not None:
            self._bytes = Bytes(self, self.books.tiers)

    @classmethod
    def promised(cls, semantics: Semantics) -> bool:
        return semantics.tiers

    @property
    def _tiers(self) -> Tiers:
        assert self.books.tiers is not None
        return self.books.tiers

    def expects(self, kind: type[Operation], status: Status) -> bool:
        return self.books.tiers is not None and super().expects(kind, status)

    def concludes(self, kind: type[Operation], status: Status) -> bool:
        return self.books.tiers is not None and super().concludes(kind, status)

    # -- which transfer an operation is about, and what must become of it -------------------------

    def expecting(self, kind: type[Operation]) -> OperationHandler | None:
        return self._handlers.get(kind)

    @cached_property
    def _handlers(self) -> Mapping[type[Operation], OperationHandler]:
        return {
            **dict.fromkeys(_STARTED_BY, self._starting),
            **dict.fromkeys((Land, Complete, Fail, Cancel), self._about_one),
            Notify: self._notified,
            Restart: self._restarted,
        }

    def _starting(self, operation: Operation, outcome: Outcome) -> None:
        self._operation = operation

    def _about_one(self, operation: Land | Complete | Fail | Cancel, outcome: Outcome) -> None:
        self._operation = operation
        candidates = [t for t in self._tiers.in_flight.values() if _may(operation, t)]
        expected = [t.number for t in candidates]
        self._compare_target(operation, outcome, expected)
        if not candidates:
            return
        self._named = named = candidates[operation.transfer % len(candidates)]
        if isinstance(operation, Complete | Fail):
            self._to_end[named.number] = self._result(operation, named)
        landed = (
            min(named.landed + operation.parts, len(named.sources))
            if isinstance(operation, Land)
            else 0
        )
        if outcome.count != landed:
            self.fail(
                f"{outcome.count} blocks of transfer {named.number} are said to have arrived, but "
                f"it should be {landed}",
                transfer=named.number,
            )

    def _compare_target(
        self, operation: Land | Complete | Fail | Cancel | Notify, outcome: Outcome, ids: list[int]
    ) -> None:
        expected: tuple[int, ...] = (ids[operation.transfer % len(ids)],) if ids else ()
        status = "done" if ids else "skipped"
        if outcome.transfers != expected or outcome.status != status or outcome.reason:
            named = f"transfer {expected[0]}" if ids else "none"
            self.fail(
                f"{kind_of(operation)} was {outcome.status} for transfers "
                f"{list(outcome.transfers)}, but of {len(ids)} candidates it names {named}",
                transfer=expected[0] if ids else None,
            )

    def _result(self, operation: Complete | Fail, transfer: TransferModel) -> tuple[str, str]:
        if transfer.void:
            return "cancelled", ""
        if isinstance(operation, Fail):
            in_file = operation.cause in ("short_write", "disk_full")
            return "failed", "error" if in_file and transfer.kind != "demote" else operation.cause
        if transfer.kind == "fetch":
            corrupt = self._tiers.disk[transfer.group].corrupt
            if not corrupt.isdisjoint(transfer.sources):
                return "failed", "corrupt"
        return "completed", ""

    def _notified(self, operation: Notify, outcome: Outcome) -> None:
        self._compare_target(operation, outcome, list(self._tiers.ended))

    def _restarted(self, operation: Restart, outcome: Outcome) -> None:
        self._operation = operation
        if outcome.status == "done":
            for number, transfer in self._tiers.in_flight.items():
                if transfer.on_disk:
                    void = transfer.void
                    self._to_end[number] = ("cancelled", "") if void else ("failed", "crash")

    # -- events ----------------------------------------------------------------------------------

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        if self.books.tiers is None:
            return {}
        return {
            TransferStarted: self._started,
            TransferLanded: self._landed,
            TransferCancelled: self._cancelled,
            TransferEnded: self._ended,
        }

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        if self.books.tiers is None:
            return {}
        return {
            TransferStarted: self._bytes.copy_begins,
            TransferLanded: self._bytes.copy_goes_on,
            TransferEnded: self._bytes.copy_ends,
            SlotsEvicted: self._bytes.slots_evicted,
            SlotsReleased: self._bytes.slots_released,
            TierReopened: self._bytes.reopened,
        }

    def _started(self, event: TransferStarted) -> None:
        self.checked += 1
        why = self._misnumbered(event) or self._misfit(event) or self._source_wrong(event)
        if why:
            self.fail(
                f"transfer {event.transfer} ({event.kind}) starts {why}",
                group=event.group,
                request=event.request,
                transfer=event.transfer,
            )
        self._last = max(self._last, event.transfer)
        operation = self._operation
        if isinstance(operation, Preempt | Resume) and not operation.late:
            self._to_end[event.transfer] = ("completed", "")

    def _misnumbered(self, event: TransferStarted) -> str | None:
        operation = self._operation
        if event.transfer <= self._last:
            return f"with the number of an older one: {self._last} was the latest"
        if operation is None or event.kind not in _STARTED_BY.get(type(operation), ()):
            return "though no operation asked for it"
        return None

    def _misfit(self, event: TransferStarted) -> str | None:
        swap = event.kind in ("swap_out", "swap_in")
        sources, targets = len(event.sources), len(event.targets)
        if sources != targets or not sources:
            return f"from {sources} blocks to {targets}"
        if len(event.keys) != (0 if swap else sources):
            return f"with {len(event.keys)} keys for {sources} blocks"
        if swap and event.request is None:
            return "for no request"
        loads = event.kind == "promote" and not self.semantics.copies_hold
        if loads != (event.request is not None) and not swap:
            return "for no request" if loads else f"for request {event.request}"
        return None

    def _source_wrong(self, event: TransferStarted) -> str | None:
        """Why what it copies is not what it is said to be, or need not be copied."""
        if event.kind == "swap_out" or event.kind == "swap_in":
            request = self.books.known.get(-1 if event.request is None else event.request)
            return None if request is None else self._swap_wrong(event, request)
        tiers, (source, target) = self._tiers, ENDS[event.kind]
        group = self.groups[event.group]
        key_of = group.key_of if source == "device" else tiers.of(source)[event.group].key_of
        tag_of: Mapping[int, int] | Sequence[int] = (
            group.tag_of if source == "device" else tiers.of(source)[event.group].tag_of
        )
        released = source == "device" and not self.semantics.copies_hold
        for entry, key in zip(event.sources, event.keys, strict=True):
            meant = tiers.meant(key, entry) if released else None
            if meant is None and (released or key_of.get(entry) != key):
                return f"from {source} block {entry}, where key {key.hex()[:12]}… is not findable"
            tag = tag_of[entry] if meant is None else tag_at_end(meant)
            if target != "device":
                known = tiers.of(target)[event.group].awaits_or_has(tag)
            else:
                known = tag in group.arriving or (event.request is None and tag in group.key_of_tag)
            if known:
                return f"though the {target} has or awaits what {source} block {entry} holds"
        return None

    def _swap_wrong(self, event: TransferStarted, request: RequestModel) -> str | None:
        rows = -(-request.suspended // self.block_size)
        table = request.tables[event.group][:rows]
        own = self._tiers.host[event.group].owned.get(request.id, [])
        if any(
            transfer.request is request and not transfer.void and transfer.group == event.group
            for transfer in map(self._tiers.in_flight.get, (*request.departing, *request.loading))
            if transfer is not None
        ):
            return f"while another one moves request {request.id}"
        if event.kind == "swap_in":
            if list(event.sources) != own or list(event.targets) != table:
                return (
                    f"from host blocks {list(event.sources)} to blocks {list(event.targets)}, but "
                    f"request {request.id} is in {own}, and has been given {table}"
                )
        elif list(event.sources) != table:
            return (
                f"from blocks {list(event.sources)}, but the {request.suspended} computed tokens "
                f"of request {request.id} are in {table}"
            )
        elif request.launched:
            return f"while step {request.last_step}, in flight, writes request {request.id}"
        return None

    def _landed(self, event: TransferLanded) -> None:
        named, operation = self._named, self._operation
        self.checked += 1
        if (
            named is None
            or not isinstance(operation, Land)
            or named.number != event.transfer
            or event.parts != min(named.landed + operation.parts, len(named.sources))
        ):
            self.fail(
                f"{event.parts} blocks of transfer {event.transfer} arrive unasked",
                transfer=event.transfer,
            )

    def _cancelled(self, event: TransferCancelled) -> None:
        named = self._named
        if (
            named is None
            or not isinstance(self._operation, Cancel)
            or named.number != (event.transfer)
        ):
            self.fail(
                f"transfer {event.transfer} is cancelled, but nobody did so",
                transfer=event.transfer,
            )

    def _ended(self, event: TransferEnded) -> None:
        self.checked += 1
        number, result = event.transfer, (event.result, event.cause)
        expected = self._to_end.pop(number, None)
        transfer = self._tiers.in_flight.get(number)
        if transfer is None:
            self.fail(
                f"transfer {number} ends, {event.result}, but it was not in flight",
                transfer=number,
            )
        elif expected is None:
            self.fail(
                f"transfer {number} ({transfer.kind}) ends, {event.result}, by an operation that "
                "was not about it",
                group=transfer.group,
                transfer=number,
            )
        elif result != expected:
            self.fail(
                f"transfer {number} ({transfer.kind}) ended {_words(*result)}, but it should "
                f"have ended {_words(*expected)}",
                group=transfer.group,
                request=None if transfer.request is None else transfer.request.id,
                transfer=number,
            )

    # -- what the operation did ------------------------------------------------------------------

    def conclude(self, operation: Operation, outcome: Outcome) -> None:
        if self._to_end:
            number, (result, cause) = next(iter(self._to_end.items()))
            if outcome.status == "done":
                self.fail(
                    f"transfer {number} should have ended {_words(result, cause)}", transfer=number
                )
            self._to_end.clear()
        if isinstance(operation, Notify) and self.books.events:
            self.fail(
                "a notice about a transfer that has ended changed state: "
                f"{len(self.books.events)} event(s)",
                transfer=outcome.transfers[0] if outcome.transfers else None,
            )
        if isinstance(operation, Corrupt) and operation.file == "data":
            self._bytes.damage(operation)
        if isinstance(operation, Cancel) and self._named is not None and not self._named.cancelled:
            number = self._named.number
            self.fail(f"transfer {number} was cancelled, but not by its events", transfer=number)
        self._operation = self._named = None
        self._compare_flight()

    def _compare_flight(self) -> None:
        actual, expected = list(self.tiered.transfers()), list(self._tiers.in_flight)
        if actual != expected:
            self.fail(
                f"transfers {actual} are in flight, but it should be {expected}",
                transfer=min({*actual} ^ {*expected}, default=None),
            )

    def settle(self) -> None:
        if self.books.tiers is not None:
            self._compare_flight()

    def audit(self) -> None:
        if self.books.tiers is not None:
            self._bytes.audit()


def _may(operation: Operation, transfer: TransferModel) -> bool:
    """Whether it could be about this transfer, which is in flight."""
    if isinstance(operation, Land):
        return transfer.landed < len(transfer.sources) and not transfer.on_disk
    if isinstance(operation, Cancel):
        return transfer.request is None and not transfer.cancelled
    return True


def _words(result: str, cause: str) -> str:
    return f"{result} ({cause})" if cause else result
