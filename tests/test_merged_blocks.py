"""What other engines do and kvproof's own does not: blocks merged, published late, forked early.

A script of operations and events is put to the checks, with a view that shows what they expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from kvproof.invariants.checker import Checker
from kvproof.invariants.checks.cap import Cap
from kvproof.invariants.checks.excl import Excl
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.valid import Valid
from kvproof.invariants.events import (
    BlockMerged,
    BlocksAllocated,
    BlocksPublished,
    Event,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Admit,
    Arrive,
    Fork,
    Launch,
    Operation,
    Reserve,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.checker import SchedulingChecker
from kvproof.invariants.scheduling.vocabulary import (
    BlocksHeld,
    Limits,
    Promises,
    RequestArrived,
)
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.harnesses import harness_for
from kvproof.stateful_tests.subjects import subject_factory

MERGING = Semantics(publishes="lazily", duplicates="merged", forks_early=True)


class Script:
    """Checks, and what they are told."""

    def __init__(self, semantics: Semantics) -> None:
        view = SimpleNamespace(standing=self._standing)
        subject = SimpleNamespace(
            configuration=Configuration(blocks=8), semantics=semantics, view=lambda: view
        )
        self.checker = Checker(cast(Any, subject), checks=(Excl, Prov, Valid, Cap), interval=0)

    def _standing(self, request: int) -> Any:
        return self.checker.books.requests[request].standing(4)

    def tell(self, operation: Operation, outcome: Outcome, *events: Event) -> None:
        self.checker.observe(operation, outcome, events)

    def found(self) -> list[str]:
        return [violation.property for violation in self.checker.violations]

    def admit(self, number: int, source: int, blocks: Sequence[int]) -> None:
        self.tell(
            Admit((Segment(source, 6),)),
            Outcome("done", None, number),
            BlocksAllocated(0, number, 0, blocks),
        )

    def compute(self, end: int, *tables: Sequence[int]) -> None:
        items = [StepItem(number, 0, 0, end, (table,)) for number, table in enumerate(tables)]
        launch = Launch(items=tuple([(number, end) for number in range(len(tables))]))
        self.tell(launch, Outcome("done", count=end * len(items)), StepLaunched(0, items))
        self.tell(Retire(), Outcome("done", count=len(items)), StepRetired(0))

    def reserve(self, number: int, event: Event) -> None:
        self.tell(Reserve(number, 6), Outcome("done", None, number), event)


def two_equal(semantics: Semantics = MERGING, other: int = 0) -> Script:
    script = Script(semantics)
    script.admit(0, 0, [1, 2])
    script.admit(1, other, [3, 4])
    script.compute(6, [1, 2], [3, 4])
    return script


PUBLISHED = BlocksPublished(0, 0, 0, [1], [b"key"])


def test_an_equal_block_that_is_findable_takes_the_place_of_ones_own() -> None:
    script = two_equal()
    script.reserve(0, PUBLISHED)
    script.reserve(1, BlockMerged(0, 1, 0, 3, 1))
    assert script.found() == []
    group = script.checker.books.groups[0]
    assert (group.refs[1], group.refs[3], group.free) == (2, 0, 5)
    assert script.checker.books.requests[1].tables == [[1, 4]]


def test_one_that_is_not_findable_does_not() -> None:
    script = two_equal()
    script.reserve(1, BlockMerged(0, 1, 0, 3, 1))
    assert script.found() == ["VALID"]


def test_nor_one_that_holds_something_else() -> None:
    script = two_equal(other=5)
    script.reserve(0, PUBLISHED)
    script.reserve(1, BlockMerged(0, 1, 0, 3, 1))
    assert script.found() == ["PROV"]


def test_what_is_given_up_was_in_the_table() -> None:
    script = two_equal()
    script.reserve(0, PUBLISHED)
    script.reserve(1, BlockMerged(0, 1, 0, 4, 1))
    assert script.found() == ["EXCL"]


def test_full_blocks_may_be_published_late_where_that_is_said() -> None:
    assert two_equal().found() == []
    assert set(two_equal(Semantics()).found()) == {"VALID"}


def test_a_request_may_be_forked_a_token_early_where_that_is_said() -> None:
    for semantics, computed, found in (
        (MERGING, 5, []),
        (MERGING, 4, ["CAP"]),
        (Semantics(publishes="lazily"), 5, ["CAP"]),
    ):
        script = Script(semantics)
        script.admit(0, 0, [1, 2])
        script.compute(computed, [1, 2])
        script.tell(Fork(0), Outcome("done", None, 0, children=(1,)))
        assert script.found() == found


def test_a_request_may_hold_blocks_before_it_is_run_if_that_is_said() -> None:
    for said in (True, False):
        script = Script(MERGING)
        scheduling = SchedulingChecker(
            limits=Limits(),
            promises=Promises(),
            configuration=Configuration(blocks=8),
            cache=script.checker,
            view=cast(Any, None),
        )
        scheduling.handle(RequestArrived(0, 0, 6, 2, 2, 0))
        script.admit(0, 0, [1, 2])
        if said:
            scheduling.handle(BlocksHeld(0, 0))
        hold = next(check for check in scheduling.checks if check.id() == "HOLD")
        hold.audit()
        assert [violation.property for violation in scheduling.violations] == ["HOLD"] * (not said)


def test_schedulers_that_know_no_samples_are_not_asked_for_any() -> None:
    run = harness_for(subject_factory("scheduler:fcfs")(Configuration()))
    assert run.perform(Arrive((Segment(0, 7),), samples=2)).status == "skipped"
    assert run.perform(Arrive((Segment(0, 7),))).status == "done"
