"""Groups that share a pool, that have a window, or blocks of a size of their own: what the books
follow, what checks demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvproof.invariants.books import Books
from kvproof.invariants.checks.atom import Atom
from kvproof.invariants.checks.cap import Cap
from kvproof.invariants.checks.excl import Excl
from kvproof.invariants.checks.key import Key
from kvproof.invariants.checks.order import Order
from kvproof.invariants.checks.pin import Pin
from kvproof.invariants.checks.prov import Prov
from kvproof.invariants.checks.ref import Ref
from kvproof.invariants.checks.valid import Valid
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksOutlived,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    Event,
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import Admit, Evict, Finish, Grow, Launch, Retire, Segment
from kvproof.invariants.outcomes import NO_FREE_BLOCKS, Outcome
from kvproof.invariants.shadow import Shadow
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.invariants.view import View

SIZE = 2
CHECKS = (Ref, Excl, Order, Cap, Atom, Prov, Key, Pin, Valid)


class World:
    """Two groups over one pool of eight blocks, told of by hand."""

    def __init__(self, **semantics: Any) -> None:
        configuration = Configuration(blocks=8, block_size=SIZE)
        self.books = Books(configuration, Semantics(groups=2, shared_pool=True, **semantics))
        self.violations: list[Violation] = []
        shadows, nothing = [Shadow(9, g.block_size) for g in self.books.groups], cast(View, None)
        if not self.books.semantics.block_sizes:
            shadows = shadows[:1] * 2
        self.checks = [
            check(self.books, shadows, nothing, self.violations.append) for check in CHECKS
        ]

    def check(self, kind: type[Any]) -> Any:
        return next(check for check in self.checks if isinstance(check, kind))

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

    def admit(self, tokens: int, hits: int = 0) -> int:
        number = len(self.books.identities)
        outcome = Outcome("done", None, number, hits * SIZE)
        self.books.operation_handlers[Admit](Admit((Segment(1, tokens),)), outcome)
        return number

    def run(self, number: int, tables: Sequence[Sequence[int]]) -> None:
        """One step computes all that is pending."""
        self.tell(StepRetired(self.launch(number, tables)))

    def launch(self, number: int, tables: Sequence[Sequence[int]]) -> int:
        request = self.books.requests[number]
        step = self.books.figures.iterations
        item = StepItem(number, 0, request.scheduled, request.length, tuple(tables))
        self.tell(StepLaunched(step, [item]))
        return step

    def seen(self) -> list[str]:
        return [violation.property for violation in self.violations]


def computed(**semantics: Any) -> World:
    """Request 0 has five tokens, computed, in blocks 1 to 3 of group 0 and 4 to 6 of group 1."""
    world = World(**semantics)
    world.admit(5)
    world.tell(BlocksAllocated(0, 0, 0, [1, 2, 3]), BlocksAllocated(1, 0, 0, [4, 5, 6]))
    world.run(0, ([1, 2, 3], [4, 5, 6]))
    world.tell(
        BlocksPublished(0, 0, 0, [1, 2], [b"a0", b"b0"]),
        BlocksPublished(1, 0, 0, [4, 5], [b"a1", b"b1"]),
    )
    assert not world.violations
    return world


def finish(world: World) -> None:
    world.books.operation_handlers[Finish](Finish(0), Outcome("done", None, 0))
    world.tell(BlocksReleased(0, 0, [3, 2, 1]), BlocksReleased(1, 0, [6, 5, 4]))


def test_what_one_group_takes_all_lack() -> None:
    world = computed()
    assert [group.free for group in world.books.groups] == [2, 2]
    assert [group.referenced for group in world.books.groups] == [6, 6]
    finish(world)
    assert [group.free for group in world.books.groups] == [8, 8]
    assert list(world.books.groups[1].cached_free) == [2, 1, 5, 4]


def test_a_growth_fits_if_the_pool_has_blocks_for_all_groups() -> None:
    world = computed()
    cap = world.check(Cap)
    for tokens, reason in ((3, None), (4, NO_FREE_BLOCKS)):
        status: Any = "refused" if reason else "done"
        cap.expecting(Grow)(Grow(0, tokens), Outcome(status, reason, 0))
    assert not world.violations
    cap.expecting(Grow)(Grow(0, 4), Outcome("done", None, 0))
    (violation,) = world.violations
    assert violation.message == (
        "grow was done, but it should have been refused (no_free_blocks): 2 blocks were free; in "
        "group 0 it takes 2: 9 tokens need 5, and it has 3; in group 1 it takes 2: 9 tokens need "
        "5, and it has 3"
    )


def test_cached_blocks_of_a_shared_pool_are_counted_once() -> None:
    world = computed()
    finish(world)
    evict = world.check(Cap).expecting(Evict)
    evict(Evict(9), Outcome("done", count=4))
    assert not world.violations
    evict(Evict(9), Outcome("done", count=8))
    assert world.seen() == ["CAP"]


def test_a_block_of_another_group_is_not_handed_out() -> None:
    world = computed()
    world.admit(1)
    world.tell(BlocksAllocated(1, 1, 0, [3]))
    assert world.seen() == ["EXCL"]


def test_eviction_follows_one_order_over_all_groups() -> None:
    world = computed()
    finish(world)
    world.tell(BlocksEvicted(0, [2], [b"b0"], "request"), BlocksEvicted(0, [1], [b"a0"], "request"))
    assert not world.violations
    world.tell(BlocksEvicted(1, [4], [b"a1"], "request"))
    assert world.seen() == ["ORDER"]


def test_a_hit_is_on_blocks_of_the_group() -> None:
    world = computed()
    world.admit(5, hits=1)
    world.tell(BlocksReused(0, 1, 0, [1]))
    assert not world.violations
    world.tell(BlocksReused(1, 1, 0, [1]))
    assert world.seen() == ["KEY"]


# -- blocks of unequal size ------------------------------------------------------------------------

UNEQUAL: dict[str, Any] = {
    "block_sizes": (2, 4),
    "publishes": "at_allocation",
    "duplicates": "indexed",
}


def unequal() -> World:
    """Request 0 has seven tokens, computed, in blocks 1 to 4 of group 0 and 5 and 6 of group 1."""
    world = World(**UNEQUAL)
    world.admit(7)
    world.tell(
        BlocksAllocated(0, 0, 0, [1, 2, 3, 4]),
        BlocksAllocated(1, 0, 0, [5, 6]),
        BlocksPublished(0, 0, 0, [1, 2], [b"a0", b"b0"]),
        BlocksPublished(1, 0, 0, [5], [b"b1"]),
    )
    world.run(0, ([1, 2, 3, 4], [5, 6]))
    world.check(Valid).conclude(Retire(), Outcome("done", count=1))
    for check in (Prov, Excl):
        world.check(check).audit()
    assert not world.violations
    return world


@pytest.mark.parametrize("more", [{"groups": 3}, {"groups": 2, "tiers": True}])
def test_sizes_are_one_for_each_group_and_not_with_tiers(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"block_sizes=\(2, 4\): one for each"):
        Semantics(block_sizes=(2, 4), **more)


def test_sizes_are_multiples_of_the_configurations() -> None:
    with pytest.raises(InputError, match=r"block_sizes=\(2, 3\): multiples of .* 2, are needed"):
        World(block_sizes=(2, 3))


def test_a_step_computes_what_has_slots_in_every_group() -> None:
    world = World(block_sizes=(4, 6))
    world.admit(7)
    world.books.requests[0].slots = 5
    cap = world.check(Cap)
    for count, wrong in ((7, True), (6, False)):
        world.violations.clear()
        cap.expecting(Launch)(Launch(), Outcome("done", count=count))
        assert bool(world.violations) is wrong


def test_each_group_has_rows_of_its_size() -> None:
    world = unequal()
    request = world.books.requests[0]
    assert request.standing(*world.books.block_sizes)[3] == (4, 2)
    assert world.books.groups[0].free == 2
    cap = world.check(Cap)
    cap.expecting(Grow)(Grow(0, 3), Outcome("done", None, 0))
    assert not world.violations
    cap.expecting(Grow)(Grow(0, 4), Outcome("done", None, 0))
    assert world.seen() == ["CAP"]


@pytest.mark.parametrize(("lacking", "tokens"), [(None, 4), ((0, 2, b"b0"), 0), ((1, 5, b"b1"), 0)])
def test_a_hit_ends_where_blocks_of_all_groups_end(
    lacking: tuple[int, int, bytes] | None, tokens: int
) -> None:
    world = unequal()
    if lacking is not None:
        group, block, key = lacking
        world.tell(BlocksEvicted(group, [block], [key], "reset"))
    tags = world.books.requests[0].tags
    assert world.books.longest_hit(tags) * SIZE == tokens
    assert world.books.longest_hit(tags[:4]) == 0


def test_what_all_groups_have_is_to_be_findable_and_no_more() -> None:
    world = unequal()
    world.tell(BlocksEvicted(1, [5], [b"b1"], "reset"))
    world.check(Valid).conclude(Retire(), Outcome("done", count=1))
    assert world.seen() == ["PIN", "VALID"]


def test_a_copy_that_stayed_private_may_outlive_what_it_is_a_copy_of() -> None:
    world = World(**UNEQUAL | {"duplicates": "private"})
    world.admit(4)
    world.tell(BlocksAllocated(0, 0, 0, [1, 2]), BlocksAllocated(1, 0, 0, [5]))
    world.run(0, ([1, 2], [5]))
    world.check(Valid).conclude(Retire(), Outcome("done", count=1))
    assert not world.violations


def test_nothing_is_findable_beyond_the_last_common_end() -> None:
    world = unequal()
    world.tell(BlocksPublished(0, 0, 2, [3], [b"c0"]))
    assert world.seen() == ["VALID"]


def test_a_large_block_is_whole_when_all_of_its_tokens_are_written() -> None:
    world = World(**UNEQUAL)
    world.admit(4)
    world.tell(
        BlocksAllocated(0, 0, 0, [1, 2]),
        BlocksAllocated(1, 0, 0, [5]),
        BlocksPublished(1, 0, 0, [5], [b"b1"]),
    )
    world.tell(StepLaunched(0, [StepItem(0, 0, 0, 2, ([1, 2], [5]))]), StepRetired(0))
    assert not world.violations
    world.tell(StepLaunched(1, [StepItem(0, 0, 2, 4, ([1, 2], [4]))]), StepRetired(1))
    assert set(world.seen()) == {"EXCL", "VALID"}


def test_the_key_of_a_large_block_stands_for_its_last_token() -> None:
    world = unequal()
    world.admit(7, hits=2)
    world.tell(BlocksReused(0, 1, 0, [1, 2]), BlocksReused(1, 1, 0, [5]))
    assert not world.violations
    world.tell(BlocksPublished(1, 1, 0, [5], [b"another"]))
    assert world.seen() == ["KEY"]


# -- windows -------------------------------------------------------------------------------------

WINDOWED: dict[str, Any] = {"windows": (0, 3), "exact_admission": False}


def grown(world: World) -> None:
    """One more token, for which row 2 has a slot already."""
    world.books.operation_handlers[Grow](Grow(0, 1), Outcome("done", None, 0))


def test_what_is_behind_the_window_may_be_given_back() -> None:
    world = computed(**WINDOWED)
    world.tell(BlocksOutlived(1, 0, [4]))
    assert world.books.requests[0].tables == [[1, 2, 3], [0, 5, 6]]
    assert world.books.groups[0].free == 3
    grown(world)
    world.run(0, ([1, 2, 3], [0, 5, 6]))
    world.check(Prov).audit()
    finish_windowed = BlocksReleased(1, 0, [6, 5])
    world.tell(finish_windowed)
    assert not world.violations


def test_what_is_in_the_window_may_not() -> None:
    world = computed(**WINDOWED)
    world.tell(BlocksOutlived(1, 0, [5, 4]))
    world.check(Prov).audit()
    assert world.seen() == ["PROV"]


def test_a_group_without_a_window_keeps_its_blocks() -> None:
    world = computed(**WINDOWED)
    world.tell(BlocksOutlived(0, 0, [1]))
    world.check(Prov).audit()
    assert world.seen() == ["PROV"]


@pytest.mark.parametrize("stream_order", [False, True])
def test_what_a_step_in_flight_still_reads_is_given_back_only_in_stream_order(
    stream_order: bool,
) -> None:
    world = computed(**WINDOWED, stream_order=stream_order)
    grown(world)
    world.launch(0, ([1, 2, 3], [4, 5, 6]))
    world.tell(BlocksOutlived(1, 0, [4]))
    assert not world.violations
    world.tell(BlocksOutlived(1, 0, [5]))
    assert ("PIN" in world.seen()) != stream_order


def test_only_blocks_of_the_table_are_given_back_behind_the_window() -> None:
    world = computed(**WINDOWED)
    world.tell(BlocksOutlived(1, 0, [1]))
    assert world.seen() == ["REF"]


def test_a_hit_needs_only_what_is_in_the_window() -> None:
    world = computed(**WINDOWED)
    world.admit(6, hits=2)
    world.tell(BlocksReused(0, 1, 0, [1, 2]), BlocksReused(1, 1, 1, [5]))
    assert world.books.requests[1].tables == [[1, 2], [0, 5]]
    world.tell(BlocksAllocated(0, 1, 2, [7]), BlocksAllocated(1, 1, 2, [8]))
    world.run(1, ([1, 2, 7], [0, 5, 8]))
    assert not world.violations
    assert not world.books.strays


def test_a_refused_growth_may_give_back_what_is_behind_the_window_and_nothing_else() -> None:
    world = computed(**WINDOWED)
    atom, refused = world.check(Atom), Outcome("refused", NO_FREE_BLOCKS, 0)
    world.books.events = [BlocksOutlived(1, 0, [4])]
    atom.conclude(Grow(0, 9), refused)
    assert not world.violations
    world.books.events = [BlocksReleased(1, 0, [4])]
    atom.conclude(Grow(0, 9), refused)
    assert world.seen() == ["ATOM"]
