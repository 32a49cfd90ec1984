"""Copies that hold nothing on the device (``Semantics.copies_hold``): what they read is compared
when it is copied, and what they write is some request's already, which waits for it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvproof.invariants.books import Books
from kvproof.invariants.checks.excl import Excl
from kvproof.invariants.checks.key import Key
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.resume import Resume_
from kvproof.invariants.checks.xfer import Xfer
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    Event,
    ReleaseFenced,
    StepItem,
    StepLaunched,
    StepRetired,
    TransferEnded,
    TransferLanded,
    TransferStarted,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Arrive,
    Complete,
    Fail,
    Finish,
    Land,
    Offload,
    Operation,
    Promote,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.checks.hold import Hold
from kvproof.invariants.scheduling.checks.live import GRACE, Live
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import (
    BlocksHeld,
    Promises,
    RequestArrived,
    RequestCancelled,
    Scheduled,
    SchedulerEvent,
)
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.story import Moment, explain
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import View

WORLD = Configuration(blocks=8, block_size=2, host_blocks=4, offload="prefix")
SEMANTICS = Semantics(
    tiers=True,
    disk=False,
    copies_hold=False,
    exact_admission=False,
    exact_tiers=False,
    tier_bytes=False,
    publishes="at_allocation",
    duplicates="indexed",
    fences_releases=False,
    stream_order=True,
)
KEY = b"key"
STORE = TransferStarted(0, "store", 0, [1], [0], [KEY])
LOAD = TransferStarted(1, "promote", 0, [0], [3], [KEY], 1)
ASK = Promote((Segment(0, 3),))


class Scripted:
    """Request 0 has computed a block, and a copy of it to the host has been started."""

    def __init__(self, *, copies_hold: bool = False) -> None:
        self.books = Books(WORLD, replace(SEMANTICS, copies_hold=copies_hold))
        self.violations: list[Violation] = []
        shadows, view = [Shadow(9, 2)], cast(View, self)
        kinds = (Xfer, Excl, Resume_, Prov, Key)
        self.checks = [kind(self.books, shadows, view, self.violations.append) for kind in kinds]
        self.admit(0, 3, [1, 2])
        self.tell(BlocksPublished(0, 0, 0, [1], [KEY]))
        self.launch(0, 0, 3)
        self.tell(StepRetired(0))
        self.do(Offload(), Outcome("done", count=1, transfers=(0,)), STORE)

    def transfers(self) -> list[int]:
        assert self.books.tiers is not None
        return list(self.books.tiers.in_flight)

    def tell(self, *events: Event) -> None:
        for event in events:
            stages = [
                *(check.before_event() for check in self.checks),
                self.books.event_handlers,
                *(check.after_event() for check in self.checks),
            ]
            for stage in stages:
                if type(event) in stage:
                    stage[type(event)](event)

    def do(self, operation: Operation, outcome: Outcome, *events: Event) -> None:
        self.books.begin()
        xfer = self.checks[0]
        expecting = xfer.expecting(type(operation))
        if expecting is not None:
            expecting(operation, outcome)
        handler = self.books.operation_handlers.get(type(operation))
        if handler is not None:
            handler(operation, outcome)
        self.tell(*events)
        xfer.conclude(operation, outcome)

    def admit(self, source: int, tokens: int, blocks: list[int]) -> None:
        number = len(self.books.identities)
        operation, outcome = Admit((Segment(source, tokens),)), Outcome("done", None, number)
        self.do(operation, outcome, BlocksAllocated(0, number, 0, blocks))

    def launch(self, number: int, start: int, end: int) -> None:
        table = list(self.books.requests[number].tables[0])
        step = self.books.figures.iterations
        self.tell(StepLaunched(step, [StepItem(number, 0, start, end, (table,))]))

    def land(self, transfer: int) -> None:
        outcome = Outcome("done", count=1, transfers=(transfer,))
        self.do(Land(), outcome, TransferLanded(transfer, 1))

    def complete(self, transfer: int) -> None:
        ended = TransferEnded(transfer, "completed")
        self.do(Complete(), Outcome("done", transfers=(transfer,)), ended)

    def load(self, tokens: int = 3, event: TransferStarted = LOAD) -> None:
        """The store has ended; request 1 asks for the same and is given blocks 3 and 4."""
        self.complete(0)
        self.admit(0, tokens, [3, 4][: (tokens + 1) // 2])
        self.do(ASK, Outcome("done", transfers=(1,)), event)

    @property
    def messages(self) -> list[str]:
        return [violation.message for violation in self.violations]


# -- what is read ----------------------------------------------------------------------------------


def _given_back_and_taken(world: Scripted) -> None:
    """Another request is given the block that the copy reads."""
    finished = Outcome("done", None, 0)
    world.do(Finish(0), finished, BlocksReleased(0, 0, [2, 1]))
    world.tell(BlocksEvicted(0, [1], [KEY], "pressure"))
    world.admit(5, 2, [1])


def test_what_a_copy_reads_is_free_at_once_and_may_be_another_s() -> None:
    world = Scripted()
    group = world.books.groups[0]
    assert group.refs[1] == 1
    _given_back_and_taken(world)
    assert group.refs[1] == 1
    world.land(0)
    world.launch(1, 0, 2)
    world.complete(0)
    assert world.messages == []


def test_it_must_not_be_written_before_it_is_copied() -> None:
    world = Scripted()
    _given_back_and_taken(world)
    world.launch(1, 0, 1)
    world.land(0)
    what = "device block 1 does not hold what its key stands for while transfer 0 (store) copied it"
    assert world.messages == [what]


@pytest.mark.parametrize(("copies_hold", "block"), [(True, 1), (False, 1), (True, 2)])
def test_who_holds_a_block_is_named(*, copies_hold: bool, block: int) -> None:
    """The copy reads block 1, and writes to a place of that number, or of another, on the host."""
    world = Scripted(copies_hold=copies_hold)
    other = TransferStarted(1, "store", 0, [1], [2], [KEY])
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), other)
    world.violations.clear()
    world.admit(5, 2, [block])
    holders = ["request 0"]
    if copies_hold and block == 1:
        holders += ["transfer 0", "transfer 1"]
    assert world.messages == [
        f"block {block} was given to request 1 while {' and '.join(holders)} held it"
    ]


def test_a_copy_of_what_nobody_ever_found_is_none() -> None:
    world = Scripted()
    other = TransferStarted(1, "store", 0, [2], [1], [b"other"])
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), other)
    assert "is not findable" in world.messages[0]


def _left_to_a_fence(tokens: int) -> Scripted:
    """A request of so many tokens was cancelled while a step carried its last one, so that its last
    block, 4, was never findable."""
    world = Scripted()
    world.admit(7, tokens, [3, 4])
    world.launch(1, 0, tokens)
    _cancelled_in_flight(world, 1, [4, 3])
    return world


def _cancelled_in_flight(world: Scripted, number: int, blocks: list[int]) -> None:
    step = world.books.steps[-1].number
    world.do(Abort(1), Outcome("done", None, number), ReleaseFenced(number, step))
    world.do(Retire(), Outcome("done"), StepRetired(step), BlocksReleased(0, number, blocks, step))


LAST = TransferStarted(1, "store", 0, [4], [1], [b"last"])


def test_what_a_step_in_flight_completed_may_be_stored_though_nobody_finds_it() -> None:
    world = _left_to_a_fence(4)
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), LAST)
    world.do(Land(1), Outcome("done", count=1, transfers=(1,)), TransferLanded(1, 1))
    assert world.messages == []


def _publishes(world: Scripted, key: bytes) -> None:
    """Another request, whose block 6 is what block 4 was left with."""
    world.admit(7, 4, [5, 6])
    world.tell(BlocksPublished(0, 2, 1, [6], [key]))


@pytest.mark.parametrize(("key", "wrong"), [(b"last", False), (b"right", True)])
def test_its_key_stands_for_it_from_then_on(key: bytes, *, wrong: bool) -> None:
    world = _left_to_a_fence(4)
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), LAST)
    _publishes(world, key)
    what = (
        "block 6 of request 2 was published under key 7269676874…, but the same prefix had key "
        "6c617374… before"
    )
    assert world.messages == ([what] if wrong else [])


def test_it_has_no_other_key_than_before() -> None:
    world = _left_to_a_fence(4)
    _publishes(world, b"right")
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), LAST)
    what = (
        "block 4 is stored by transfer 1 under key 6c617374…, but the same prefix had key "
        "7269676874… before"
    )
    assert world.messages == [what]


def test_but_not_what_it_left_half_full() -> None:
    world = _left_to_a_fence(3)
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), LAST)
    assert "is not findable" in world.messages[0]


def test_nor_what_somebody_has_written_over_since() -> None:
    world = _left_to_a_fence(4)
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), LAST)
    world.admit(8, 2, [4])
    world.launch(2, 0, 2)
    world.do(Land(1), Outcome("done", count=1, transfers=(1,)), TransferLanded(1, 1))
    what = "device block 4 does not hold what its key stands for while transfer 1 (store) copied it"
    assert world.messages == [what]


def test_what_was_written_over_is_no_source_any_more() -> None:
    world = _left_to_a_fence(4)
    world.admit(8, 2, [4])
    world.launch(2, 0, 1)
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), LAST)
    assert "is not findable" in world.messages[0]


def test_a_block_that_is_left_half_full_has_nothing_of_the_one_before() -> None:
    world = _left_to_a_fence(4)
    world.admit(9, 3, [5, 4])
    world.launch(2, 0, 3)
    _cancelled_in_flight(world, 2, [4, 5])
    world.do(Offload(), Outcome("done", count=1, transfers=(1,)), LAST)
    assert "is not findable" in world.messages[0]


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "start"), [(3, 2), (2, 1)])
def test_a_request_goes_on_behind_what_was_loaded(tokens: int, start: int) -> None:
    """Where all of it was, its last token is computed anew."""
    world = Scripted()
    world.load(tokens)
    assert world.books.requests[1].standing(2)[0] == "loading"
    world.land(1)
    world.complete(1)
    assert world.books.requests[1].standing(2)[:3] == ("running", tokens, 2)
    world.launch(1, start, tokens)
    assert world.books.requests[1].computed == start
    assert world.messages == []


def test_a_story_tells_what_it_waits_for() -> None:
    moment = Moment(4, ASK, Outcome("done", transfers=(1,)), [LOAD])
    life = explain(Violation(property="PROV", op=5, message="wrong", request=1), [moment], 2)
    what = "waits for host blocks [0] to blocks [3] (transfer 1, promote) at op 4 (promote)."
    assert life.endswith(f"Request 1: {what}")


def test_it_does_not_run_before_that() -> None:
    world = Scripted()
    world.load()
    world.launch(1, 0, 3)
    assert "whose KV is still on its way back from the host" in world.messages[0]


def test_a_load_that_fails_brings_nothing() -> None:
    world = Scripted()
    world.load()
    ended = TransferEnded(1, "failed", "error")
    world.do(Fail(), Outcome("done", transfers=(1,)), ended)
    assert world.books.requests[1].standing(2)[:3] == ("running", 3, 0)
    assert world.messages == []


def test_a_load_writes_only_what_its_request_alone_has() -> None:
    for block in (2, 5):
        world = Scripted()
        world.load(event=TransferStarted(1, "promote", 0, [0], [block], [KEY], 1))
        assert "which request 1 does not have" in world.messages[0]
    world = Scripted()
    world.complete(0)
    world.admit(0, 3, [3, 4])
    world.books.groups[0].hold([3])
    world.do(ASK, Outcome("done", transfers=(1,)), LOAD)
    assert "which request 1 holds" in world.messages[0]


@pytest.mark.parametrize("copies_hold", [True, False])
def test_a_copy_up_is_for_a_request_just_where_copies_hold_nothing(*, copies_hold: bool) -> None:
    for request in (1, None):
        world = Scripted(copies_hold=copies_hold)
        world.load(event=TransferStarted(1, "promote", 0, [0], [3], [KEY], request))
        whose = "for no request" if request is None else "for request 1"
        found = [whose in message for message in world.messages]
        assert any(found) == ((request is None) != copies_hold)


def test_nobody_loads_twice_what_is_on_its_way() -> None:
    world = Scripted()
    world.load()
    world.admit(0, 3, [5, 6])
    again = TransferStarted(2, "promote", 0, [0], [5], [KEY], 2)
    world.do(ASK, Outcome("done", transfers=(2,)), again)
    assert "though the device has or awaits what host block 0 holds" in world.messages[0]


# -- to the scheduler ------------------------------------------------------------------------------


class Scheduling:
    """A request, 0, that waits and holds blocks, and is loading; the checks HOLD and LIVE."""

    def __init__(self, copies_end_in: int | None = None, *, copies_hold: bool = False) -> None:
        self.cache = Scripted(copies_hold=copies_hold)
        self.cache.load()
        promises = Promises(copies_end_in=copies_end_in)
        self.books = SchedulingBooks(WORLD.scheduling, promises, WORLD, self.cache.books)
        self.violations: list[Violation] = []
        view: SchedulerView = cast(Any, None)
        self.checks = [kind(self.books, view, self.violations.append) for kind in (Hold, Live)]
        self.books.expect(Arrive((Segment(0, 3),)))
        self.tell(RequestArrived(0, 0, 3, 1, 1, 0))
        self.tell(BlocksHeld(0, 1))

    def tell(self, event: SchedulerEvent) -> None:
        for stage in (self.books.event_handlers, *(check.after_event() for check in self.checks)):
            if type(event) in stage:
                stage[type(event)](event)

    def idle(self, iterations: int) -> list[str]:
        """So many iterations run nothing; what is wrong by then."""
        for number in range(iterations):
            self.tell(Scheduled(number, 0, None, (), (), (), (), ()))
        return [violation.message for violation in self.violations]


def test_a_request_may_wait_for_a_load_that_ends() -> None:
    world = Scheduling(copies_end_in=2 * GRACE)
    assert world.idle(2 * GRACE) == []
    (message,) = world.idle(1)
    assert message == f"transfer 1 is in flight for {2 * GRACE} iterations, and does not end"


def test_it_is_to_be_run_when_it_has_come() -> None:
    world = Scheduling(copies_end_in=2 * GRACE)
    world.cache.complete(1)
    (message,) = world.idle(GRACE)
    assert message.startswith(f"nothing was run in {GRACE} iterations")


def test_where_copies_hold_their_blocks_there_is_no_such_excuse() -> None:
    world = Scheduling(copies_hold=True)
    assert len(world.idle(GRACE)) == 1
    world.tell(RequestCancelled(0))
    assert [violation.property for violation in world.violations] == ["LIVE", "HOLD"]


def test_a_store_that_holds_nothing_excuses_nothing() -> None:
    """Somebody holds its block: that it ends makes nothing free."""
    for copies_hold in (True, False):
        world = Scheduling(copies_hold=copies_hold)
        world.cache.complete(1)
        world.cache.books.groups[0].drop([1])
        again = TransferStarted(2, "store", 0, [1], [1], [KEY])
        world.cache.do(Offload(), Outcome("done", count=1, transfers=(2,)), again)
        if not copies_hold:
            world.cache.books.groups[0].hold([1])
        assert world.books.only_copied() == copies_hold


def test_who_is_cancelled_while_it_loads_keeps_its_blocks_until_then() -> None:
    for loading in (True, False):
        world = Scheduling()
        if not loading:
            world.cache.complete(1)
        world.tell(RequestCancelled(0))
        assert [violation.property for violation in world.violations] == ["HOLD"] * (not loading)
        world.violations.clear()
        del world.cache.books.requests[0]
        for check in world.checks[:1]:
            check.audit()
        assert [violation.property for violation in world.violations] == ["HOLD"] * (not loading)
    world.cache.do(Abort(0), Outcome("done", None, 1), BlocksReleased(0, 1, [4, 3]))
    world.violations.clear()
    world.checks[0].audit()
    assert world.violations == []
