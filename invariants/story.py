"""Explanations: the life of one block or one request, in prose.

A violation names a block or a request; its story is told from the recorded run, which a replay
of the shrunk case provides.  One sentence a moment, in the nouns of the subject.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    BlocksSwappedIn,
    BlocksSwappedOut,
    Event,
    HostBlocksReleased,
    ReleaseFenced,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import Operation, kind_of
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.story import iterations_story, rejected_state
from kvproof.invariants.scheduling.vocabulary import SchedulerEvent
from kvproof.invariants.verdict import SCHEDULING_PROPERTIES, Violation


class Moment(Struct, frozen=True):
    """One operation of a run, with what the subject answered and reported."""

    op: int
    operation: Operation
    outcome: Outcome
    events: Sequence[Event]


def explain(violation: Violation, moments: Sequence[Moment], block_size: int) -> str:
    """The violation, and how it came about."""
    what = f"{violation.property} at operation {violation.op}: {violation.message}."
    events = [event for moment in moments for event in moment.events]
    if any(isinstance(event, SchedulerEvent) for event in events):
        what = _with_iterations(what, events)
        if violation.property in SCHEDULING_PROPERTIES:
            return what  # its request is named by arrival, not as the cache names it
    story = list(_story(violation, moments, block_size))
    if not story:
        return what
    subject = (
        f"Block {violation.block}"
        if violation.block is not None
        else f"Request {violation.request}"
    )
    return f"{what}\n{subject}: {'; '.join(story)}."


def _with_iterations(what: str, events: Sequence[Event]) -> str:
    state = rejected_state(events)
    given = f"\nThe policy was given {state}." if state else ""
    return f"{what}\nWhat happened: {iterations_story(events)}.{given}"


def _story(violation: Violation, moments: Sequence[Moment], block_size: int) -> Iterator[str]:
    teller: _Block | _Request
    if violation.block is not None:
        teller = _Block(violation.group, violation.block, block_size)
    elif violation.request is not None:
        teller = _Request(violation.request)
    else:
        return
    for moment in moments:
        for event in moment.events:
            said = teller.tell(event)
            if said:
                yield f"{said} at op {moment.op} ({kind_of(moment.operation)})"


class _Block:
    """Tells what an event did to one block."""

    def __init__(self, group: int, block: int, block_size: int) -> None:
        self._group = group
        self._block = block
        self._size = block_size
        self._steps: dict[int, list[StepItem]] = {}
        self._holders: set[int] = set()

    def tell(self, event: Event) -> str | None:
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
            return f"evicted ({event.cause})"
        if isinstance(event, BlocksPublished):
            return f"made findable by r{event.request} as row {event.row + index}"
        if isinstance(event, BlocksSwappedOut):
            return f"copied by r{event.request} to host block {_nth(event.host_blocks, index)}"
        if isinstance(event, BlocksSwappedIn):
            host_block = _nth(event.host_blocks, index)
            return f"filled by r{event.request} from host block {host_block}"
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
            case BlocksSwappedOut():
                return f"swapped out to host blocks {list(event.host_blocks)}"
            case BlocksSwappedIn():
                return (
                    f"swapped in from host blocks {list(event.host_blocks)} to blocks "
                    f"{list(event.blocks)}"
                )
            case HostBlocksReleased():
                return f"gave back host blocks {list(event.host_blocks)}"
        return None


def _nth(blocks: Sequence[int], index: int) -> int | None:
    """The block that moved with the one at ``index``; None where the report has too few."""
    return blocks[index] if index < len(blocks) else None
