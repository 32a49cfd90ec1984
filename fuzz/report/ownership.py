"""Who holds which block after each operation, told from the recorded run alone.

A plain ledger of what the subject reported, so that it can be drawn: it judges nothing, and makes
do with reports that contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

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
    SlotsEvicted,
    SlotsReleased,
    StepItem,
    StepLaunched,
    StepRetired,
    TierReopened,
    TransferCancelled,
    TransferEnded,
    TransferStarted,
)
from kvproof.invariants.operations import Tier
from kvproof.invariants.scheduling.vocabulary import Scheduled
from kvproof.invariants.slot_books import ENDS
from kvproof.invariants.story import Moment

Place = tuple[Tier, int, int]
"""A physical block: its tier, group and number."""


class Cell(Struct, frozen=True):
    """A block after one operation."""

    holders: tuple[str, ...] = ()
    """As the log names them: ``r3`` a request, or ``q3`` where a scheduler knows it by its arrival,
    ``s2`` the fence of a step, ``t4`` a transfer."""
    findable: bool = False
    written_by: tuple[int, ...] = ()
    """Steps in flight that write it."""


EMPTY = Cell()


def ownership(moments: Sequence[Moment], block_size: int) -> list[dict[Place, Cell]]:
    """For each moment the blocks that are not empty, as they are after it."""
    ledger = _Ledger(block_size, arrivals(moments))
    columns = []
    for moment in moments:
        for event in moment.events:
            ledger.follow(event)
        columns.append(ledger.cells())
    return columns


def arrivals(moments: Sequence[Moment]) -> dict[str, str]:
    """The scheduler's names of requests by those of the cache: a step runs them in one order."""
    names: dict[str, str] = {}
    steps: dict[int | None, Sequence[StepItem]] = {}
    for moment in moments:
        for event in moment.events:
            if isinstance(event, StepLaunched):
                steps[event.step] = event.items
            elif isinstance(event, Scheduled):
                pairs = zip(steps.get(event.step, ()), event.parts, strict=False)
                names |= {f"r{item.request}": f"q{part.request}" for item, part in pairs}
    return names


class _Ledger:
    def __init__(self, block_size: int, names: Mapping[str, str]) -> None:
        self._size = block_size
        self._names = names
        self._holders: dict[Place, list[str]] = {}
        self._keys: dict[Place, bytes] = {}
        self._writes: dict[int, set[Place]] = {}
        self._transfers: dict[int, TransferStarted] = {}
        self._cancelled: set[int] = set()
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            BlocksAllocated: lambda e: self._hold(_blocks(e), f"r{e.request}"),
            BlocksReused: lambda e: self._hold(_blocks(e), f"r{e.request}"),
            BlocksShared: lambda e: self._hold(_blocks(e), f"r{e.request}"),
            BlockCopied: self._copied,
            BlockMerged: self._copied,
            KeyMoved: self._moved,
            BlocksReleased: self._released,
            BlocksOutlived: self._released,
            ReleaseFenced: self._fenced,
            BlocksPublished: lambda e: self._publish(_blocks(e), e.keys),
            BlocksEvicted: lambda e: self._unpublish(_blocks(e)),
            TransferStarted: self._started,
            TransferCancelled: lambda e: self._cancelled.add(e.transfer),
            TransferEnded: self._ended,
            SlotsEvicted: lambda e: self._unpublish(_slots(e)),
            SlotsReleased: lambda e: self._drop(_slots(e), f"r{e.request}"),
            TierReopened: self._reopened,
            StepLaunched: self._launched,
            StepRetired: self._retired,
        }

    def follow(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def cells(self) -> dict[Place, Cell]:
        """All blocks that are not empty."""
        held = {place for place, holders in self._holders.items() if holders}
        written = {place for places in self._writes.values() for place in places}
        return {
            place: Cell(
                tuple(self._names.get(holder, holder) for holder in self._holders.get(place, ())),
                place in self._keys,
                tuple(step for step, writes in self._writes.items() if place in writes),
            )
            for place in held | written | self._keys.keys()
        }

    # -- holders ---------------------------------------------------------------------------------

    def _hold(self, places: Iterable[Place], holder: str) -> None:
        for place in places:
            self._holders.setdefault(place, []).append(holder)

    def _drop(self, places: Iterable[Place], holder: str) -> None:
        for place in places:
            holders = self._holders.get(place, [])
            if holder in holders:
                holders.remove(holder)

    def _copied(self, event: BlockCopied | BlockMerged) -> None:
        self._drop([("device", event.group, event.source)], f"r{event.request}")
        self._hold([("device", event.group, event.target)], f"r{event.request}")

    def _released(self, event: BlocksReleased) -> None:
        holder = f"r{event.request}" if event.step is None else f"s{event.step}"
        self._drop(_blocks(event), holder)

    def _fenced(self, event: ReleaseFenced) -> None:
        given_up = f"r{event.request}"
        for (tier, _, _), holders in self._holders.items():
            if tier == "device":
                holders[:] = [f"s{event.step}" if h == given_up else h for h in holders]

    # -- content ---------------------------------------------------------------------------------

    def _publish(self, places: Iterable[Place], keys: Iterable[bytes]) -> None:
        self._keys.update(zip(places, keys, strict=False))

    def _moved(self, event: KeyMoved) -> None:
        key = self._keys.pop(("device", event.group, event.source), None)
        if key is not None:
            self._keys["device", event.group, event.target] = key

    def _unpublish(self, places: Iterable[Place]) -> None:
        for place in places:
            self._keys.pop(place, None)

    def _reopened(self, event: TierReopened) -> None:
        self._unpublish([p for p in self._keys if p[:2] == ("disk", event.group)])
        self._publish(_places("disk", event.group, event.slots), event.keys)

    def _launched(self, event: StepLaunched) -> None:
        size = self._size
        self._writes[event.step] = {
            ("device", group, block)
            for item in event.items
            for group, table in enumerate(item.tables)
            for block in table[item.start // size : -(-item.end // size)]
        }

    def _retired(self, event: StepRetired) -> None:
        self._writes.pop(event.step, None)

    # -- transfers -------------------------------------------------------------------------------

    def _started(self, event: TransferStarted) -> None:
        self._transfers[event.transfer] = event
        self._hold([*_sources(event), *_targets(event)], f"t{event.transfer}")

    def _ended(self, event: TransferEnded) -> None:
        transfer = self._transfers.pop(event.transfer, None)
        if transfer is None:
            return
        self._drop([*_sources(transfer), *_targets(transfer)], f"t{event.transfer}")
        if transfer.kind == "swap_in":  # whatever became of it, the host has nothing left to do
            self._drop(_sources(transfer), f"r{transfer.request}")
        elif event.result != "completed":
            return
        elif transfer.kind != "swap_out":
            self._arrived(transfer)
        elif event.transfer not in self._cancelled:
            self._hold(_targets(transfer), f"r{transfer.request}")

    def _arrived(self, transfer: TransferStarted) -> None:
        """What was promoted is findable, unless the same was findable before."""
        for place, key in zip(_targets(transfer), transfer.keys, strict=False):
            twice = any(k == key and p[:2] == place[:2] for p, k in self._keys.items())
            if not twice:
                self._keys[place] = key


def _places(tier: Tier, group: int, numbers: Iterable[int]) -> list[Place]:
    return [(tier, group, number) for number in numbers]


def _blocks(event: Any) -> list[Place]:
    return _places("device", event.group, event.blocks)


def _slots(event: Any) -> list[Place]:
    return _places(event.tier, event.group, event.slots)


def _sources(event: TransferStarted) -> list[Place]:
    return _places(ENDS[event.kind][0], event.group, event.sources)


def _targets(event: TransferStarted) -> list[Place]:
    return _places(ENDS[event.kind][1], event.group, event.targets)
