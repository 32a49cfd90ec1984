"""Must-hit situations of a memory hierarchy; as :mod:`kvproof.invariants.goals`, of which they are
a part."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice

from kvproof.invariants.books import Books
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksReleased,
    BlocksReused,
    Event,
    ReleaseFenced,
    SlotsEvicted,
    StepLaunched,
    TierReopened,
    TransferEnded,
    TransferLanded,
)
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Complete,
    Decode,
    Finish,
    Grow,
    Notify,
    Offload,
    Operation,
    Preempt,
    Promote,
    Reserve,
    Reset,
    Restart,
    Resume,
    Retire,
    kind_of,
)
from kvproof.invariants.orders import Adaptive
from kvproof.invariants.outcomes import (
    HIT_PENDING,
    NO_DISK_BLOCKS,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    RETRY,
    Outcome,
)
from kvproof.invariants.property import EventHandler, OperationHandler
from kvproof.invariants.slot_books import TransferModel
from kvproof.invariants.tier_books import REMEMBERED, Tiers

_BY_KIND = {"store": "store-completed", "promote": "promoted", "demote": "demoted"}
_BY_KIND |= {"fetch": "fetched", "swap_out": "swapped-out", "swap_in": "swapped-in"}
_BY_CAUSE = {"short_write": "short-write", "disk_full": "disk-full"}
_BY_CAUSE |= {"corrupt": "corrupt-block-met"}
_REFUSED = {
    ("promote", NO_FREE_BLOCKS): "promotion-refused",
    ("promote", NO_HOST_BLOCKS): "fetch-refused",
    ("offload", NO_HOST_BLOCKS): "store-refused",
    ("offload", NO_DISK_BLOCKS): "demote-refused",
}


class TierGoals:
    """Counts how often each was met, in the figures of all goals."""

    def __init__(self, books: Books, tiers: Tiers, hits: dict[str, int]) -> None:
        self._books = books
        self._tiers = tiers
        self._hits = hits
        self._promoted: set[tuple[int, int]] = set()
        """Group and block of what came from the host and was not evicted since."""
        self._loaded: set[int] = set()
        """Requests whose blocks are back, before a step carries them."""
        self._ended: deque[TransferModel] = deque(maxlen=REMEMBERED)
        self._gave_back_stored = False
        """Whether the present operation released a block that a store reads."""
        self._adaptive = [tier.order for tier in tiers.all if isinstance(tier.order, Adaptive)]
        self._adaptive += [group.adaptive for group in books.groups if group.adaptive is not None]
        self._comebacks = 0

    # -- events ----------------------------------------------------------------------------------

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            TransferLanded: self._landed,
            TransferEnded: self._transfer_ended,
            SlotsEvicted: self._slots_evicted,
            TierReopened: self._reopened,
            BlocksReused: self._reused,
            BlocksEvicted: self._evicted,
            BlocksAllocated: self._allocated,
            BlocksReleased: self._released,
            ReleaseFenced: self._fenced,
            StepLaunched: self._launched,
        }

    def _landed(self, event: TransferLanded) -> None:
        transfer = self._tiers.in_flight.get(event.transfer)
        if transfer is not None:
            self._hits["landed-in-part"] += event.parts < len(transfer.sources)

    def _transfer_ended(self, event: TransferEnded) -> None:
        transfer = self._tiers.in_flight.get(event.transfer)
        if transfer is None:
            return
        self._ended.appendleft(transfer)
        if event.result == "completed":
            self._hits[_BY_KIND[transfer.kind]] += 1
            if transfer.kind == "promote":
                self._promoted.update((transfer.group, block) for block in transfer.targets)
            elif transfer.kind == "swap_in" and transfer.request is not None:
                self._loaded.add(transfer.request.id)
        elif event.result == "failed":
            self._hits["failed-after-landing"] += transfer.landed > 0
            if event.cause in _BY_CAUSE:
                self._hits[_BY_CAUSE[event.cause]] += 1

    def _slots_evicted(self, event: SlotsEvicted) -> None:
        if event.cause == "pressure":
            self._hits["host-evicted-under-pressure"] += event.tier == "host"
            tier = self._tiers.of(event.tier)[event.group]
            self._hits["evicts-past-pinned-slot"] += not tier.busy.isdisjoint(tier.key_of)

    def _reopened(self, event: TierReopened) -> None:
        self._hits["restart-finds-blocks"] += len(event.slots) > 0
        self._hits["damaged-entry-met"] += len(event.damaged) > 0

    def _reused(self, event: BlocksReused) -> None:
        if self._promoted and any((event.group, b) in self._promoted for b in event.blocks):
            self._hits["hit-on-promoted-block"] += 1
        self._hits["store-source-hit"] += self._stored(event.group, event.blocks)

    def _evicted(self, event: BlocksEvicted) -> None:
        self._promoted.difference_update((event.group, block) for block in event.blocks)
        plan = self._tiers.planned
        if plan is not None and plan.target == "device":
            group = self._books.groups[event.group]
            order = group.cached_free if group.adaptive is None else group.adaptive
            next_ones = islice(order, len(event.blocks))
            self._hits["promotion-spares-its-prefix"] += not plan.spared[event.group].isdisjoint(
                next_ones
            )

    def _stored(self, group: int, blocks: Sequence[int]) -> bool:
        """Whether a copy to the host reads one of these blocks."""
        return any(
            transfer.kind == "store"
            and transfer.group == group
            and not set(transfer.sources).isdisjoint(blocks)
            for transfer in self._tiers.in_flight.values()
        )

    def _allocated(self, event: BlocksAllocated) -> None:
        group = self._books.groups[event.group]
        for transfer in self._tiers.in_flight.values():
            if transfer.kind == "store" and transfer.group == event.group:
                self._hits["store-outlives-its-block"] += _sole_holder(transfer, group)

    def _released(self, event: BlocksReleased) -> None:
        if event.step is None and self._stored(event.group, event.blocks):
            self._gave_back_stored = True

    def _fenced(self, event: ReleaseFenced) -> None:
        request = self._books.known.get(event.request)
        for group, table in enumerate(request.tables if request is not None else ()):
            if self._stored(group, table):
                self._gave_back_stored = True

    def _launched(self, event: StepLaunched) -> None:
        if self._loaded:
            self._loaded.difference_update(item.request for item in event.items)

    # -- operations ------------------------------------------------------------------------------

    def concluding(self, kind: type[Operation]) -> OperationHandler | None:
        """What looks at operations of this kind, done or refused."""
        return self._handlers.get(kind)

    @cached_property
    def _handlers(self) -> Mapping[type[Operation], OperationHandler]:
        return {
            Admit: self._admit,
            Resume: self._resume,
            Grow: self._refused,
            Decode: self._refused,
            Reserve: self._refused,
            Offload: self._refused,
            Promote: self._promote,
            Preempt: self._preempt,
            Finish: self._gone,
            Abort: self._abort,
            Retire: self._gone,
            Complete: self._complete,
            Notify: self._notify,
            Restart: self._restart,
            Reset: self._reset,
        }

    def _refused(self, operation: Operation, outcome: Outcome) -> None:
        reason = outcome.reason
        if reason is None:
            return
        goal = _REFUSED.get((kind_of(operation), reason))
        if goal is not None:
            self._hits[goal] += 1
        self._hits["withheld-blocks-refuse"] += self._withheld(reason)

    def _withheld(self, reason: str) -> bool:
        if reason == NO_FREE_BLOCKS:
            return any(group.withheld for group in self._books.groups)
        lacking = {NO_HOST_BLOCKS: self._tiers.host, NO_DISK_BLOCKS: self._tiers.disk}
        return any(tier.withheld for tier in lacking.get(reason, ()))

    def _admit(self, operation: Admit, outcome: Outcome) -> None:
        self._hits["hit-on-pending"] += outcome.lookup == HIT_PENDING
        self._hits["waited-for-pending"] += outcome.reason == HIT_PENDING
        self._hits["retry-answered"] += outcome.lookup == RETRY
        self._refused(operation, outcome)

    def _promote(self, operation: Promote, outcome: Outcome) -> None:
        self._hits["promotion-spares-its-prefix"] += self._spares(outcome)
        self._hits["retry-answered"] += RETRY in (outcome.lookup, outcome.reason)
        self._refused(operation, outcome)

    def _spares(self, outcome: Outcome) -> bool:
        """Whether a copy is refused for want of the cached blocks that it extends."""
        plan = self._tiers.planned
        if plan is None or plan.target != "device" or outcome.reason != NO_FREE_BLOCKS:
            return False
        return any(len(b) <= self._books.groups[group].free for group, b in plan.chosen)

    def _resume(self, operation: Resume, outcome: Outcome) -> None:
        request = self._books.requests.get(-1 if outcome.request is None else outcome.request)
        if request is not None:
            self._hits["loading"] += len(request.loading) > 0
            refused = outcome.reason == NO_FREE_BLOCKS
            self._hits["swap-in-refused"] += refused and request.swapped
        self._refused(operation, outcome)

    def _preempt(self, operation: Preempt, outcome: Outcome) -> None:
        request = self._books.requests.get(-1 if outcome.request is None else outcome.request)
        if request is not None and outcome.status == "done":
            self._hits["swap-out-in-flight"] += len(request.departing) > 0
            self._hits["preempted-while-stored"] += self._gave_back_stored
        self._gone(operation, outcome)
        self._refused(operation, outcome)

    def _gone(self, operation: Operation, outcome: Outcome) -> None:
        """Blocks were released, or may have been."""
        self._gave_back_stored = False
        if self._adaptive:
            comebacks = sum([order.comebacks for order in self._adaptive])
            self._hits["arc-ghost-hit"] += comebacks - self._comebacks
            self._comebacks = comebacks

    def _abort(self, operation: Abort, outcome: Outcome) -> None:
        self._gone(operation, outcome)
        for request in self._books.ended:
            self._hits["aborted-while-loading"] += len(request.loading) > 0
            self._hits["aborted-after-load"] += request.id in self._loaded
            self._loaded.discard(request.id)

    def _complete(self, operation: Complete, outcome: Outcome) -> None:
        self._gone(operation, outcome)
        for transfer in self._tiers.ending:
            self._hits["cancelled-then-completed"] += transfer.cancelled
            older = next(iter(self._tiers.in_flight), transfer.number)
            self._hits["completed-out-of-order"] += older < transfer.number

    def _notify(self, operation: Notify, outcome: Outcome) -> None:
        ended = next((t for t in self._ended if t.number in outcome.transfers), None)
        if ended is not None:
            self._hits["late-notice-while-slot-is-reused"] += any(
                (transfer.target, transfer.group) == (ended.target, ended.group)
                and not set(transfer.targets).isdisjoint(ended.targets)
                for transfer in self._tiers.in_flight.values()
            )

    def _restart(self, operation: Restart, outcome: Outcome) -> None:
        crashed = [transfer for transfer in self._tiers.ending if transfer.kind == "demote"]
        self._hits["restart-with-a-store-in-flight"] += len(crashed) > 0
        cancelled = any(transfer.cancelled for transfer in self._tiers.ending)
        self._hits["restart-with-a-cancelled-copy"] += cancelled

    def _reset(self, operation: Reset, outcome: Outcome) -> None:
        books = self._books
        if outcome.status != "refused":
            return
        alone = not books.requests and not books.steps
        self._hits["reset-refused-by-transfer"] += alone
        held = any(group.referenced for group in books.groups)
        self._hits["reset-refused-by-suspension"] += not held and not self._tiers.in_flight


def _sole_holder(transfer: TransferModel, group: GroupBooks) -> bool:
    return any(group.refs[block] == 1 for block in transfer.sources)
