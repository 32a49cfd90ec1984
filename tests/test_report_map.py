"""The block map of a finding: it shows what the checkers' own books hold, and marks the spot."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from kvproof.fuzz.replay import Replay, replay
from kvproof.fuzz.report.block_map import COLUMNS_MAX, ROWS_MAX, BlockMap, block_map
from kvproof.fuzz.report.ownership import EMPTY, Cell, Place, arrivals, ownership
from kvproof.fuzz.search import abilities
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.books import Books
from kvproof.invariants.case import Case
from kvproof.invariants.events import BlocksAllocated, BlocksReleased
from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Complete,
    Fork,
    Grow,
    Launch,
    Offload,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.story import Moment
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation, primary
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects import subject_factory

PROMPT = (Segment(source=0, length=3),)
SHARED = Case(
    "engine",
    Configuration(blocks=4, block_size=2, requests=2),
    [Admit(PROMPT), Launch(), Retire(), Fork(0), Grow(0)],
    fault="no-copy-on-write",
)
"""Of two blocks the second is shared with a fork, and then written."""


def test_it_agrees_with_the_checkers_books() -> None:
    """Of every block, after every operation of runs with and without tiers."""
    factory = subject_factory("engine")
    seen: set[str] = set()
    for number in range(60):
        draw = draw_run(f"map/{number}", abilities(factory), tiers_share=number % 2)
        harness = harness_for(factory(draw.configuration))
        assert isinstance(harness, Harness)
        moments, expected = [], []
        for op, operation in enumerate(draw.operations[:150]):
            harness.last_events = ()
            outcome = harness.perform(operation)
            moments.append(Moment(op, operation, outcome, harness.last_events))
            expected.append(held_by_the_books(harness.checker.books))
        assert not harness.violations
        columns = ownership(moments, draw.configuration.block_size)
        for op, column in enumerate(columns):
            assert summed(column) == expected[op], (draw.seed, op, draw.operations[op])
        seen |= {holder[0] for column in columns for c in column.values() for holder in c.holders}
    assert seen == {"r", "s", "t"}  # all kinds of holders came about


def test_a_schedulers_requests_are_named_by_arrival() -> None:
    factory = subject_factory("scheduler:priority")
    renamed = 0
    for number in range(12):
        draw = draw_run(f"arrivals/{number}", abilities(factory))
        harness = harness_for(factory(draw.configuration))
        assert isinstance(harness, SchedulingHarness)
        moments: list[Moment] = []
        known: dict[str, str] = {}
        for op, operation in enumerate(draw.operations):
            outcome = harness.perform(operation)
            moments.append(Moment(op, operation, outcome, harness.last_events))
            jobs = harness.subject.scheduler.jobs.values()
            known |= {f"r{job.cache.id}": f"q{job.id}" for job in jobs if job.cache is not None}
        names = arrivals(moments)
        assert known.items() <= names.items()
        renamed += sum(own[1:] != other[1:] for own, other in names.items())
        held = ownership(moments, draw.configuration.block_size)
        assert not any(h[0] == "r" for column in held for c in column.values() for h in c.holders)
    assert renamed  # the two numbers are not always the same


def summed(column: dict[Place, Cell]) -> dict[Place, tuple[int, bool]]:
    """How many hold each block, and whether it is findable."""
    counts = {place: (len(cell.holders), cell.findable) for place, cell in column.items()}
    return {place: count for place, count in counts.items() if count != (0, False)}


def held_by_the_books(books: Books) -> dict[Place, tuple[int, bool]]:
    held: dict[Place, tuple[int, bool]] = {}
    for group in books.groups:
        for block, count in enumerate(group.refs):
            held["device", group.group, block] = count, block in group.key_of
    for tier in books.tiers.all if books.tiers is not None else ():
        for slot, pins in enumerate(tier.pins):
            count = pins + (slot in tier.owner)
            held[tier.tier, tier.group, slot] = count, slot in tier.key_of
    return {place: count for place, count in held.items() if count != (0, False)}


def drawn(case: Case) -> tuple[Replay, BlockMap]:
    result = replay(case, record=True)
    lines = [f"line {moment.op}" for moment in result.moments]
    violation = primary(result.violations) if result.violations else None
    picture = block_map(result.moments, case.configuration.block_size, violation, lines)
    assert picture is not None
    return result, picture


def titles(picture: BlockMap) -> list[str]:
    """What is told when something is pointed at."""
    return [title.text or "" for title in ElementTree.fromstring(picture.svg).iter("title")]


def boxes(picture: BlockMap, css: str) -> list[dict[str, float]]:
    return [
        {side: float(box.get(side, "nan")) for side in ("x", "y", "width", "height")}
        for box in ElementTree.fromstring(picture.svg).iter("rect")
        if css in box.get("class", "").split()
    ]


def test_the_picture_says_who_holds_what() -> None:
    _, picture = drawn(SHARED)
    said = titles(picture)
    assert said[:5] == [f"line {op}" for op in range(5)]
    assert "b1, op 0: held by request 0" in said
    assert "b1, op 1: held by request 0, to be written by step 0, in flight" in said
    assert "b1, op 3 to 4: held by request 0 and held by request 1, findable" in said
    assert picture.signs == {"request", "shared", "findable", "written"}
    assert picture.left_out == ()


def test_the_violation_is_marked_where_it_was_seen() -> None:
    result, picture = drawn(SHARED)
    violation = primary(result.violations)
    assert (violation.property, violation.op, violation.block) == ("EXCL", 4, 2)
    (mark,) = boxes(picture, "violation")
    rows = boxes(picture, "empty")
    assert mark["y"] < rows[1]["y"] < mark["y"] + mark["height"]
    assert mark["x"] + mark["width"] == pytest.approx(rows[1]["x"] + rows[1]["width"] + 1)
    assert f"EXCL: {violation.message}" in titles(picture)


def test_nothing_is_marked_where_nothing_was_violated() -> None:
    _, picture = drawn(Case("engine", SHARED.configuration, SHARED.operations))
    assert not boxes(picture, "violation")


def test_tiers_stand_below_each_other_and_transfers_are_told() -> None:
    configuration = Configuration(blocks=2, block_size=2, host_blocks=2, offload="prefix")
    operations: list[AnyOperation] = [
        *(Admit(PROMPT), Launch(), Retire()),
        *(Offload(), Complete(), Abort(0)),
    ]
    _, picture = drawn(Case("engine", configuration, operations))
    said = titles(picture)
    assert "h0, op 3: in use by transfer 0" in said
    assert "b1, op 3: held by request 0 and in use by transfer 0, findable" in said
    assert "h0, op 4 to 5: held by nobody, findable" in said
    rows = [row["y"] for row in boxes(picture, "empty")]
    assert rows == sorted(rows)
    assert len(rows) == 3  # b1, b2, h0
    assert {"transfer", "cached"} <= picture.signs


def test_a_block_given_up_too_early_is_still_shown_as_written() -> None:
    fault = "releases-ignore-steps-in-flight"
    operations: list[AnyOperation] = [Admit(PROMPT), Launch(), Abort(0)]
    _, picture = drawn(Case("engine", SHARED.configuration, operations, fault=fault))
    assert "b1, op 2: held by nobody, to be written by step 0, in flight" in titles(picture)


def run_of(*events: Sequence[BlocksAllocated | BlocksReleased]) -> list[Moment]:
    return [Moment(op, Retire(), Outcome("done"), told) for op, told in enumerate(events)]


def test_of_a_long_run_the_end_is_drawn() -> None:
    moments = run_of([BlocksAllocated(0, 0, 0, [7])], *[[]] * (COLUMNS_MAX + 9))
    violation = Violation("REF", "seen at the end", op=COLUMNS_MAX + 9, block=7)
    picture = block_map(moments, 2, violation, [])
    assert picture is not None
    assert picture.left_out == ("the first 10 operations",)
    assert f"b7, op 10 to {COLUMNS_MAX + 8}: held by request 0" in titles(picture)
    assert len(boxes(picture, "head")) == COLUMNS_MAX


def test_of_many_blocks_those_that_changed_last_are_drawn() -> None:
    given: list[list[BlocksAllocated | BlocksReleased]] = [
        [BlocksAllocated(0, block, 0, [block])] for block in range(100)
    ]
    violation = Violation("REF", "of an early block", op=99, block=3)
    picture = block_map(run_of(*given), 2, violation, [])
    assert picture is not None
    assert len(boxes(picture, "empty")) == ROWS_MAX
    assert picture.left_out == ("40 blocks that nothing happened to in the end",)
    assert any(title.startswith("b3,") for title in titles(picture))
    assert not any(title.startswith("b4,") for title in titles(picture))


def test_a_violation_of_no_block_marks_its_operation() -> None:
    violation = Violation("CONS", "the figures do not add up", op=1)
    moments = run_of([BlocksAllocated(0, 0, 0, [1])], [BlocksReleased(0, 0, [1])])
    picture = block_map(moments, 2, violation, [])
    assert picture is not None
    (mark,) = boxes(picture, "violation")
    (row,) = boxes(picture, "empty")
    assert mark["height"] > row["height"] + 1


def test_a_violation_of_a_request_marks_its_blocks() -> None:
    moments = run_of([BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(0, 5, 0, [3])])
    for name, marked in (("RESUME", 2), ("FCFS", 0)):  # the second means one by arrival
        picture = block_map(moments, 2, Violation(name, "of request 0", op=0, request=0), [])
        assert picture is not None
        rows = [m for m in boxes(picture, "violation") if m["height"] < 30]
        assert len(rows) == marked


def test_without_a_block_there_is_no_picture() -> None:
    assert block_map(run_of([], []), 2, None, []) is None
    assert block_map([], 2, Violation("REF", "of nothing", block=1), []) is None


def test_reports_that_contradict_each_other_are_drawn_as_they_come() -> None:
    released_twice = run_of(
        [BlocksAllocated(0, 0, 0, [1])], [BlocksReleased(0, 0, [1])], [BlocksReleased(0, 0, [1])]
    )
    columns = ownership(released_twice, 2)
    cells = [column.get(("device", 0, 1), EMPTY) for column in columns]
    assert cells == [Cell(("r0",)), EMPTY, EMPTY]
