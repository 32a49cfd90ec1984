"""What CAP demands of a subject that promises no exact admission: one wrong outcome a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvproof.fuzz.replay import installed
from kvproof.fuzz.search import abilities, run_once
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.books import Books
from kvproof.invariants.checks.cap import Cap
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksOutlived,
    BlocksPublished,
    BlocksReleased,
    Event,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Admit,
    Decode,
    Finish,
    Grow,
    Operation,
    Preempt,
    Reserve,
    Resume,
    Segment,
)
from kvproof.invariants.outcomes import (
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.scheduling.hits import Hits
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import View
from kvproof.stateful_tests.subjects.engine import EngineSubject
from kvproof.stateful_tests.totals import Totals

SIZE = 4
BLOCKS = 6
WINDOW = 5


class World:
    """Request 0 has two full blocks and a token more, computed; the two are findable."""

    def __init__(self, **semantics: Any) -> None:
        self.books = Books(
            Configuration(blocks=BLOCKS, block_size=SIZE, requests=2),
            Semantics(exact_admission=False, **semantics),
        )
        self.violations: list[Violation] = []
        groups = self.books.groups
        shadows = [Shadow(BLOCKS + 1, SIZE) for _ in groups]
        self.cap = Cap(self.books, shadows, cast(View, None), self.violations.append)
        self.do(prompt(9), Outcome("done", None, 0))
        table = [1, 2, 3]
        item = StepItem(0, 0, 0, 9, tuple([table for _ in groups]))
        self.tell(
            *[BlocksAllocated(group.group, 0, 0, table) for group in groups],
            StepLaunched(0, [item]),
            StepRetired(0),
            *[BlocksPublished(group.group, 0, 0, [1, 2], [b"a", b"b"]) for group in groups],
        )

    def tell(self, *events: Event) -> None:
        for event in events:
            self.books.event_handlers[type(event)](event)

    def do(self, operation: Operation, outcome: Outcome, *events: Event) -> list[str]:
        """What is wrong with that."""
        self.books.begin()
        expecting = self.cap.expecting(type(operation))
        if expecting is not None:
            expecting(operation, outcome)
        if outcome.status == "done":
            self.books.operation_handlers[type(operation)](operation, outcome)
        self.tell(*events)
        if self.cap.concludes(type(operation), outcome.status):
            self.cap.conclude(operation, outcome)
        return [violation.message for violation in self.violations]


def prompt(tokens: int, source: int = 1, slots: int = 0) -> Admit:
    return Admit((Segment(source, tokens),), slots=slots)


def done(request: int, cached: int = 0) -> Outcome:
    return Outcome("done", None, request, cached)


def refused(reason: str, request: int | None = None) -> Outcome:
    return Outcome("refused", reason, request)


FULL = "should have been refused (no_free_blocks): 3 blocks were free"
ROOM = "should have been done: 3 blocks were free"

HITS = [
    (prompt(9), 8, None),
    (prompt(9), 4, None),
    (prompt(9), 0, None),
    (prompt(9), 12, "of 9 tokens the last one is to be computed"),
    (prompt(8), 8, "of 8 tokens the last one is to be computed"),
    (prompt(13), 12, "its row 2 is not findable"),
    (prompt(9, 2), 4, "its row 0 is not findable"),
    (prompt(9), 6, "blocks have 4"),
]


@pytest.mark.parametrize(("operation", "cached", "why"), HITS)
def test_a_hit_is_findable_in_whole_blocks_and_leaves_a_token(
    operation: Admit, cached: int, why: str | None
) -> None:
    says = [] if why is None else [f"admit: a hit of {cached} tokens is claimed, but {why}"]
    assert World().do(operation, done(1, cached)) == says


LONGEST = [
    (prompt(9), 8, 8),
    (prompt(9), 4, 8),
    (prompt(9), 0, 8),
    (prompt(8), 0, 4),
    (prompt(4), 0, 0),
]


LONGER = "resume: a hit of 8 tokens is claimed, but 12 are findable"


@pytest.mark.parametrize(("operation", "cached", "longest"), LONGEST)
def test_a_hit_is_the_longest_unless_it_may_be_shorter(
    operation: Admit, cached: int, longest: int
) -> None:
    messages = World(shorter_hits=False).do(operation, done(1, cached))
    says = f"admit: a hit of {cached} tokens is claimed, but {longest} are findable"
    assert messages == [says] * (cached < longest)
    assert World().do(operation, done(1, cached)) == []


@pytest.mark.parametrize(("retired", "says"), [(False, []), (True, [LONGER])])
def test_samples_in_flight_at_a_preemption_may_be_dropped(retired: bool, says: list[str]) -> None:
    world = World(shorter_hits=False, runs_ahead=True)
    assert world.do(Grow(0, 3), done(0)) == []
    world.tell(
        StepLaunched(1, [StepItem(0, 0, 9, 12, ([1, 2, 3],))]),
        BlocksPublished(0, 0, 2, [3], [b"c"]),
    )
    assert world.do(Decode((0,)), Outcome("done", children=(0,))) == []
    if retired:
        world.tell(StepRetired(1))
    assert world.do(Preempt(0), done(0)) == []
    assert world.do(Resume(0), done(0, 8)) == says


def test_what_is_refused_hits_nothing() -> None:
    refusal = Outcome("refused", NO_FREE_BLOCKS, None, 8)
    assert World(shorter_hits=False).do(prompt(9, 2), refusal) == []


def test_nothing_is_hit_without_a_prefix_cache() -> None:
    world = World()
    world.books.groups[0].unpublish([1, 2])
    (message,) = world.do(prompt(9), done(1, 4))
    assert message.endswith("its row 0 is not findable")


ROOMY: list[tuple[Operation, Outcome, str | None]] = [
    (prompt(12, 2), done(1), None),
    (prompt(13, 2), done(1), FULL),
    (prompt(13, 2, slots=12), done(1), None),
    (prompt(20), done(1, 8), None),
    (prompt(21), done(1, 8), FULL),
    (prompt(21), done(1, 4), FULL),
    (Grow(0, 15), done(0), None),
    (Grow(0, 16), done(0), FULL),
    (Reserve(0, 24), done(0), None),
    (Reserve(0, 25), done(0), FULL),
]


@pytest.mark.parametrize(("operation", "outcome", "why"), ROOMY)
def test_what_is_done_had_room(operation: Operation, outcome: Outcome, why: str | None) -> None:
    messages = World().do(operation, outcome)
    assert [why is not None and why in message for message in messages] == [True] * bool(why)


def test_a_hit_on_what_nobody_holds_takes_a_free_block_too() -> None:
    for tokens, wrong in ((24, False), (25, True)):
        world = World()
        world.do(Finish(0), done(0), BlocksReleased(0, 0, [3, 2, 1]))
        assert bool(world.do(prompt(tokens), done(1, 8))) is wrong


def test_all_that_decode_together_had_room() -> None:
    for third, wrong in ((4, False), (8, True)):
        world = World()
        world.do(prompt(8, 2), done(1), BlocksAllocated(0, 1, 0, [4, 5]))
        world.tell(BlocksPublished(0, 0, 0, [3], [b"c"]))
        if third == 8:
            world.do(Grow(0, 3), done(0))
        both = Outcome("done", children=(0, 1))
        assert bool(world.do(Decode((0, 1)), both)) is wrong


COMING_BACK = [
    (9, 8, 9, None),
    (9, 0, 9, None),
    (9, 8, 25, "should have been refused (no_free_blocks): 6 blocks were free"),
    (8, 8, 9, None),
    (8, 8, 8, None),
    (9, 12, 24, "of 10 tokens the last one is to be computed"),
]


@pytest.mark.parametrize(("tokens", "cached", "slots", "why"), COMING_BACK)
def test_what_comes_back_had_room_and_may_have_one_token_more(
    tokens: int, cached: int, slots: int, why: str | None
) -> None:
    world = World()
    world.do(prompt(tokens), done(1, 4), BlocksAllocated(0, 1, 0, [4, 5, 6]))
    world.do(Finish(0), done(0), BlocksReleased(0, 0, [3, 2, 1]))
    world.do(Preempt(0), done(1), BlocksReleased(0, 1, [6, 5, 4]))
    messages = world.do(Resume(0, slots), done(1, cached))
    assert [why is not None and why in message for message in messages] == [True] * bool(why)


def test_none_is_refused_as_one_too_many_while_fewer_run() -> None:
    world = World()
    (message,) = world.do(prompt(1, 2), refused(TOO_MANY_REQUESTS))
    assert "refused (too_many_requests), but it should have been done" in message
    world = World()
    world.do(prompt(1, 2), done(1), BlocksAllocated(0, 1, 0, [4]))
    assert world.do(prompt(1, 3), refused(TOO_MANY_REQUESTS)) == []


LACKING: list[tuple[Operation, Outcome, bool]] = [
    (prompt(12, 2), refused(NO_FREE_BLOCKS), True),
    (prompt(13, 2), refused(NO_FREE_BLOCKS), False),
    (prompt(13), refused(NO_FREE_BLOCKS), False),
    (prompt(24, 2), refused(LARGER_THAN_POOL), True),
    (prompt(25, 2), refused(LARGER_THAN_POOL), False),
    (Grow(0, 15), refused(NO_FREE_BLOCKS, 0), True),
    (Grow(0, 16), refused(NO_FREE_BLOCKS, 0), False),
    (Reserve(0, 24), refused(NO_FREE_BLOCKS, 0), True),
    (Decode((0,)), refused(NO_FREE_BLOCKS), True),
]


@pytest.mark.parametrize(("operation", "outcome", "wrong"), LACKING)
def test_what_is_refused_lacks_room_unless_some_is_kept(
    operation: Operation, outcome: Outcome, wrong: bool
) -> None:
    messages = World(keeps_room=False).do(operation, outcome)
    assert [ROOM in message for message in messages] == [True] * wrong
    assert World().do(operation, outcome) == []


# -- windows ---------------------------------------------------------------------------------------

WINDOWED: dict[str, Any] = {"groups": 2, "windows": (0, WINDOW)}


def test_what_is_behind_the_window_is_given_back_when_the_request_grows() -> None:
    world = World(**WINDOWED)
    assert world.do(Grow(0, 1), done(0), BlocksOutlived(1, 0, [1])) == []
    for operation, outcome in (
        (Grow(0, 1), done(0)),
        (Reserve(0, 12), done(0)),
        (Decode((0,)), Outcome("done", children=(0,))),
    ):
        (message,) = World(**WINDOWED).do(operation, outcome)
        assert message == (
            "request 0 grew, and still holds blocks [1], which are behind its window of 5 tokens"
        )


def test_what_is_behind_a_window_may_stay_where_windows_lag() -> None:
    assert World(**WINDOWED, windows_lag=True).do(Grow(0, 1), done(0)) == []


def test_a_hit_needs_what_is_in_the_window_and_no_more() -> None:
    for gone, wrong in ((1, False), (2, True)):
        world = World(**WINDOWED)
        world.books.groups[1].unpublish([gone])
        assert bool(world.do(prompt(9), done(1, 8))) is wrong


def test_a_hit_is_as_long_as_the_window_lets_it_be() -> None:
    for gone, cached, wrong in (
        ((1,), 4, True),
        ((1,), 8, False),
        ((2,), 0, True),
        ((2,), 4, False),
    ):
        world = World(**WINDOWED, shorter_hits=False)
        world.books.groups[1].unpublish(gone)
        assert bool(world.do(prompt(9), done(1, cached))) is wrong


@pytest.mark.parametrize(("gone", "tokens", "revived"), [((), 8, 1), ((1,), 8, 1), ((2,), 4, 1)])
def test_a_hit_is_counted_as_far_back_as_the_window_goes(
    gone: tuple[int, ...], tokens: int, revived: int
) -> None:
    world = World(**WINDOWED)
    world.books.groups[1].drop([1, 2, 3])
    world.books.groups[1].unpublish(gone)
    hit = Hits(world.books).of(1, world.books.requests[0].tags)
    assert (hit.rows * SIZE, hit.revived) == (tokens, revived)
    assert world.books.longest_hit(world.books.requests[0].tags[:8]) == 1 - (1 in gone)


def test_a_group_with_a_window_may_need_fewer_blocks() -> None:
    world = World(**WINDOWED)
    world.books.groups[1].hold([4, 5, 6])
    assert world.do(prompt(9, 2), done(1)) == []
    world = World(**WINDOWED)
    world.books.groups[0].hold([4, 5, 6])
    assert FULL.replace("3", "0") in world.do(prompt(9, 2), done(1))[0].replace("0, 3", "0")


def test_in_a_shared_pool_what_comes_back_from_behind_a_window_may_be_taken_at_once() -> None:
    for pool, wrong in ((True, False), (False, True)):
        world = World(**WINDOWED, shared_pool=pool)
        world.books.groups[0].hold([4, 5, 6])
        grown = BlocksOutlived(1, 0, [1])
        assert bool(world.do(Grow(0, 4), done(0), grown)) is wrong


# -- the engine, as if it promised less ------------------------------------------------------------


class Inexact(EngineSubject):
    """Admits exactly, and promises only that it hits all that it can and keeps no room."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.semantics = replace(
            self.semantics, exact_admission=False, shorter_hits=False, keeps_room=False
        )


def first_failures(subject: Callable[[Configuration], Any], runs: int = 40) -> list[Violation]:
    able, seen = abilities(subject), []
    for number in range(runs):
        failure = run_once(subject, draw_run(f"bounds/{number}", able), Totals())
        seen += [failure[1]] if failure is not None else []
    return seen


def test_who_is_exact_keeps_within_the_bounds() -> None:
    assert first_failures(Inexact) == []


@pytest.mark.parametrize("fault", ["hit-covers-the-whole-prompt", "boundary-block-too-early"])
def test_faults_of_the_engine_are_still_found(fault: str) -> None:
    with installed(fault):
        assert "CAP" in {violation.property for violation in first_failures(Inexact)}
