"""What mutants of checks survived before, of windows and of steps in stream order.

As in ``test_check_mutants.py``: each test here kills some (see docs/mutation.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvproof.invariants.books import Books
from kvproof.invariants.checks.key import Key
from kvproof.invariants.checks.order import Order
from kvproof.invariants.checks.pin import Pin
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.ref import Ref
from kvproof.invariants.events import (
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksOutlived,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    Event,
    ReleaseFenced,
    StepItem,
    StepLaunched,
    StepRetired,
    TransferStarted,
)
from kvproof.invariants.operations import Admit, Grow, Segment
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import View

TABLES = ([1, 2, 3], [4, 5, 6])
WINDOW = 3


class Told:
    """One request in two groups, the second of which has a window; told of by hand."""

    def __init__(self, kind: type[Check], *, size: int = 2, **semantics: Any) -> None:
        configuration = Configuration(blocks=8, block_size=size, host_blocks=8)
        promised = Semantics(groups=2, windows=(0, WINDOW), exact_admission=False, **semantics)
        self.books = Books(configuration, promised)
        self.violations: list[Violation] = []
        shadows, nothing = [Shadow(9, size), Shadow(9, size)], cast(View, None)
        self.check = kind(self.books, shadows, nothing, self.violations.append)
        prov = Prov(self.books, shadows, nothing, lambda violation: None)
        checks = [self.check] if kind is Prov else [self.check, prov]
        self.stages = [
            *(check.before_event() for check in checks),
            self.books.event_handlers,
            *(check.after_event() for check in checks),
        ]
        admit = Admit((Segment(1, 2 * size + 1),))
        self.books.operation_handlers[Admit](admit, Outcome("done", None, 0, 0))
        for group, table in enumerate(TABLES):
            self.tell(BlocksAllocated(group, 0, 0, table))

    def tell(self, *events: Event) -> None:
        for event in events:
            for stage in self.stages:
                if type(event) in stage:
                    stage[type(event)](event)

    def grow(self, tokens: int = 1) -> None:
        self.books.operation_handlers[Grow](Grow(0, tokens), Outcome("done", None, 0))

    def launch(self, *tables: Sequence[int], tokens: int | None = None) -> int:
        """A step over the next so many tokens, or all; of its own tables if no others are named."""
        request = self.books.requests[0]
        first, step = request.scheduled, self.books.figures.iterations
        end = request.length if tokens is None else first + tokens
        own = tuple([list(table) for table in request.tables])
        self.tell(StepLaunched(step, [StepItem(0, 0, first, end, tables or own)]))
        return step

    def compute(self, tokens: int | None = None) -> None:
        self.tell(StepRetired(self.launch(tokens=tokens)))

    def looks(self, *events: Event) -> int:
        self.check.checked = before = 5
        self.tell(*events)
        return self.check.checked - before


def test_giving_back_what_is_not_in_the_table_names_it() -> None:
    told = Told(Ref)
    told.compute()
    assert told.looks(BlocksOutlived(1, 0, [4])) == 1
    assert told.violations == []
    told.tell(BlocksOutlived(1, 0, [5, 1]), BlocksOutlived(1, 7, [6]))
    named = [(one.group, one.block, one.request) for one in told.violations]
    assert named == [(1, 1, 0), (1, 6, 7)]


@pytest.mark.parametrize(("group", "block", "size"), [(0, 1, 2), (1, 5, 2), (1, 4, 1), (1, 6, 2)])
def test_giving_back_what_a_step_in_flight_reads_is_told(group: int, block: int, size: int) -> None:
    """It computes the token behind five or, in blocks of one token, behind none."""
    told = Told(Pin, size=size)
    if size > 1:
        told.compute()
        told.grow()
    step = told.launch(tokens=1)
    assert told.looks(BlocksOutlived(group, 0, [block])) == 1
    (violation,) = told.violations
    assert violation.message == (
        f"request 0 gave back block {block}, which step {step}, in flight, uses"
    )
    assert (violation.group, violation.block, violation.request) == (group, block, 0)


def test_giving_back_what_others_hold_as_well_takes_it_from_no_step() -> None:
    told = Told(Pin)
    told.compute()
    told.grow()
    told.launch(tokens=1)
    told.books.groups[1].hold([5])
    told.tell(BlocksOutlived(1, 0, [5]))
    assert told.violations == []


def test_giving_back_what_is_behind_the_window_of_a_step_is_right() -> None:
    told = Told(Pin)
    told.compute()
    told.grow()
    told.launch()
    assert told.looks(BlocksOutlived(1, 0, [4])) == 1
    assert told.violations == []


def test_blocks_in_the_window_are_given_back_from_the_tail() -> None:
    told = Told(Order, release_order="tail_first")
    told.compute()
    told.tell(BlocksOutlived(1, 0, [4]))
    assert told.looks(BlocksReleased(1, 0, [5, 6])) == 1
    (violation,) = told.violations
    assert (violation.group, violation.block, violation.request) == (1, 5, 0)


# -- what is read ----------------------------------------------------------------------------------


def overwrite(told: Told, group: int, *blocks: int) -> None:
    """Somebody whom nobody knows has copied the empty block 8 there."""
    told.tell(*(BlockCopied(group, 9, 0, 8, block, 2) for block in blocks))


def where(told: Told) -> list[tuple[int | None, int | None, int | None]]:
    return [(one.group, one.block, one.request) for one in told.violations]


def test_an_audit_reads_from_the_first_position_in_the_window() -> None:
    told = Told(Prov)
    told.compute(2)
    overwrite(told, 1, 4)
    told.check.audit()
    (violation,) = told.violations
    assert "reads position 0 from block 4" in violation.message


def test_a_table_is_compared_where_it_was_replaced_in_one_group() -> None:
    told = Told(Prov)
    told.compute()
    told.tell(BlockMerged(1, 0, 1, 5, 7))
    told.violations.clear()
    told.launch([1, 2, 3], [4, 5, 6], tokens=0)
    assert where(told) == [(1, 5, 0)]


@pytest.mark.parametrize(("group", "row"), [(0, 0), (0, 2), (1, 1), (1, 2)])
def test_an_audit_compares_all_rows_that_a_step_in_flight_reads(group: int, row: int) -> None:
    """Also those that an earlier step was seen to read."""
    told = Told(Prov)
    told.compute()
    tables = [list(table) for table in TABLES]
    tables[group][row] = 8
    told.launch(*tables, tokens=0)
    assert told.violations == []
    told.check.audit()
    assert where(told) == [(group, 8, 0)]
    assert f"reads row {row} of request 0" in told.violations[0].message


def test_a_table_may_name_old_blocks_behind_the_window() -> None:
    told = Told(Prov)
    told.compute()
    told.launch([1, 2, 3], [8, 5, 6], tokens=0)
    told.check.audit()
    assert told.violations == []


@pytest.mark.parametrize("told_anew", [False, True])
@pytest.mark.parametrize("stream_order", [False, True])
def test_a_step_reads_no_row_of_its_window_that_was_given_back(
    told_anew: bool, stream_order: bool
) -> None:
    """Though an earlier step was seen to read it, and right at that step."""
    told = Told(Prov, stream_order=stream_order)
    told.compute()
    told.grow()
    told.tell(BlocksOutlived(1, 0, [5]))
    assert told.violations == []
    step = told.launch(*([] if told_anew else TABLES), tokens=1)
    told.tell(StepRetired(step))
    says = "reads position 3 from block 0" if told_anew else "names block 5, but the request was"
    assert says in told.violations[0].message


@pytest.mark.parametrize("stream_order", [False, True])
def test_a_step_needs_no_row_behind_its_window(stream_order: bool) -> None:
    told = Told(Prov, stream_order=stream_order)
    told.compute()
    told.grow()
    told.tell(BlocksOutlived(1, 0, [4]))
    told.compute()
    told.check.audit()
    assert told.violations == []
    assert told.books.requests[0].trusted_rows == [3, 3]


@pytest.mark.parametrize(("tokens", "seen"), [(1, []), (2, [(1, 5, 0)])])
def test_in_stream_order_an_audit_reads_from_the_window_of_the_next_step(
    tokens: int, seen: list[tuple[int, int, int]]
) -> None:
    """That computes position 5: of the block with positions 2 and 3, it reads the latter."""
    told = Told(Prov, stream_order=True)
    told.compute(4)
    told.launch(tokens=1)
    told.tell(BlockCopied(1, 9, 0, 8, 5, tokens))
    told.check.audit()
    assert where(told) == seen


def test_a_table_may_name_more_than_a_step_reads() -> None:
    told = Told(Prov)
    told.compute()
    told.launch([1, 2, 3, 7], [4, 5, 6, 8], tokens=0)
    told.check.audit()
    assert told.violations == []


@pytest.mark.parametrize("lost", [False, True])
def test_an_audit_reads_up_to_what_a_step_has_yet_to_write(lost: bool) -> None:
    """Of two rows that are findable the second is not computed; another request has hit both."""
    told = Told(Prov, publishes="at_allocation")
    told.compute(2)
    told.tell(BlocksPublished(0, 0, 0, [1, 2], [b"a0", b"b0"]))
    hit = Outcome("done", None, 1, 4)
    told.books.operation_handlers[Admit](Admit((Segment(1, 5),)), hit)
    told.tell(BlocksReused(0, 1, 0, [1, 2]), BlocksAllocated(0, 1, 2, [7]))
    if lost:
        overwrite(told, 0, 1)
    told.check.audit()
    assert where(told) == ([(0, 1, 0)] if lost else [])


# -- groups that share a pool ----------------------------------------------------------------------


def test_a_hit_on_a_block_of_another_group_is_told() -> None:
    told = Told(Key, shared_pool=True)
    told.compute()
    told.tell(BlocksPublished(0, 0, 0, [1], [b"key"]))
    told.books.operation_handlers[Admit](Admit((Segment(1, 5),)), Outcome("done", None, 1, 2))
    assert told.looks(BlocksReused(1, 1, 0, [4])) == 1
    assert told.violations == []
    told.tell(BlocksReused(1, 1, 0, [1]))
    assert where(told) == [(1, 1, 1)]
    assert "in group 1 on block 1, which is findable in group 0" in told.violations[0].message


@pytest.mark.parametrize(
    ("stream_order", "step", "wrong"),
    [
        *((False, 1, False), (False, 2, True)),
        *((True, 1, False), (True, 2, False), (True, 0, True), (True, 3, True)),
    ],
)
def test_in_stream_order_a_later_step_may_keep_what_is_given_back(
    stream_order: bool, step: int, wrong: bool
) -> None:
    """Steps 0 and 1 carry the request, step 2 does not."""
    told = Told(Pin, stream_order=stream_order)
    for number, end in ((0, 2), (1, 5)):
        request = told.books.requests[0]
        own = tuple([list(table) for table in request.tables])
        told.tell(StepLaunched(number, [StepItem(0, 0, request.scheduled, end, own)]))
    told.tell(StepLaunched(2, []))
    assert told.looks(ReleaseFenced(0, step)) == 1
    says = f"the blocks of request 0 were left to step {step}, but its last step in flight is 1"
    assert [one.message for one in told.violations] == ([says] if wrong else [])


def test_who_is_in_no_step_leaves_nothing_to_a_later_one() -> None:
    told = Told(Pin, stream_order=True)
    told.compute()
    told.tell(StepLaunched(1, []))
    assert told.looks(ReleaseFenced(0, 1)) == 1
    (violation,) = told.violations
    assert violation.message.endswith("left to step 1, but its last step in flight is 0")


# -- copies in stream order ------------------------------------------------------------------------


def started(kind: Any, sources: Sequence[int], targets: Sequence[int]) -> TransferStarted:
    return TransferStarted(7, kind, 1, sources, targets, (), 0)


def in_flight() -> Told:
    """The step reads two blocks and writes the second; the request has a third, for later."""
    told = Told(Pin, stream_order=True, tiers=True)
    told.compute(2)
    told.launch(tokens=2)
    return told


@pytest.mark.parametrize(
    ("kind", "sources", "targets", "says"),
    [
        ("store", [8, 5], [0, 1], "reads device block 5"),
        ("promote", [0, 1], [8, 4], "overwrites device block 4"),
        ("promote", [0, 1], [5, 8], "overwrites device block 5"),
    ],
)
def test_a_copy_of_what_a_step_in_flight_uses_is_told(
    kind: str, sources: list[int], targets: list[int], says: str
) -> None:
    told = in_flight()
    assert told.looks(started(kind, sources, targets)) == 1
    (violation,) = told.violations
    assert violation.message == f"transfer 7 ({kind}) {says}, which step 1, in flight, uses"
    block = int(says.split()[-1])
    named = (violation.group, violation.block, violation.request, violation.transfer)
    assert named == (1, block, 0, 7)


def test_copies_that_wait_for_the_steps_before_them_may_touch_what_these_use() -> None:
    told = Told(Pin, stream_order=True, tiers=True, copies_after_steps=True)
    told.compute(2)
    told.launch(tokens=2)
    assert told.looks(started("promote", [0], [4])) == 0
    assert told.violations == []


@pytest.mark.parametrize(
    ("kind", "sources", "targets"),
    [
        ("store", [4], [5]),
        ("store", [6], [4]),
        ("promote", [4], [6]),
        ("promote", [5], [8]),
    ],
)
def test_a_copy_of_what_no_step_uses_is_right(
    kind: str, sources: list[int], targets: list[int]
) -> None:
    """Slots of the host have numbers as well."""
    told = in_flight()
    assert told.looks(started(kind, sources, targets)) == 1
    assert told.violations == []
