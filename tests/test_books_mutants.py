"""What mutants of the checkers' books survived before: each test here kills some.

The books are told of operations and events by hand, and what they say then is compared with what
the words of operations and events mean (see docs/mutation.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvproof.invariants.books import Books
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
    ReleaseFenced,
    StepItem,
    StepLaunched,
    StepRetired,
    TransferStarted,
)
from kvproof.invariants.group_books import GroupBooks, Owed, PooledBooks
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Decode,
    Fork,
    Grow,
    Notify,
    Preempt,
    Reserve,
    Reset,
    Resume,
    Segment,
)
from kvproof.invariants.outcomes import HIT_PENDING, Outcome
from kvproof.invariants.request_books import Figures, RequestModel
from kvproof.invariants.slot_books import TierBooks, TransferModel
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.tags import Tags
from kvproof.invariants.tier_goals import TierGoals

SIZES = (2, 4)
KEYS = [bytes([number]) for number in range(9)]


def prompt(tokens: int, source: int = 1, slots: int = 0) -> Admit:
    return Admit((Segment(source, tokens),), slots=slots)


class Ledger:
    """Books of two groups whose blocks hold two tokens and four."""

    def __init__(self, *, prefix_caching: bool = True, **semantics: Any) -> None:
        promised = Semantics(groups=2, block_sizes=SIZES, exact_admission=False, **semantics)
        configuration = Configuration(blocks=8, block_size=2, prefix_caching=prefix_caching)
        self.books = Books(configuration, promised)
        self.one, self.other = self.books.groups

    def do(self, operation: AnyOperation, request: int | None = 0, **outcome: Any) -> None:
        self.books.begin()
        said = Outcome("done", None, request, **outcome)
        self.books.operation_handlers[type(operation)](operation, said)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.books.event_handlers[type(event)](event)

    def step(self, number: int, start: int, end: int, *, request: int = 0, epoch: int = 0) -> None:
        self.tell(StepLaunched(number, [StepItem(request, epoch, start, end, ())]))

    def of(self, request: int = 0) -> RequestModel:
        return self.books.requests[request]

    def published(self, tokens: int, *rows: int) -> Tags[int]:
        """A request that is computed, and findable as far as that, by group; its tags."""
        self.do(prompt(tokens))
        for group, blocks in enumerate(rows):
            table = list(range(1, blocks + 1))
            self.tell(BlocksAllocated(group, 0, 0, table))
            self.tell(BlocksPublished(group, 0, 0, table, KEYS[:blocks]))
        return self.of().tags


# -- what is findable ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "tokens", "hit"),
    [
        ((6, 3), 13, 12),
        ((6, 3), 12, 8),  # the last token is left to compute
        ((6, 3), 9, 8),
        ((6, 3), 8, 4),
        ((6, 3), 5, 4),
        ((6, 3), 4, 0),
        ((6, 3), 1, 0),
        ((6, 2), 13, 8),
        ((5, 3), 13, 8),
        ((3, 3), 13, 4),
        ((1, 3), 13, 0),
        ((0, 3), 13, 0),
        ((6, 0), 13, 0),
    ],
)
def test_a_hit_is_as_long_as_all_groups_find(rows: Sequence[int], tokens: int, hit: int) -> None:
    ledger = Ledger()
    tags = ledger.published(13, *rows)
    assert ledger.books.longest_hit(tags[:tokens]) * 2 == hit


def test_nothing_is_hit_where_nothing_is_cached() -> None:
    ledger = Ledger(prefix_caching=False)
    tags = ledger.published(13, 6, 3)
    assert ledger.books.longest_hit(tags) == 0
    assert list(ledger.books.rows_to_hit(tags)) == []


@pytest.mark.parametrize(("tokens", "rows"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (13, 6)])
def test_rows_that_may_be_hit_are_full_and_leave_a_token(tokens: int, rows: int) -> None:
    ledger = Ledger()
    tags = ledger.published(13)[:tokens]
    assert list(ledger.books.rows_to_hit(tags)) == [tags[2 * row + 1] for row in range(rows)]


def test_what_is_published_is_found_by_its_last_token() -> None:
    ledger = Ledger()
    ledger.do(prompt(13))
    tags = ledger.of().tags
    ledger.tell(BlocksPublished(1, 0, 1, [5, 6], KEYS[:2]))
    assert ledger.other.key_of_tag == {tags[7]: KEYS[0], tags[11]: KEYS[1]}
    assert [ledger.other.tag_of[block] for block in (5, 6)] == [tags[7], tags[11]]
    assert ledger.one.key_of_tag == {}


# -- requests --------------------------------------------------------------------------------------


def test_of_a_new_request_nothing_is_known() -> None:
    request = RequestModel(3, 7, Tags("Q", [1] * 5), 2)
    assert (request.asked, request.slots, request.input_tokens) == (5, 5, 5)
    assert (request.cached_tokens, request.computed, request.scheduled) == (0, 0, 0)
    assert (request.last_step, request.launched, request.epoch) == (-1, 0, 0)
    assert (request.running, request.swapped) == (True, False)
    assert request.tables == [[], []]
    assert request.verified == request.trusted_rows == [0, 0]


def test_nothing_has_happened_before_it_has() -> None:
    figures = Figures()
    assert {getattr(figures, name) for name in Figures.__slots__} == {0}
    group = GroupBooks(0, 8, 9, 2)
    assert (group.referenced, group.free, group.empty_free, group.withheld) == (0, 8, 8, 0)


@pytest.mark.parametrize(
    ("asked", "cached", "slots"), [(0, 0, 9), (4, 0, 4), (4, 8, 8), (12, 8, 12)]
)
def test_a_request_has_the_slots_that_it_asked_for_or_its_hit_needs(
    asked: int, cached: int, slots: int
) -> None:
    ledger = Ledger()
    ledger.do(prompt(9, slots=asked), cached_tokens=cached)
    request = ledger.of()
    assert request.slots == slots
    assert request.computed == request.scheduled == request.cached_tokens == cached
    figures = ledger.books.figures
    assert (figures.prefix_cache_hits, figures.prefix_cache_queries) == (cached, 9)
    ledger.do(prompt(5), 1, cached_tokens=4)
    assert (figures.prefix_cache_hits, figures.prefix_cache_queries) == (cached + 4, 14)
    assert figures.admissions == 2


def test_slots_grow_with_tokens_and_never_shrink() -> None:
    ledger = Ledger()
    ledger.do(prompt(4))
    for operation, slots in (
        (Reserve(0, 7), 7),
        (Reserve(0, 6), 7),
        (Grow(0, 2), 7),
        (Grow(0, 2), 8),
    ):
        ledger.do(operation)
        assert ledger.of().slots == slots
    ledger.do(Decode((0,)), None, children=(0,))
    assert ledger.of().slots == ledger.of().length == 9
    ledger.do(Reserve(0, 11))
    ledger.do(Decode((0,)), None, children=(0,))
    assert (ledger.of().slots, ledger.of().length) == (11, 10)


def test_a_child_is_what_its_parent_was_and_goes_its_own_way() -> None:
    ledger = Ledger()
    ledger.do(prompt(8, slots=6))
    ledger.step(0, 0, 6)
    ledger.tell(StepRetired(0))
    parent = ledger.of()
    parent.outdated, parent.verified = 3, [5, 4]
    ledger.do(Fork(0, 2), children=(1, 2))
    for number in (1, 2):
        child = ledger.of(number)
        assert (child.computed, child.scheduled, child.outdated, child.slots) == (6, 6, 3, 6)
        assert child.verified == [5, 4]
        assert child.tags == parent.tags
    ledger.do(Grow(1), 1)
    ledger.of(1).verified[0] = 0
    assert (parent.length, ledger.of(2).length) == (8, 8)
    assert parent.verified == ledger.of(2).verified == [5, 4]
    assert [one.id for one in ledger.books.running] == [0, 1, 2]
    ledger.do(Reserve(0, 12))
    ledger.do(Fork(0), children=(3,))
    assert ledger.of(3).slots == 8


@pytest.mark.parametrize("swap", [False, True])
def test_what_is_preempted_has_nothing_and_what_was_swapped_is_remembered(swap: bool) -> None:
    ledger = Ledger()
    ledger.do(prompt(8))
    ledger.step(0, 0, 6)
    ledger.tell(StepRetired(0))
    ledger.step(1, 6, 8)
    request = ledger.of()
    request.verified, request.trusted_rows, request.outdated = [6, 6], [3, 2], 2
    request.loading = frozenset({4})
    ledger.books.touched_requests.clear()
    ledger.do(Preempt(0, swap=swap))
    kept = 6 if swap else 0
    assert (request.suspended, request.computed, request.scheduled) == (kept, kept, kept)
    assert request.outdated == (2 if swap else 0)
    assert (request.running, request.swapped, request.epoch) == (False, swap, 1)
    assert request.verified == request.trusted_rows == [0, 0]
    assert request.loading == frozenset()
    assert [*ledger.books.touched_requests] == [0]
    figures = ledger.books.figures
    assert (figures.preemptions, figures.suspensions) == (1, int(swap))
    state = "swapped" if swap else "preempted"
    assert request.standing(2) == (state, 8, kept, (0, 0))


@pytest.mark.parametrize(
    ("swap", "asked", "cached", "slots", "computed"),
    [
        (False, 0, 4, 8, 4),
        (False, 2, 4, 4, 4),
        (False, 6, 4, 6, 4),
        (True, 0, 6, 8, 0),
        (True, 2, 6, 6, 0),
    ],
)
def test_what_comes_back_has_its_hit_or_waits_for_its_copy(
    swap: bool, asked: int, cached: int, slots: int, computed: int
) -> None:
    ledger = Ledger()
    ledger.do(prompt(7))
    ledger.step(0, 0, 6)
    ledger.tell(StepRetired(0))
    ledger.do(Grow(0))
    ledger.do(Preempt(0, swap=swap))
    ledger.books.touched_requests.clear()
    ledger.do(Resume(0, asked), cached_tokens=cached)
    request = ledger.of()
    assert (request.running, request.swapped, request.asked) == (True, False, 8)
    assert (request.computed, request.scheduled, request.slots) == (computed, computed, slots)
    assert [*ledger.books.touched_requests] == [0]


def test_requests_are_kept_in_the_order_of_their_first_admission() -> None:
    ledger = Ledger()
    for number in range(4):
        ledger.do(prompt(2), number)
    for number in (2, 0, 1):
        ledger.do(Preempt(0), number)
    assert [one.id for one in ledger.books.preempted] == [0, 1, 2]
    for number in (1, 2):
        ledger.do(Resume(0), number)
    assert [one.id for one in ledger.books.running] == [1, 2, 3]
    assert [one.id for one in ledger.books.preempted] == [0]


def test_all_that_is_computed_or_on_its_way_is_outdated_by_a_reset() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.do(prompt(8), number)
    ledger.step(0, 0, 6)
    ledger.of(1).suspended = 4
    ledger.do(Reset(), None)
    assert [ledger.of(number).outdated for number in range(3)] == [6, 4, 0]


@pytest.mark.parametrize(
    ("tokens", "slots", "sizes", "rows"),
    [(5, 0, (2, 4), (3, 2)), (4, 9, (2, 4), (5, 3)), (4, 0, (2, 4), (2, 1)), (5, 0, (2,), (3, 3))],
)
def test_rows_of_a_request_are_as_many_as_its_slots_need(
    tokens: int, slots: int, sizes: Sequence[int], rows: Sequence[int]
) -> None:
    ledger = Ledger()
    ledger.do(prompt(tokens, slots=slots))
    assert ledger.of().standing(*sizes) == ("running", tokens, 0, rows)
    ledger.of().loading = frozenset({1})
    assert ledger.of().standing(*sizes)[0] == "loading"


# -- tables ----------------------------------------------------------------------------------------


def test_what_is_not_known_or_not_the_next_row_is_a_stray() -> None:
    ledger = Ledger()
    ledger.do(prompt(8))
    right: list[Event] = [
        BlocksReused(0, 0, 0, [1]),
        BlocksAllocated(0, 0, 1, [2]),
        BlocksAllocated(1, 0, 0, [3]),
        StepLaunched(0, []),
        StepRetired(0),
    ]
    strays: list[Event] = [
        BlocksReused(0, 0, 3, [4]),
        BlocksAllocated(0, 0, 0, [5]),
        BlocksAllocated(0, 9, 0, [6]),
        BlocksReused(0, 9, 0, [7]),
        BlocksShared(0, 9, 0, [7]),
        BlockCopied(0, 9, 0, 7, 8, 1),
        BlockMerged(0, 9, 0, 8, 7),
        BlocksOutlived(1, 9, [3]),
        BlocksReleased(0, 9, [7]),
        ReleaseFenced(9, 0),
        BlocksPublished(0, 9, 0, [1], KEYS[:1]),
    ]
    ledger.tell(*right)
    assert ledger.books.strays == []
    ledger.tell(*strays)
    assert ledger.books.strays == strays
    ledger.tell(StepLaunched(1, []), StepRetired(7))
    assert ledger.books.strays == [*strays, StepRetired(7)]
    assert [step.number for step in ledger.books.steps] == [1]


def test_a_hit_behind_the_window_names_a_reserved_block() -> None:
    ledger = Ledger(windows=(0, 3))
    ledger.do(prompt(13))
    ledger.tell(BlocksReused(1, 0, 2, [5]), BlocksAllocated(1, 0, 3, [6]))
    nobodys = ledger.books.semantics.reserved[0]
    assert ledger.of().tables == [[], [nobodys, nobodys, 5, 6]]
    assert ledger.books.strays == []
    assert [ledger.books.window(group) for group in (0, 1)] == [0, 3]


@pytest.mark.parametrize("copied", [False, True])
def test_another_block_in_a_table_is_to_be_looked_at_anew(copied: bool) -> None:
    ledger = Ledger()
    ledger.do(prompt(12))
    request = ledger.of()
    ledger.tell(BlocksAllocated(0, 0, 0, [1, 2, 3]), BlocksAllocated(1, 0, 0, [4, 5, 6]))
    ledger.step(0, 0, 12)
    request.verified, request.trusted_rows = [12, 12], [6, 3]
    before = ledger.books.steps[0].tables[0][1]
    new = BlockCopied(1, 0, 1, 5, 7, 2) if copied else BlockMerged(1, 0, 1, 5, 7)
    ledger.tell(new)
    assert request.tables == [[1, 2, 3], [4, 7, 6]]
    assert before == [4, 5, 6]
    assert (request.verified, request.trusted_rows) == ([12, 4], [6, 1])
    assert (ledger.other.refs[5], ledger.other.refs[7]) == (0, 1)
    request.verified, request.trusted_rows = [12, 2], [6, 0]
    ledger.tell(BlockMerged(1, 0, 2, 6, 8))
    assert (request.verified, request.trusted_rows) == ([12, 2], [6, 0])
    ledger.tell(BlockMerged(1, 0, 3, 7, 6))  # there is no such row
    assert request.tables[1] == [4, 7, 8]


def test_what_a_table_gives_back_it_does_not_name() -> None:
    ledger = Ledger()
    ledger.do(prompt(12))
    request = ledger.of()
    ledger.tell(BlocksAllocated(0, 0, 0, [1, 2, 3]), BlocksAllocated(1, 0, 0, [4, 5, 6]))
    ledger.step(0, 0, 12)
    ledger.tell(BlocksOutlived(1, 0, [4]))
    nobodys = ledger.books.semantics.reserved[0]
    assert request.tables == [[1, 2, 3], [nobodys, 5, 6]]
    assert ledger.books.steps[0].tables[0][1] == [4, 5, 6]
    assert request.launched == 1
    ledger.tell(BlocksReleased(1, 0, [5, 6]))
    assert (request.tables, request.launched) == ([[1, 2, 3], []], 0)
    assert ledger.other.held == set()
    assert ledger.one.held == {1, 2, 3}


def test_fenced_tables_are_the_steps_until_it_gives_them_back() -> None:
    ledger = Ledger()
    ledger.do(prompt(12))
    request = ledger.of()
    ledger.tell(BlocksAllocated(0, 0, 0, [1, 2, 3]), BlocksAllocated(1, 0, 0, [4]))
    ledger.step(0, 0, 2)
    ledger.step(1, 2, 4)
    ledger.tell(ReleaseFenced(0, 7))
    assert (request.tables, request.launched) == ([[1, 2, 3], [4]], 2)
    ledger.tell(ReleaseFenced(0, 1))
    assert (request.tables, request.launched) == ([[], []], 0)
    first, second = ledger.books.steps
    assert (first.fenced, second.fenced) == ([], [(0, [[1, 2, 3], [4]])])
    assert ledger.books.passing is False
    ledger.tell(BlocksReleased(0, 0, [3, 2, 1], 1))
    assert ledger.books.released_fences == {(1, 0, 0)}
    assert ledger.books.passing
    ledger.books.begin()
    assert (ledger.books.released_fences, ledger.books.passing) == (set(), False)


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_computes_its_items_when_it_is_retired() -> None:
    ledger = Ledger()
    for number in (0, 1):
        ledger.do(prompt(8), number)
    items = [StepItem(0, 0, 0, 6, ()), StepItem(9, 0, 0, 1, ()), StepItem(1, 0, 0, 8, ())]
    ledger.tell(StepLaunched(5, items))
    assert [ledger.of(n).scheduled for n in (0, 1)] == [6, 8]
    assert [ledger.of(n).computed for n in (0, 1)] == [0, 0]
    assert [(ledger.of(n).launched, ledger.of(n).last_step) for n in (0, 1)] == [(1, 5)] * 2
    assert ledger.books.figures.batch_size == 3
    assert [carried.id for _, carried in ledger.books.steps[0].items] == [0, 1]
    ledger.step(6, 6, 8)
    assert (ledger.books.figures.iterations, ledger.books.figures.batch_size) == (2, 1)
    ledger.do(Preempt(0), 1)
    ledger.books.settled()
    ledger.tell(StepRetired(5))
    assert [(ledger.of(n).computed, ledger.of(n).launched) for n in (0, 1)] == [(6, 1), (0, 1)]
    assert [*ledger.books.touched_requests] == [0, 1]
    assert ledger.books.retired is not None
    assert ledger.books.retired.number == 5
    assert ledger.books.passing
    ledger.books.begin()
    assert ledger.books.retired is None


@pytest.mark.parametrize(
    ("end", "epoch", "running", "due"),
    [
        (6, 0, True, True),
        (7, 0, True, False),
        (9, 0, True, False),
        (6, 0, False, False),  # the step in flight carries it as it was then
        (6, 1, True, True),
        (9, 1, False, True),
    ],
)
def test_what_was_published_early_is_due_when_nobody_will_write_it_any_more(
    end: int, epoch: int, running: bool, due: bool
) -> None:
    ledger = Ledger()
    for number in (0, 1):
        ledger.do(prompt(8), number)
    ledger.step(0, 0, 6)
    ledger.tell(StepRetired(0))
    ledger.step(1, 6, 8)
    request = ledger.of()
    request.running = running
    assert ledger.books.due(Owed(request, 0, epoch, end)) is due
    other = ledger.of(1)
    other.running = False
    assert ledger.books.due(Owed(other, 0, 0, 8))


def test_in_stream_order_what_is_scheduled_counts_as_written() -> None:
    for stream_order, written in ((False, 0), (True, 6)):
        ledger = Ledger(stream_order=stream_order)
        ledger.do(prompt(8))
        ledger.step(0, 0, 6)
        assert ledger.books.written(ledger.of()) == written


def test_what_is_published_early_is_owed_beyond_what_is_written() -> None:
    ledger = Ledger(publishes="at_allocation")
    ledger.do(prompt(13))
    ledger.step(0, 0, 8)
    ledger.tell(StepRetired(0))
    ledger.tell(BlocksPublished(1, 0, 1, [2, 3], KEYS[:2]))
    assert ledger.other.owed == {3: Owed(ledger.of(), 2, 0, 12)}


# -- ledgers ---------------------------------------------------------------------------------------


def test_evictions_are_counted_and_remembered_while_they_are_under_pressure() -> None:
    ledger = Ledger()
    ledger.published(13, 6, 3)
    ledger.tell(BlocksReleased(0, 0, [6, 5, 4, 3, 2, 1]), BlocksReleased(1, 0, [3, 2, 1]))
    ledger.books.settled()
    ledger.tell(BlocksEvicted(0, [6], KEYS[5:6], "request"))
    assert ledger.one.evicting == []
    ledger.tell(BlocksEvicted(0, [5, 4], [KEYS[4], KEYS[3]], "pressure"))
    assert (ledger.one.evicting, ledger.books.figures.evictions) == ([5, 4], 3)
    assert ledger.one.touched == [6, 5, 4]
    assert ledger.one.touched_keys == [KEYS[5], KEYS[4], KEYS[3]]
    ledger.do(prompt(2), 1)
    ledger.tell(BlocksAllocated(0, 1, 0, [5]))
    assert ledger.one.evicting == []
    ledger.books.settled()
    for group in ledger.books.groups:
        assert (group.touched, group.touched_keys) == ([], [])
    assert ledger.books.touched_requests == {}


def group_of(*, changed: bool = False) -> GroupBooks:
    """Blocks 1 to 4 are held, 4 twice; 1, 2 and 3 are findable, the first two under one key."""
    group = GroupBooks(0, 8, 9, 2)
    group.hold([1, 2, 3, 4])
    group.hold([4])
    group.publish([1, 2, 3], [KEYS[1], KEYS[1], KEYS[3]], [101, 101, 103])
    group.changed = set() if changed else None
    group.touched.clear()
    return group


def test_a_ledger_knows_what_is_held_free_and_findable() -> None:
    group = group_of()
    assert (group.referenced, group.free, group.empty_free) == (4, 4, 4)
    group.drop([4, 1, 7])
    assert (group.refs[4], group.refs[1], group.refs[7]) == (1, 0, 0)
    assert (group.referenced, group.free, group.empty_free) == (3, 5, 4)
    assert ([*group.cached_free], group.emptied) == ([1], [])
    group.drop([4])
    assert (group.emptied, group.free, group.empty_free) == ([4], 6, 5)
    assert group.touched == [4, 1, 7, 4]
    group.hold([1, 5])
    assert ([*group.cached_free], group.free, group.empty_free) == ([], 4, 4)
    group.publish([6], [KEYS[6]], [106])
    assert [*group.cached_free] == [6]  # nobody holds it


def test_what_is_withheld_is_not_free() -> None:
    group = group_of()
    for blocks, withheld in ((3, 3), (4, 4), (9, 4), (0, 0), (2, 2)):
        group.withhold(blocks)
        assert (group.withheld, group.free) == (withheld, 4 - withheld)
    group.hold([5])
    assert group.free == 1
    group.drop([5, 3])
    assert group.free == 3


def test_a_key_is_findable_while_one_of_its_blocks_is() -> None:
    group = group_of()
    group.owed = {block: Owed(RequestModel(0, 0, Tags("Q"), 1), 0, 0, 2) for block in (2, 3)}
    group.unstored = {1: None, 3: None}
    group.drop([3])
    group.unpublish([1, 8, 3])
    assert group.blocks_of == {KEYS[1]: (2,)}
    assert (group.key_of, group.key_of_tag) == ({2: KEYS[1]}, {101: KEYS[1]})
    assert ([*group.cached_free], [*group.owed], [*group.unstored]) == ([], [2], [])
    group.unpublish([2])
    assert (group.blocks_of, group.key_of, group.key_of_tag) == ({}, {}, {})


def test_all_that_was_touched_is_to_be_compared() -> None:
    group = group_of()
    keys = [*group.touched_keys]
    group.hold([5])
    group.publish([5], [KEYS[5]], [105])
    group.publish([6], [KEYS[6]], [106])
    group.drop([1])
    assert group.touched == [5, 5, 6, 1]
    assert group.touched_keys == [*keys, KEYS[5], KEYS[6]]


def test_a_ledger_follows_what_others_have_reported_as_wrong() -> None:
    """Blocks without content of their own, and one content under two keys."""
    group = GroupBooks(0, 8, 9, 2)
    group.publish([1, 2], KEYS[1:3], [101])
    assert group.key_of == {1: KEYS[1]}
    group.publish([3], KEYS[3:4], [101])
    group.unpublish([1])
    group.unpublish([3])
    assert (group.key_of, group.blocks_of, group.key_of_tag) == ({}, {}, {})


def test_all_that_changed_is_remembered_for_who_asks() -> None:
    group = group_of(changed=True)
    group.hold([5])
    group.drop([1])
    group.publish([6], [KEYS[6]], [106])
    group.unpublish([2])
    assert group.changed == {1, 2, 5, 6}


def test_groups_of_one_pool_know_the_same_of_its_blocks() -> None:
    one, other = (PooledBooks(group, 8, 9, 2) for group in (0, 1))
    other.share(one)
    one.hold([1, 2])
    assert (other.refs[1], other.referenced, other.free) == (1, 2, 6)
    other.publish([2], [KEYS[2]], [102])
    one.publish([1], [KEYS[1]], [101])
    assert (list(one.findable), list(other.findable)) == ([1], [2])
    other.drop([1])
    assert ([*one.cached_free], one.referenced, one.free) == ([1], 1, 7)
    assert one.key_of_tag.keys().isdisjoint(other.key_of_tag)


# -- slots of lower tiers --------------------------------------------------------------------------


def test_no_slot_is_counted_before_one_has_moved() -> None:
    books = Books(Configuration(blocks=8, host_blocks=3), Semantics(tiers=True))
    assert books.tiers is not None
    assert books.tiers.moved is False


def slots_of() -> TierBooks:
    """Of six slots of the host, 0, 1 and 2 are findable; 2 was copied there last."""
    tier = TierBooks("host", 0, 6, "lru", 2)
    tier.pin([0, 1, 2])
    tier.publish([0, 1, 2], KEYS[:3], [100, 101, 102])
    tier.unpin([2, 1, 0], used=True)
    tier.touched.clear()
    return tier


def test_slots_are_free_until_they_are_pinned_or_owned() -> None:
    tier = slots_of()
    assert ([*tier.order], tier.free, tier.empty) == ([0, 1, 2], 6, 3)
    tier.pin([1, 3])
    tier.pin([1])
    assert ([*tier.order], tier.free, tier.empty) == ([0, 2], 4, 2)
    tier.unpin([1, 3], used=True)
    assert (tier.emptied, tier.free, tier.empty) == ([3], 5, 3)
    tier.unpin([1], used=True)
    assert ([*tier.order], tier.emptied, tier.free) == ([0, 2, 1], [], 6)
    tier.unpin([4], used=True)  # is not pinned
    assert tier.free == 6
    assert tier.touched == [1, 3, 1, 1, 3, 1, 4]
    assert (tier.room([0, 3]), tier.room([])) == (5, 6)
    tier.withhold(2)
    assert (tier.free, tier.room([0])) == (4, 3)
    tier.withhold(9)
    assert tier.free == 0


def test_what_a_request_owns_is_free_when_it_is_gone_and_no_copy_uses_it() -> None:
    tier = slots_of()
    tier.pin([4, 5])
    tier.own([4, 5], 7)
    tier.unpin([5], used=False)
    assert (tier.free, tier.owned, tier.owner) == (4, {7: [4, 5]}, {4: 7, 5: 7})
    tier.disown(7)
    assert (tier.emptied, tier.free, tier.owned, tier.owner) == ([5], 5, {}, {})
    tier.unpin([4], used=False)
    assert (tier.emptied, tier.free) == ([4], 6)
    tier.disown(7)
    assert tier.emptied == []


def test_what_was_asked_for_is_recent_the_first_the_most() -> None:
    tier = slots_of()
    tier.touch([100, 101, 999])
    assert [*tier.order] == [2, 1, 0]
    tier.pin([2])
    tier.touch([102, 101])
    assert [*tier.order] == [0, 1]


def test_what_is_unpublished_is_nowhere_to_be_found() -> None:
    tier = slots_of()
    tier.queue, tier.corrupt, tier.unlisted = {0: None, 1: None}, {0, 1}, {0, 1}
    tier.pin([2])
    tier.unpublish([0, 2, 5])
    assert (tier.key_of, tier.tag_of) == ({1: KEYS[1]}, {1: 101})
    assert (tier.slot_of_key, tier.slot_of) == ({KEYS[1]: 1}, {101: 1})
    assert (tier.queue, tier.corrupt, tier.unlisted) == ({1: None}, {1}, {1})
    assert tier.emptied == [0]
    assert tier.touched == [2, 0, 2, 5]
    tier.publish([1], KEYS[4:5], [104])
    assert (tier.corrupt, tier.unlisted, tier.touched_keys) == (set(), set(), [*KEYS[:3], KEYS[4]])


def test_what_is_awaited_is_awaited_from_the_transfer_that_said_so_last() -> None:
    tier = slots_of()
    first, second = (
        TransferModel(TransferStarted(number, "store", 0, [1, 2], [3, 4], KEYS[3:5]), tags, None)
        for number, tags in ((1, [103, 104]), (2, [104, 105]))
    )
    tier.await_(first.tags, 1)
    tier.await_(second.tags, 2)
    assert [tag for tag in range(100, 107) if tier.awaits_or_has(tag)] == [*range(100, 106)]
    tier.await_no_more(first)
    assert tier.pending == {104: 2, 105: 2}


def moved(kind: Any, request: RequestModel | None) -> TransferModel:
    return TransferModel(TransferStarted(3, kind, 0, [1], [2], (), 0), [], request)


def test_a_transfer_is_void_once_it_is_cancelled_or_its_request_goes_on_without_it() -> None:
    assert not moved("store", None).void
    cancelled = moved("store", None)
    cancelled.cancelled = True
    assert cancelled.void
    for name, value, void in (
        ("departing", frozenset({3}), False),
        ("loading", frozenset({3}), False),
        ("departing", frozenset({4}), True),
        ("suspended", 0, True),
        ("epoch", 6, True),
    ):
        request = RequestModel(0, 0, Tags("Q", [1] * 8), 1)
        request.suspended, request.epoch = 5, 2
        transfer = moved("swap_out", request)
        assert (transfer.tokens, transfer.epoch) == (5, 2)
        if name != "departing":
            request.departing = frozenset() if name == "loading" else frozenset({3})
        setattr(request, name, value)
        assert transfer.void is void, name


def test_nothing_of_a_new_transfer_has_arrived() -> None:
    transfer = moved("store", None)
    assert (transfer.tokens, transfer.epoch, transfer.landed, transfer.copied) == (0, 0, 0, 0)
    assert (transfer.cancelled, transfer.outdated, transfer.bytes) == (False, False, b"")


def test_transfers_to_and_from_the_disk_are_known() -> None:
    kinds = ("store", "demote", "fetch", "promote", "swap_out", "swap_in")
    on_disk = [kind for kind in kinds if moved(kind, None).on_disk]
    assert on_disk == ["demote", "fetch"]


def test_the_device_has_no_slots_of_lower_tiers() -> None:
    books = Books(
        Configuration(blocks=8, host_blocks=3, disk_blocks=3, offload="both"), Semantics(tiers=True)
    )
    assert books.tiers is not None
    assert [len(books.tiers.of(tier)) for tier in ("device", "host", "disk")] == [0, 1, 1]


def test_what_tiers_answer_is_counted_each_time_and_without_a_copy_too() -> None:
    books = Books(Configuration(blocks=8, host_blocks=3, offload="prefix"), Semantics(tiers=True))
    assert books.tiers is not None
    hits: Counter[str] = Counter()
    goals = TierGoals(books, books.tiers, hits)
    for lookup in (HIT_PENDING, HIT_PENDING, ""):
        goals._admit(Admit((Segment(0, 4),)), Outcome("done", lookup=lookup))
    goals._notify(Notify(), Outcome("done"))
    assert +hits == {"hit-on-pending": 2}
