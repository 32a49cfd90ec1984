"""Whether a subject tells the truth: each of its answers and events against its own view.

The checks ask whether an engine is right, and believe its adapter.  A witness believes nobody and
does not mind what is right: the events, folded from the start, must give the view; an answer must
say what the events say; what was refused must have changed nothing.  So an adapter that lies is
told from an engine that is wrong: a wrong engine with an honest adapter passes here and fails
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
from msgspec import Struct

from kvproof.invariants.books import Books
from kvproof.invariants.events import (
    AnyEvent,
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksOutlived,
    BlocksPublished,
    BlocksReleased,
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
    SlotsEvicted,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.group_books import GroupBooks
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Decode,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Retire,
    kind_of,
)
from kvproof.invariants.outcomes import SKIPPED, Outcome
from kvproof.invariants.subject import Subject
from kvproof.invariants.view import View
from kvproof.stateful_tests.harness import asks_for
from kvproof.stateful_tests.shapes import WrongShape

EVENT_TYPES: tuple[type[Event], ...] = get_args(AnyEvent)
_NAMES_A_REQUEST = (Grow, Reserve, Finish, Fork, Preempt, Resume, Abort)
_ASKED_FOR = frozenset(("slots", "swaps", "tiers"))


class Lie(Struct, frozen=True):
    """Something that a subject said, and that is not so."""

    kind: str
    """Of what it is: table, references, free, index, standing, steps, event, order, answer,
    refusal, shape, view, determinism, never-done or semantics."""
    message: str


class Lied(Exception):
    """Leaves a run at its first lie."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.lie = Lie(kind, message)


class Crashed(Exception):
    """Leaves a run in which the subject raised: no lie, and CRASH to the checks."""


class Seen(Struct, frozen=True):
    """All that a view shows of the device at one moment; sequences are by group."""

    free_count: list[int]
    free: list[list[int]]
    references: list[list[int]]
    index: list[dict[bytes, list[int]]]
    standing: dict[int, tuple[str, int, int, tuple[int, ...]]]
    tables: dict[int, list[list[int]]]
    steps: list[int]


def look(view: View, groups: int) -> Seen:
    """Copies what there is to see."""
    each, live = range(groups), view.requests()
    return Seen(
        [view.free_count(group) for group in each],
        [list(view.free_blocks(group)) for group in each],
        [list(view.ref_counts(group)) for group in each],
        [{key: sorted(blocks) for key, blocks in view.index(group).items()} for group in each],
        {request: view.standing(request) for request in live},
        {request: [list(view.table(request, group)) for group in each] for request in live},
        list(view.steps_in_flight()),
    )


class Witness:
    """Performs operations on a cache, and compares what it says with what it shows."""

    def __init__(self, subject: Subject) -> None:
        self.done: set[str] = set()
        """Kinds of the operations that were done."""
        self.record: list[bytes] = []
        """All that the subject said and showed, an operation each."""
        self._subject = subject
        self._books = Books(subject.configuration, subject.semantics)
        self._groups = subject.semantics.groups
        self._lacking = _ASKED_FOR - subject.semantics.features()
        self._view = subject.view()
        """The one that a checker keeps."""
        self._seen = self._look()

    def perform(self, operation: Operation) -> Outcome:
        """Raises Lied at a lie, and Crashed."""
        kind = kind_of(operation)
        if kind not in self._subject.capabilities or asks_for(operation) & self._lacking:
            return SKIPPED
        try:
            outcome, events = self._subject.apply(operation), list(self._subject.drain_events())
        except WrongShape as error:
            raise Lied("shape", str(error)) from error
        except Exception as error:
            raise Crashed from error
        _judge_shape(outcome, events)
        if self._subject.drain_events():
            raise Lied("event", f"what {kind} did is told again when it is asked again")
        before, now = self._seen, self._look()
        self.record.append(msgspec.msgpack.encode((outcome, events, now)))
        if outcome.status != "done":
            _judge_refusal(kind, outcome, events, before, now)
        self._judge_target(operation, outcome)
        if outcome.status == "done":
            self.done.add(kind)
            several_steps = bool(self._subject.semantics.states)
            _judge_life(operation, outcome, events, several_steps)
            _judge_counts(operation, outcome, events)
        self._fold(operation, outcome, events)
        self._compare(now)
        self._seen = now
        return outcome

    def _look(self) -> Seen:
        try:
            kept = look(self._view, self._groups)
            fresh = look(self._subject.view(), self._groups)
        except WrongShape as error:
            raise Lied("shape", str(error)) from error
        except Exception as error:
            raise Lied("view", f"it cannot be read: {error!r}") from error
        if kept != fresh:
            what = next(f for f in Seen.__struct_fields__ if getattr(kept, f) != getattr(fresh, f))
            raise Lied(
                "view", f"the one given at the start is not live: {what} differs from a new one's"
            )
        return fresh

    def _judge_target(self, operation: Operation, outcome: Outcome) -> None:
        """It is the candidate that the operation names."""
        if not isinstance(operation, _NAMES_A_REQUEST):
            return
        books = self._books
        candidates = books.preempted if isinstance(operation, Resume) else books.running
        if isinstance(operation, Abort):
            candidates = list(books.requests.values())
        index = operation.request % len(candidates) if candidates else 0
        expected = candidates[index].id if candidates else None
        if outcome.request != expected:
            raise Lied(
                "answer",
                f"{kind_of(operation)} says that it was about request {outcome.request}, but of "
                f"{len(candidates)} candidates it names {expected}",
            )

    # -- events, folded --------------------------------------------------------------------------

    def _fold(self, operation: Operation, outcome: Outcome, events: Sequence[Event]) -> None:
        books = self._books
        books.begin()
        books.settled()
        try:
            follow = books.operation_handlers.get(type(operation))
            if follow is not None and outcome.status == "done":
                follow(operation, outcome)
            for place, event in enumerate(events):
                self._fits(event, events[place + 1 :])
                handler = books.event_handlers.get(type(event))
                if handler is not None:
                    handler(event)
        except Lied:
            raise
        except Exception as error:
            raise Lied(
                "event", f"what {kind_of(operation)} tells makes no sense: {error!r}"
            ) from error
        if books.strays:
            raise Lied(
                "event", f"this does not follow from what was told before: {books.strays[0]}"
            )

    def _fits(self, event: Event, later: Sequence[Event]) -> None:
        """The event can follow what was told so far."""
        number = getattr(event, "group", 0)
        if not 0 <= number < self._groups:
            raise Lied("event", f"there is no such group: {event}")
        group = self._books.groups[number]
        for block in _blocks_of(event):
            if not 0 <= block < len(group.refs):
                raise Lied("event", f"there is no block {block}: {event}")
        if isinstance(event, BlocksAllocated | BlockCopied):
            self._fits_what_is_taken(event, group, later)
        elif type(event) is BlocksReleased and event.step is None:
            known = self._books.known.get(event.request)
            table = known.tables[number] if known else []
            if self._subject.semantics.windows:  # behind them a table names a reserved block
                table = [b for b in table if b not in self._subject.semantics.reserved]
            if sorted(table) != sorted(event.blocks):
                raise Lied(
                    "event",
                    f"request {event.request} is said to give back blocks {list(event.blocks)}, "
                    f"but by what was told it has {table}",
                )
        elif isinstance(event, BlocksPublished):
            twice = [block for block in event.blocks if block in group.key_of]
            if twice:
                raise Lied("event", f"block {twice[0]} is told as published a second time")
            retires = any(isinstance(other, StepRetired) for other in later)
            if retires and not self._subject.semantics.states:
                raise Lied("order", "blocks are told as published before the step that is retired")
        elif isinstance(event, BlocksEvicted):
            for block, key in zip(event.blocks, event.keys, strict=True):
                if group.key_of.get(block) != key:
                    raise Lied("event", f"block {block} is told as evicted, but it had no such key")

    def _fits_what_is_taken(
        self, event: BlocksAllocated | BlockCopied, group: GroupBooks, later: Sequence[Event]
    ) -> None:
        """What becomes unfindable because of it was told before."""
        taken = set(_blocks_of(event))
        for other in later:
            evicts = isinstance(other, BlocksEvicted) and other.group == event.group
            if evicts and taken & set(_blocks_of(other)):
                raise Lied("order", "blocks are told as taken before they are told as evicted")

    # -- the view --------------------------------------------------------------------------------

    def _compare(self, seen: Seen) -> None:
        """What was told so far is what there is."""
        books = self._books
        if set(seen.standing) != set(books.requests):
            raise Lied(
                "standing", f"{sorted(seen.standing)} are live, {sorted(books.requests)} told"
            )
        for number, request in books.requests.items():
            if seen.tables[number] != request.tables:
                raise Lied(
                    "table",
                    f"that of request {number} is {seen.tables[number]}, but {request.tables} told",
                )
            state, tokens, computed, _ = request.standing(*books.block_sizes)
            expected = state, tokens, computed, tuple(map(len, request.tables))
            if tuple(seen.standing[number]) != expected:
                raise Lied(
                    "standing",
                    f"request {number} stands as {seen.standing[number]}, but as {expected} by "
                    "what was told",
                )
        if seen.steps != [step.number for step in books.steps]:
            raise Lied("steps", f"{seen.steps} are in flight, {len(books.steps)} were told")
        for group in books.groups:
            self._compare_group(group, seen)

    def _compare_group(self, group: GroupBooks, seen: Seen) -> None:
        number, reserved = group.group, self._subject.semantics.reserved
        references, free = seen.references[number], seen.free[number]
        if len(references) != len(group.refs):
            raise Lied(
                "references",
                f"they are told of {len(references)} blocks, but blocks and reserved ones are "
                f"{len(group.refs)}",
            )
        for block, (shown, told) in enumerate(zip(references, group.refs, strict=True)):
            if shown != told and block not in reserved:
                raise Lied("references", f"block {block} has {shown}, but {told} were told")
        expected = {
            block for block, refs in enumerate(group.refs) if not refs and block not in reserved
        }
        if set(free) != expected or len(free) != len(expected):
            odd = sorted(expected.symmetric_difference(free)) or "listed twice"
            raise Lied("free", f"the free blocks are not those that nobody was told to hold: {odd}")
        if seen.free_count[number] != len(free) - group.withheld:
            raise Lied("free", f"{len(free)} are listed, but {seen.free_count[number]} counted")
        told_index = {key: sorted(blocks) for key, blocks in group.blocks_of.items()}
        if seen.index[number] != told_index:
            shown_index = seen.index[number]
            key = next(
                key
                for key in (*shown_index, *told_index)
                if shown_index.get(key) != told_index.get(key)
            )
            raise Lied(
                "index",
                f"blocks {shown_index.get(key, [])} are findable under a key under which "
                f"{told_index.get(key, [])} were told",
            )


def _blocks_of(event: Event) -> Sequence[int]:
    """Those that it names, of the device."""
    ends = [getattr(event, end) for end in ("source", "target") if hasattr(event, end)]
    return [*getattr(event, "blocks", ()), *ends]


def _judge_shape(outcome: object, events: Sequence[object]) -> None:
    if not isinstance(outcome, Outcome):
        raise Lied("answer", f"an operation is answered by an Outcome, not by {outcome!r}")
    if outcome.status not in ("done", "refused", "skipped"):
        raise Lied("answer", f"there is no status {outcome.status!r}")
    for event in events:
        if type(event) not in EVENT_TYPES:
            raise Lied("event", f"a cache has no such event: {event!r}")


def _judge_refusal(
    kind: str, outcome: Outcome, events: Sequence[Event], before: Seen, now: Seen
) -> None:
    """Nothing happened, but for what is behind a window (see ``Semantics.windows``)."""
    told = [event for event in events if not isinstance(event, BlocksOutlived)]
    if told:
        raise Lied("refusal", f"{kind} was {outcome.status}, but tells {told[0]}")
    if events:
        return
    for name in Seen.__struct_fields__:
        if getattr(before, name) != getattr(now, name):
            raise Lied("refusal", f"{kind} was {outcome.status}, but has changed {name}")


_TELLS: dict[type[Operation], type[Event]] = {
    Admit: RequestAdmitted,
    Resume: RequestResumed,
    Grow: RequestGrown,
    Decode: RequestsDecoded,
    Fork: RequestForked,
    Preempt: RequestPreempted,
    Finish: RequestFinished,
    Abort: RequestAborted,
    Launch: StepLaunched,
    Retire: StepRetired,
}
"""What is told of requests and steps by an operation that was done; a fork tells each child."""
_LIFE = frozenset(_TELLS.values())


def _named(event: Event) -> object:
    """Whom a life event is about; None of a step."""
    if isinstance(event, RequestsDecoded):
        return tuple(event.requests)
    return event.child if isinstance(event, RequestForked) else getattr(event, "request", None)


def _judge_life(
    operation: Operation, outcome: Outcome, events: Sequence[Event], several_steps: bool
) -> None:
    """What became of requests and steps is told, once, and of the right ones.

    ``several_steps``: what gives slots may launch steps, and retire some (``Semantics.states``).
    """
    kind = _TELLS.get(type(operation))
    about: Sequence[object] = [outcome.request]
    if isinstance(operation, Fork):
        about = outcome.children
    elif isinstance(operation, Decode):
        about = [tuple(outcome.children)]
    life = _LIFE
    if several_steps and isinstance(operation, Admit | Resume | Grow):
        life = _LIFE - {StepLaunched, StepRetired}
    told = [(type(event), _named(event)) for event in events if type(event) in life]
    expected = [] if kind is None else [(kind, name) for name in about]
    for one in expected:
        instead = [other[1] for other in told if other[0] is one[0] and other not in expected]
        if one not in told and instead:
            named = "no request" if one[1] is None else f"{one[1]}"
            raise Lied(
                "answer",
                f"{kind_of(operation)} was done, and {one[0].__name__} was told of {instead[0]}, "
                f"but the answer names {named}",
            )
        if told.count(one) != 1:
            whose = "" if one[1] is None else f" of {one[1]}"
            raise Lied(
                "event",
                f"{kind_of(operation)} was done, but {one[0].__name__}{whose} was told "
                f"{told.count(one)} times",
            )
    foreign = [one[0].__name__ for one in told if one not in expected]
    if foreign:
        raise Lied("event", f"{kind_of(operation)} tells {foreign[0]}, which it is not")


def _judge_counts(operation: Operation, outcome: Outcome, events: Sequence[Event]) -> None:
    """The figures of an answer are those of its events."""
    told: dict[str, int] = {}
    for event in events:
        if isinstance(event, StepLaunched) and isinstance(operation, Launch):
            told["count"] = sum(item.end - item.start for item in event.items)
        elif isinstance(event, RequestAdmitted | RequestResumed):
            told["cached_tokens"] = event.cached_tokens
    if isinstance(operation, Evict | Reset) and (
        isinstance(operation, Reset) or operation.tier == "device"
    ):
        told["count"] = sum(
            len(event.blocks if isinstance(event, BlocksEvicted) else event.slots)
            for event in events
            if isinstance(event, BlocksEvicted | SlotsEvicted)
        )
    for name, figure in told.items():
        if getattr(outcome, name) != figure:
            raise Lied(
                "answer",
                f"{kind_of(operation)} says {name} {getattr(outcome, name)}, its events {figure}",
            )
