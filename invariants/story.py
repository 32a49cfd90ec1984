"""Explanations: the life of one block, one request or one transfer, in prose.

A violation names a block or a request, and perhaps a transfer; their stories are told from the
recorded run, which a replay of the shrunk case provides.  One sentence a moment, in the nouns of
the subject.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    KeyMoved,
    ReleaseFenced,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
    SlotsEvicted,
    SlotsReleased,
    StepItem,
    StepLaunched,
    StepRetired,
    TierReopened,
    TransferCancelled,
    TransferEnded,
    TransferLanded,
    TransferStarted,
    why_evicted,
)
from kvproof.invariants.operations import Arrive, Operation, Tier, kind_of
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.prefix_story import Prefixes
from kvproof.invariants.scheduling.story import iterations_story, rejected_state
from kvproof.invariants.scheduling.vocabulary import SchedulerEvent
from kvproof.invariants.slot_books import ENDS
from kvproof.invariants.verdict import SCHEDULING_PROPERTIES, Violation, counted, place_of


class Moment(Struct, frozen=True):
    """One operation of a run, with what the subject answered and reported."""

    op: int
    operation: Operation
    outcome: Outcome
    events: Sequence[Event]


def explain(violation: Violation, moments: Sequence[Moment], block_size: int) -> str:
    """The violation, and how it came about."""
    what = f"{violation.property} {place_of(violation)}: {violation.message}."
    events = [event for moment in moments for event in moment.events]
    if any(isinstance(event, SchedulerEvent) for event in events):
        what = _with_iterations(what, events, moments)
        if violation.property in SCHEDULING_PROPERTIES:
            return what  # its request is named by arrival, not as the cache names it
    stories = [
        f"{subject}: {'; '.join(story)}."
        for subject, teller in _tellers(violation, block_size)
        if (story := list(_story(teller, moments)))
    ]
    if violation.property == "KEY":
        stories += _prefixes(violation, moments, block_size)
    return "\n".join([what, *stories])


def _prefixes(violation: Violation, moments: Sequence[Moment], block_size: int) -> list[str]:
    """In what two prefixes differ that were taken for the same, if the run tells."""
    prefixes = Prefixes(violation, block_size)
    for moment in moments:
        if moment.outcome.status == "done":
            prefixes.do(moment.operation, moment.outcome)
        for event in moment.events:
            if said := prefixes.tell(event, moment.op):
                return [f"Prefixes: {said}."]
    return []


def _with_iterations(what: str, events: Sequence[Event], moments: Sequence[Moment]) -> str:
    arrivals = {
        moment.outcome.request: moment.operation
        for moment in moments
        if isinstance(moment.operation, Arrive) and moment.outcome.request is not None
    }
    state = rejected_state(events)
    given = f"\nThe policy was given {state}." if state else ""
    return f"{what}\nWhat happened: {iterations_story(events, arrivals)}.{given}"


def _tellers(violation: Violation, block_size: int) -> Iterator[tuple[str, _Teller]]:
    """Of whose lives a violation asks to be told, and who tells them."""
    group, block, tier = violation.group, violation.block, violation.tier
    if block is not None and tier != "device":
        yield f"{tier.capitalize()} block {block}", _Slot(tier, group, block)
    elif block is not None:
        yield f"Block {block}", _Block(group, block, violation.block_size or block_size)
    elif violation.request is not None:
        yield f"Request {violation.request}", _Request(violation.request)
    if violation.transfer is not None:
        yield f"Transfer {violation.transfer}", _Transfer(violation.transfer)


def _story(teller: _Teller, moments: Sequence[Moment]) -> Iterator[str]:
    for moment in moments:
        for event in moment.events:
            said = teller.tell(event)
            if said:
                yield f"{said} at op {moment.op} ({kind_of(moment.operation)})"


class _Teller(Protocol):
    def tell(self, event: Event) -> str | None:
        """What the event did to the teller's subject, if anything."""
        ...


class _Block:
    """Tells what an event did to one block."""

    def __init__(self, group: int, block: int, block_size: int) -> None:
        self._group = group
        self._block = block
        self._size = block_size
        self._steps: dict[int, list[StepItem]] = {}
        self._holders: set[int] = set()
        self._copies = _Copies("device", group, block)

    def tell(self, event: Event) -> str | None:
        if isinstance(event, TransferStarted | TransferLanded | TransferCancelled | TransferEnded):
            return self._copies.tell(event)
        if isinstance(event, ReleaseFenced):
            left = event.request in self._holders
            return f"left by r{event.request} to the fence of step {event.step}" if left else None
        if isinstance(event, StepLaunched):
            return self._launched(event)
        if isinstance(event, StepRetired):
            return self._retired(event)
        if getattr(event, "group", None) != self._group:
            return None
        if isinstance(event, BlockCopied):
            return self._copied(event)
        if isinstance(event, BlockMerged):
            return self._merged(event)
        if isinstance(event, KeyMoved):
            return self._key_moved(event)
        blocks: Sequence[int] = getattr(event, "blocks", ())
        if self._block not in blocks:
            return None
        return self._moved(event, list(blocks).index(self._block))

    def _moved(self, event: Event, index: int) -> str | None:
        if isinstance(event, BlocksAllocated | BlocksReused | BlocksShared):
            self._holders.add(event.request)
        if isinstance(event, BlocksAllocated):
            return f"given to r{event.request} as row {event.row + index}"
        if isinstance(event, BlocksReused):
            return f"reused by r{event.request} as row {event.row + index} (prefix hit)"
        if isinstance(event, BlocksShared):
            return f"shared by r{event.parent} with its fork r{event.request}"
        if isinstance(event, BlocksReleased):
            self._holders.discard(event.request)
            fence = "" if event.step is None else f" by the fence of step {event.step}"
            return f"released by r{event.request}{fence}"
        if isinstance(event, BlocksEvicted):
            return f"evicted {why_evicted(event.cause)}"
        if isinstance(event, BlocksPublished):
            return f"made findable by r{event.request} as row {event.row + index}"
        return None

    def _copied(self, event: BlockCopied) -> str | None:
        if event.target == self._block:
            self._holders.add(event.request)
            return (
                f"given to r{event.request} as row {event.row}, as a copy of block "
                f"{event.source} ({event.tokens} tokens)"
            )
        if event.source == self._block:
            self._holders.discard(event.request)
            return f"copied by r{event.request} to block {event.target}, and released"
        return None

    def _merged(self, event: BlockMerged) -> str | None:
        if event.target == self._block:
            self._holders.add(event.request)
            return (
                f"taken by r{event.request} as row {event.row}, for its equal block {event.source}"
            )
        if event.source == self._block:
            self._holders.discard(event.request)
            return f"given up by r{event.request} for its equal, block {event.target}"
        return None

    def _key_moved(self, event: KeyMoved) -> str | None:
        if event.target == self._block:
            return f"made a copy of block {event.source}, findable in its place"
        if event.source == self._block:
            return f"copied to block {event.target}, which is findable in its place"
        return None

    def _launched(self, event: StepLaunched) -> str | None:
        written = []
        for item in event.items:
            table = item.tables[self._group]
            rows = range(item.start // self._size, -(-item.end // self._size))
            if any(row < len(table) and table[row] == self._block for row in rows):
                written.append(item)
        self._steps[event.step] = written
        if not written:
            return None
        return "to be written by " + " and ".join(
            f"r{item.request} (positions {item.start} to {item.end - 1}) in step {event.step}"
            for item in written
        )

    def _retired(self, event: StepRetired) -> str | None:
        return f"written as step {event.step} retired" if self._steps.get(event.step) else None


class _Request:
    """Tells what an event did to one request."""

    def __init__(self, request: int) -> None:
        self._request = request
        self._steps: set[int] = set()

    def tell(self, event: Event) -> str | None:
        if isinstance(event, StepLaunched):
            for item in event.items:
                if item.request == self._request:
                    self._steps.add(event.step)
                    return f"positions {item.start} to {item.end - 1} in step {event.step}"
            return None
        if isinstance(event, StepRetired):
            return f"step {event.step} retired" if event.step in self._steps else None
        if isinstance(event, RequestForked):
            return self._forked(event)
        if isinstance(event, RequestsDecoded):
            return "grew by 1" if self._request in event.requests else None
        if getattr(event, "request", None) != self._request:
            return None
        return self._own(event)

    def _forked(self, event: RequestForked) -> str | None:
        if event.child == self._request:
            return f"forked from r{event.parent}"
        return f"forked r{event.child}" if event.parent == self._request else None

    def _own(self, event: Event) -> str | None:
        match event:
            case RequestAdmitted():
                return (
                    f"admitted with {event.input_tokens} tokens, {event.cached_tokens} of them "
                    "cached"
                )
            case RequestResumed():
                return f"resumed with {event.cached_tokens} cached tokens"
            case RequestGrown():
                return f"grew by {event.tokens}"
            case RequestPreempted():
                return "preempted"
            case RequestFinished():
                return "finished"
            case RequestAborted():
                return "aborted"
            case ReleaseFenced():
                return f"left its blocks to the fence of step {event.step}"
            case BlocksAllocated():
                return f"got blocks {list(event.blocks)}"
            case BlocksReused():
                return f"reused blocks {list(event.blocks)}"
            case BlocksReleased():
                return f"gave back blocks {list(event.blocks)}"
            case BlockCopied():
                return f"copied block {event.source} to {event.target}"
            case BlockMerged():
                return f"gave up block {event.source} for its equal, {event.target}"
            case TransferStarted(kind="swap_out"):
                return f"swapped out to host blocks {list(event.targets)} ({_named(event)})"
            case TransferStarted():
                what = "waits for" if event.kind == "promote" else "swapped in from"
                return (
                    f"{what} host blocks {list(event.sources)} to blocks {list(event.targets)} "
                    f"({_named(event)})"
                )
            case SlotsReleased():
                return f"gave back host blocks {list(event.slots)}"
        return None


class _Slot:
    """Tells what an event did to one block of a lower tier."""

    def __init__(self, tier: Tier, group: int, slot: int) -> None:
        self._tier = tier
        self._group = group
        self._slot = slot
        self._copies = _Copies(tier, group, slot)

    def tell(self, event: Event) -> str | None:
        if isinstance(event, TransferStarted | TransferLanded | TransferCancelled | TransferEnded):
            return self._copies.tell(event)
        if (getattr(event, "tier", "disk"), getattr(event, "group", None)) != (
            self._tier,
            self._group,
        ):
            return None
        slots: Sequence[int] = getattr(event, "slots", ())
        if self._slot not in slots:
            return None
        if isinstance(event, SlotsEvicted):
            return f"evicted {why_evicted(event.cause)}"
        if isinstance(event, SlotsReleased):
            return f"given up by r{event.request}"
        return "found again after a restart" if isinstance(event, TierReopened) else None


class _Transfer:
    """Tells what an event did to one transfer, or to the request whose blocks it moves."""

    def __init__(self, transfer: int) -> None:
        self._transfer = transfer
        self._whose: int | None = None
        self._under_way = False

    def tell(self, event: Event) -> str | None:
        if getattr(event, "transfer", None) == self._transfer:
            return self._own(event)
        if not self._under_way or getattr(event, "request", None) != self._whose:
            return None
        match event:
            case RequestPreempted() | RequestFinished() | RequestAborted():
                did = type(event).__name__.removeprefix("Request").lower()
                return f"r{event.request}, whose blocks it moves, was {did}"
            case SlotsReleased():
                return f"r{event.request} gave up {event.tier} blocks {list(event.slots)}"
        return None

    def _own(self, event: Event) -> str | None:
        match event:
            case TransferStarted():
                source, target = ENDS[event.kind]
                self._whose, self._under_way = event.request, event.request is not None
                whose = "" if event.request is None else f" of r{event.request}"
                return (
                    f"started, {event.kind} of {source} blocks {list(event.sources)}{whose} to "
                    f"{target} blocks {list(event.targets)}"
                )
            case TransferLanded():
                return f"{counted(event.parts, 'block')} had arrived"
            case TransferCancelled():
                return "cancelled"
            case TransferEnded():
                self._under_way = False
                return f"ended, {event.result}" + (f" ({event.cause})" if event.cause else "")
        return None


class _Copies:
    """Tells what transfers do to one block, at either of their ends."""

    def __init__(self, tier: Tier, group: int, block: int) -> None:
        self._end = (tier, group, block)
        self._seen: dict[int, str] = {}

    def tell(self, event: Event) -> str | None:
        if isinstance(event, TransferStarted):
            return self._started(event)
        number = getattr(event, "transfer", None)
        if number not in self._seen:
            return None
        named = self._seen[number]
        if isinstance(event, TransferLanded):
            return f"{counted(event.parts, 'block')} of {named} had arrived"
        if isinstance(event, TransferCancelled):
            return f"{named} was cancelled"
        if isinstance(event, TransferEnded):
            cause = f" ({event.cause})" if event.cause else ""
            return f"{named} ended, {event.result}{cause}"
        return None

    def _started(self, event: TransferStarted) -> str | None:
        tier, group, block = self._end
        source, target = ENDS[event.kind]
        if group != event.group:
            return None
        who = "" if event.request is None else f" for r{event.request}"
        named = self._seen[event.transfer] = _named(event)
        if tier == source and block in event.sources:
            there = _nth(event.targets, list(event.sources).index(block))
            return f"being copied{who} to {target} block {there} by {named}"
        if tier == target and block in event.targets:
            there = _nth(event.sources, list(event.targets).index(block))
            return f"being filled{who} from {source} block {there} by {named}"
        del self._seen[event.transfer]
        return None


def _named(event: TransferStarted) -> str:
    return f"transfer {event.transfer}, {event.kind}"


def _nth(blocks: Sequence[int], index: int) -> int | None:
    """The block that moved with the one at ``index``; None where the report has too few."""
    return blocks[index] if index < len(blocks) else None
