"""Blocks that are findable before they are computed: when they are due, and when nothing is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from kvproof.invariants.books import Books
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.valid import Valid
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    Event,
    ReleaseFenced,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import Abort, Admit, Finish, Operation, Preempt, Resume, Segment
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import View

SIZE = 4
ROWS = ((1,), (2, 3))
"""Blocks of request 0, which has one token; and of request 1, which has eight."""


class Scripted:
    """A cache that publishes at allocation, told of by hand; its index is what it says it is.

    Request 0 is in step 0, in flight; request 1 was admitted then, and its first block published.
    """

    def __init__(self, *, stream_order: bool = False) -> None:
        semantics = Semantics(
            publishes="at_allocation",
            fences_releases=not stream_order,
            stream_order=stream_order,
        )
        self.books = Books(Configuration(blocks=8, block_size=SIZE), semantics)
        self.violations: list[Violation] = []
        shadows = [Shadow(9, SIZE)]
        view, report = cast(View, self), self.violations.append
        self.prov = Prov(self.books, shadows, view, report)
        self.valid = Valid(self.books, shadows, view, report)
        self.admit(1)
        self.launch(0, 1)
        self.admit(2 * SIZE)
        self.tell(BlocksPublished(0, 1, 0, [2], [b"key"]))

    def index(self, group: int) -> Mapping[bytes, Sequence[int]]:
        return dict(self.books.groups[group].blocks_of)

    def tell(self, *events: Event) -> None:
        for event in events:
            for stage in (
                self.valid.before_event(),
                self.books.event_handlers,
                self.prov.after_event(),
                self.valid.after_event(),
            ):
                if type(event) in stage:
                    stage[type(event)](event)

    def do(self, operation: Operation, request: int, cached: int = 0) -> None:
        self.books.begin()
        outcome = Outcome("done", None, request, cached)
        self.books.operation_handlers[type(operation)](operation, outcome)

    def admit(self, tokens: int) -> None:
        number = len(self.books.identities)
        self.do(Admit((Segment(number, tokens),)), number)
        self.tell(BlocksAllocated(0, number, 0, list(ROWS[number])))

    def launch(self, number: int, tokens: int) -> None:
        request = self.books.requests[number]
        start, table = request.scheduled, list(request.tables[0])
        item = StepItem(number, request.epoch, start, start + tokens, (table,))
        self.tell(StepLaunched(self.books.figures.iterations, [item]))

    def retire(self) -> list[str]:
        """The oldest step; what is wrong by then."""
        self.books.begin()
        self.tell(StepRetired(self.books.steps[0].number))
        self.valid.audit()
        self.prov.audit()
        return list(dict.fromkeys([violation.message for violation in self.violations]))

    def release(self, operation: Operation, step: int | None = None) -> None:
        """Request 1 goes; its blocks at once, or when that step is retired."""
        self.do(operation, 1)
        freed: Event = BlocksReleased(0, 1, [3, 2])
        self.tell(freed if step is None else ReleaseFenced(1, step))


GONE = (Abort(1), Finish(1), Preempt(1))
UNWRITTEN = "block 2 is findable as row 0 of request 1, but no step has written it"


@pytest.mark.parametrize("operation", GONE, ids=repr)
def test_nobody_writes_it_any_more_when_its_request_is_gone(operation: Operation) -> None:
    script = Scripted()
    script.release(operation)
    assert script.retire() == [UNWRITTEN]


def test_it_is_seen_in_the_end_even_if_no_step_is_ever_retired() -> None:
    script = Scripted()
    assert script.retire() == []
    script.release(Abort(1))
    script.valid.audit()
    assert not script.violations
    script.do(Finish(0), 0)
    script.valid.audit()
    assert [violation.message for violation in script.violations] == [UNWRITTEN]


@pytest.mark.parametrize("operation", GONE, ids=repr)
@pytest.mark.parametrize("stream_order", [False, True])
def test_the_step_in_flight_writes_it_still(operation: Operation, stream_order: bool) -> None:
    script = Scripted(stream_order=stream_order)
    script.launch(1, 2 * SIZE)
    script.release(operation, step=1)
    assert script.retire() == []
    assert script.retire() == []
    assert not script.books.groups[0].owed


@pytest.mark.parametrize("operation", GONE, ids=repr)
def test_not_if_it_writes_only_a_part(operation: Operation) -> None:
    script = Scripted()
    script.launch(1, 3)
    script.release(operation, step=1)
    assert script.retire() == []
    (message,) = script.retire()
    assert message == f"{UNWRITTEN} whole: its positions 0 to 3 lack 3"


@pytest.mark.parametrize("operation", GONE, ids=repr)
def test_nothing_is_owed_for_what_is_not_findable_any_more(operation: Operation) -> None:
    script = Scripted()
    script.release(operation)
    script.tell(BlocksEvicted(0, [2], [b"key"], "request"))
    assert script.retire() == []


def resumed(script: Scripted) -> None:
    """It hits the block that it published itself."""
    script.do(Resume(0), 1, cached=SIZE)
    script.tell(BlocksReused(0, 1, 0, [2]), BlocksAllocated(0, 1, 1, [4]))


def test_a_request_may_come_back_to_what_its_own_step_in_flight_writes() -> None:
    script = Scripted()
    script.launch(1, 2 * SIZE)
    script.release(Preempt(1), step=1)
    resumed(script)
    assert script.retire() == []
    script.launch(1, SIZE)
    assert script.retire() == []
    assert script.retire() == []


def test_but_not_to_what_it_never_wrote() -> None:
    script = Scripted()
    script.release(Preempt(1))
    resumed(script)
    assert script.retire()[0] == UNWRITTEN


def test_a_request_that_runs_takes_its_time() -> None:
    script = Scripted()
    script.launch(1, 3)
    assert script.retire() == []
    assert script.retire() == []
    script.launch(1, 1)
    assert script.retire() == []
    assert not script.books.groups[0].owed


def test_a_step_that_writes_elsewhere_pays_nothing() -> None:
    script = Scripted()
    item = StepItem(1, 0, 0, SIZE, ([5],))
    script.tell(StepLaunched(1, [item]))
    script.retire()
    assert UNWRITTEN in script.retire()
