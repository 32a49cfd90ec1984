"""The engine, operation by operation: what it answers, what it says happened, what it refuses.

Prefix reuse, eviction and several groups: ``test_prefix_cache.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from kvproof.engine.request import Request
from kvproof.invariants.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReleased,
    BlocksReused,
    BlocksShared,
    Event,
    ReleaseFenced,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestGrown,
    RequestPreempted,
    RequestResumed,
    RequestsDecoded,
    SlotsReleased,
    StepItem,
    StepLaunched,
    StepRetired,
    TransferEnded,
    TransferStarted,
)
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
    Segment,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    IN_FLIGHT,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NO_HOST_BLOCKS,
    NOT_COMPUTED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject

STEP = (Launch(), Retire())


def prompt(length: int, source: int = 0, slots: int = 0) -> Admit:
    return Admit((Segment(source, length),), slots=slots)


class Cache:
    """An engine of blocks of four tokens that is told operations; keeps the last one's events."""

    def __init__(self, *operations: Operation, blocks: int = 8, **configuration: Any) -> None:
        self.subject = EngineSubject(Configuration(blocks=blocks, **configuration))
        self.engine = self.subject.engine
        self.view = self.subject.view()
        self.events: list[Event] = []
        self.do(*operations)

    def do(self, *operations: Operation) -> Outcome | None:
        outcome = None
        for operation in operations:
            outcome = self.subject.apply(operation)
            self.events = list(self.subject.drain_events())
        return outcome

    def said(self, *expected: Event) -> bool:
        return bool(_plain(self.events) == _plain(expected))

    def key(self, request: int, row: int) -> bytes:
        return self.engine.requests[request].block_keys(0, row + 1)[row + 1]

    @property
    def free(self) -> list[int]:
        return list(self.view.free_blocks(0))


def _plain(events: Iterable[Event]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(list(events)))


# -- each operation: outcome and events, in order ------------------------------------------------


def test_admit_takes_blocks_for_the_whole_prompt() -> None:
    cache = Cache()
    assert cache.do(prompt(6)) == Outcome("done", None, 0)
    assert cache.said(BlocksAllocated(0, 0, 0, [1, 2]), RequestAdmitted(0, 6, 0))
    assert cache.view.standing(0) == ("running", 6, 0, (2,))
    assert cache.view.table(0, 0) == [1, 2]
    assert cache.view.free_count(0) == 6


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_request_has_the_blocks_that_its_tokens_need(tokens: int, rows: int) -> None:
    assert Cache(prompt(tokens)).view.standing(0)[3] == (rows,)
    assert Cache(prompt(1), Grow(0, tokens)).view.standing(0)[3] == ((tokens + 4) // 4,)


def test_launch_and_retire_compute_and_make_full_blocks_findable() -> None:
    cache = Cache(prompt(6))
    assert cache.do(Launch()) == Outcome("done", count=6)
    assert cache.said(StepLaunched(0, [StepItem(0, 0, 0, 6, ([1, 2],))]))
    assert cache.view.standing(0)[2] == 0
    assert not cache.view.index(0)
    assert list(cache.view.steps_in_flight()) == [0]
    assert cache.do(Retire()) == Outcome("done", count=1)
    assert cache.said(StepRetired(0), BlocksPublished(0, 0, 0, [1], [cache.key(0, 0)]))
    assert cache.view.standing(0)[2] == 6
    assert dict(cache.view.index(0)) == {cache.key(0, 0): (1,)}


def test_grow_appends_tokens_and_takes_a_block_at_the_edge() -> None:
    cache = Cache(prompt(7))
    assert cache.do(Grow(0)) == Outcome("done", None, 0)
    assert cache.said(RequestGrown(0, 1))
    cache.do(Grow(0, tokens=5))
    assert cache.said(BlocksAllocated(0, 0, 2, [3, 4]), RequestGrown(0, 5))
    assert cache.view.standing(0) == ("running", 13, 0, (4,))


def test_a_block_filled_by_growth_becomes_findable() -> None:
    cache = Cache(prompt(3), *STEP, Grow(0), *STEP)
    assert cache.said(StepRetired(1), BlocksPublished(0, 0, 0, [1], [cache.key(0, 0)]))


def test_fork_shares_every_block() -> None:
    cache = Cache(prompt(6), *STEP)
    assert cache.do(Fork(0, samples=2)) == Outcome("done", None, 0, children=(1, 2))
    assert cache.said(
        BlocksShared(0, 1, 0, [1, 2]),
        RequestForked(0, 1),
        BlocksShared(0, 2, 0, [1, 2]),
        RequestForked(0, 2),
    )
    assert [cache.view.ref_counts(0)[block] for block in (1, 2)] == [3, 3]
    assert cache.view.free_count(0) == 6
    assert cache.view.standing(1) == cache.view.standing(0) == ("running", 6, 6, (2,))


def test_the_first_to_write_into_a_shared_block_copies_it() -> None:
    cache = Cache(prompt(6), *STEP, Fork(0))
    cache.do(Grow(1))
    assert cache.said(BlockCopied(0, 1, 1, 2, 3, 2), RequestGrown(1, 1))
    assert (cache.view.table(0, 0), cache.view.table(1, 0)) == ([1, 2], [1, 3])
    assert list(cache.view.ref_counts(0))[:4] == [0, 2, 1, 1]
    cache.do(Grow(0))
    assert cache.said(RequestGrown(0, 1)), "the last owner writes in place"


def test_a_block_of_three_owners_is_copied_too() -> None:
    cache = Cache(prompt(6), *STEP, Fork(0, samples=2))
    cache.do(Grow(0))
    assert cache.said(BlockCopied(0, 0, 1, 2, 3, 2), RequestGrown(0, 1))
    assert list(cache.view.ref_counts(0))[:4] == [0, 3, 2, 1]


def test_a_full_shared_block_is_not_copied() -> None:
    cache = Cache(prompt(8), *STEP, Fork(0))
    cache.do(Grow(1))
    assert cache.said(BlocksAllocated(0, 1, 2, [3]), RequestGrown(1, 1))
    assert cache.view.table(1, 0) == [1, 2, 3]


def test_a_copy_leaves_the_table_of_a_step_in_flight_alone() -> None:
    cache = Cache(prompt(6), *STEP, Grow(0), Launch())
    (launched,) = cache.events
    assert isinstance(launched, StepLaunched)
    cache.do(Retire(), Fork(0), Grow(0))
    assert cache.said(BlockCopied(0, 0, 1, 2, 3, 3), RequestGrown(0, 1))
    assert list(launched.items[0].tables[0]) == [1, 2]


def test_finish_gives_back_the_tail_first() -> None:
    cache = Cache(prompt(10), *STEP)
    assert cache.do(Finish(0)) == Outcome("done", None, 0)
    assert cache.said(BlocksReleased(0, 0, [3, 2, 1]), RequestFinished(0))
    assert cache.free[:1] == [3], "the partial block is empty-free, used again first"
    assert cache.free[-2:] == [2, 1], "cached-free blocks are used last, tail before head"
    assert list(cache.view.requests()) == []


def test_a_shared_block_stays_with_its_other_owner() -> None:
    cache = Cache(prompt(6), *STEP, Fork(0), Finish(0))
    assert cache.said(BlocksReleased(0, 0, [2, 1]), RequestFinished(0))
    assert cache.view.free_count(0) == 6
    cache.do(Finish(0))
    assert cache.view.free_count(0) == 8


def test_preempt_keeps_the_tokens_and_resume_finds_its_own_blocks() -> None:
    cache = Cache(prompt(6), *STEP, Grow(0, 2))
    assert cache.do(Preempt(0)) == Outcome("done", None, 0)
    assert cache.said(BlocksReleased(0, 0, [2, 1]), RequestPreempted(0))
    assert cache.view.standing(0) == ("preempted", 8, 0, (0,))
    assert cache.view.table(0, 0) == []
    assert cache.do(Resume(0)) == Outcome("done", None, 0, cached_tokens=4)
    assert cache.said(
        BlocksReused(0, 0, 0, [1]), BlocksAllocated(0, 0, 1, [2]), RequestResumed(0, 4)
    )
    assert cache.view.standing(0) == ("running", 8, 4, (2,))


def test_a_resumed_request_grows_by_what_it_is_told() -> None:
    cache = Cache(prompt(6), Preempt(0), Resume(0), Grow(0, 1))
    assert cache.said(RequestGrown(0, 1))
    assert cache.view.standing(0)[1] == 7


def test_a_resumed_request_keeps_its_rank() -> None:
    cache = Cache(prompt(2), prompt(2, 1), Preempt(0), Resume(0))
    assert cache.do(Finish(0)).request == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("before", "events"),
    [
        ([*STEP], [BlocksReleased(0, 0, [2, 1]), RequestAborted(0)]),
        ([], [BlocksReleased(0, 0, [2, 1]), RequestAborted(0)]),
        ([Launch()], [ReleaseFenced(0, 0), RequestAborted(0)]),
        ([*STEP, Preempt(0)], [RequestAborted(0)]),
        ([Launch(), Preempt(0)], [RequestAborted(0)]),
    ],
    ids=["computed", "uncomputed", "in flight", "preempted", "preempted in flight"],
)
def test_abort_ends_a_request_in_any_state(before: list[Operation], events: list[Event]) -> None:
    cache = Cache(prompt(6), *before)
    assert cache.do(Abort(0)) == Outcome("done", None, 0)
    assert cache.said(*events)
    assert list(cache.view.requests()) == []
    cache.do(Retire())
    assert cache.view.free_count(0) == 8


def test_evict_and_reset_empty_the_prefix_cache() -> None:
    cache = Cache(prompt(12), *STEP)
    keys = [cache.key(0, row) for row in range(3)]
    cache.do(Finish(0))
    assert cache.do(Evict(1)) == Outcome("done", count=1)
    assert cache.said(BlocksEvicted(0, [3], [keys[2]], "request"))
    assert cache.do(Reset()) == Outcome("done", count=2)
    assert cache.said(BlocksEvicted(0, [2, 1], [keys[1], keys[0]], "reset"))
    assert not cache.view.index(0)
    assert cache.do(Evict(1)) == cache.do(Reset()) == Outcome("done")
    assert cache.said()


def test_evict_spares_blocks_in_use() -> None:
    cache = Cache(prompt(8), *STEP)
    assert cache.do(Evict(9)) == Outcome("done")
    assert len(cache.view.index(0)) == 2


# -- blocks for part of a prompt, and in advance ---------------------------------------------------


def launched(cache: Cache) -> list[tuple[int, int, int]]:
    """Request, start and end of the items of the step that was launched last."""
    (event,) = cache.events
    assert isinstance(event, StepLaunched)
    return [(item.request, item.start, item.end) for item in event.items]


@pytest.mark.parametrize(("slots", "rows"), [(1, 1), (4, 1), (5, 2), (9, 3), (10, 3), (13, 4)])
def test_an_admission_gives_blocks_to_as_many_positions_as_it_is_told(
    slots: int, rows: int
) -> None:
    cache = Cache()
    assert cache.do(prompt(10, slots=slots)) == Outcome("done", None, 0)
    given = list(range(1, rows + 1))
    assert cache.said(BlocksAllocated(0, 0, 0, given), RequestAdmitted(0, 10, 0))
    assert cache.view.standing(0) == ("running", 10, 0, (rows,))


def test_only_tokens_that_have_slots_are_computed() -> None:
    cache = Cache(prompt(10, slots=4))
    assert cache.do(Launch()) == Outcome("done", count=4)
    assert launched(cache) == [(0, 0, 4)]
    cache.do(Retire())
    assert cache.view.standing(0) == ("running", 10, 4, (1,))
    assert cache.do(Launch()) == Outcome("refused", NOTHING_TO_RUN)
    assert cache.do(Reserve(0, 9)) == Outcome("done", None, 0, count=2)
    assert cache.said(BlocksAllocated(0, 0, 1, [2, 3]))
    assert cache.do(Launch()) == Outcome("done", count=6), "whole blocks have slots: to the end"
    assert launched(cache) == [(0, 4, 10)]


def test_a_reservation_counts_from_the_first_position() -> None:
    cache = Cache(prompt(10, slots=4))
    for slots, taken in ((1, 0), (4, 0), (5, 1), (8, 0), (20, 3)):
        assert cache.do(Reserve(0, slots)) == Outcome("done", None, 0, count=taken)
        assert len(cache.events) == (taken > 0)
    assert cache.view.standing(0) == ("running", 10, 0, (5,))


def test_growth_covers_the_tokens_that_had_no_slots_yet() -> None:
    cache = Cache(prompt(10, slots=4), Grow(0, 2))
    assert cache.said(BlocksAllocated(0, 0, 1, [2, 3]), RequestGrown(0, 2))
    assert cache.view.standing(0) == ("running", 12, 0, (3,))


def test_a_hit_may_be_longer_than_the_slots_asked_for() -> None:
    cache = Cache(prompt(12), *STEP, Finish(0))
    assert cache.do(prompt(13, slots=1)) == Outcome("done", None, 1, cached_tokens=12)
    assert cache.said(BlocksReused(0, 1, 0, [1, 2, 3]), RequestAdmitted(1, 13, 12))
    assert cache.view.standing(1) == ("running", 13, 12, (3,))
    assert cache.do(Launch()) == Outcome("refused", NOTHING_TO_RUN)


@pytest.mark.parametrize(
    "advance", [[prompt(3, slots=12)], [prompt(3), Reserve(0, 12)]], ids=["admitted", "reserved"]
)
def test_growth_into_blocks_in_advance_takes_none(advance: list[Operation]) -> None:
    cache = Cache(*advance)
    assert cache.view.standing(0) == ("running", 3, 0, (3,))
    assert cache.do(Launch()) == Outcome("done", count=3), "there is no token in the others yet"
    for tokens in (1, 5, 3):
        cache.do(Grow(0, tokens))
        assert cache.said(RequestGrown(0, tokens))
    cache.do(Grow(0))
    assert cache.said(BlocksAllocated(0, 0, 3, [4]), RequestGrown(0, 1))


def test_blocks_in_advance_are_not_findable_before_they_are_full() -> None:
    cache = Cache(prompt(6, slots=16), *STEP)
    assert cache.said(StepRetired(0), BlocksPublished(0, 0, 0, [1], [cache.key(0, 0)]))
    cache.do(Finish(0))
    assert cache.said(BlocksReleased(0, 0, [4, 3, 2, 1]), RequestFinished(0))


def test_a_fork_shares_only_blocks_with_tokens_in_them() -> None:
    cache = Cache(prompt(6, slots=16), *STEP)
    cache.do(Fork(0))
    assert cache.said(BlocksShared(0, 1, 0, [1, 2]), RequestForked(0, 1))
    assert list(cache.view.ref_counts(0))[:5] == [0, 2, 2, 1, 1]
    cache.do(Grow(0, 3))
    assert cache.said(BlockCopied(0, 0, 1, 2, 5, 2), RequestGrown(0, 3))
    assert cache.view.table(0, 0) == [1, 5, 3, 4], "what it has in advance is its own"
    cache.do(Grow(1, 3))
    assert cache.said(BlocksAllocated(0, 1, 2, [6]), RequestGrown(1, 3))


def test_a_fork_at_the_edge_of_a_block_shares_none_in_advance() -> None:
    cache = Cache(prompt(8, slots=12), *STEP, Fork(0))
    assert cache.view.standing(1) == ("running", 8, 8, (2,))
    cache.do(Grow(0))
    assert cache.said(RequestGrown(0, 1))
    cache.do(Grow(1))
    assert cache.said(BlocksAllocated(0, 1, 2, [4]), RequestGrown(1, 1))


def test_a_request_with_part_of_its_slots_is_not_forked() -> None:
    cache = Cache(prompt(10, slots=4), *STEP)
    assert cache.do(Fork(0)) == Outcome("refused", NOT_COMPUTED, 0)


@pytest.mark.parametrize(("slots", "rows"), [(0, 2), (1, 1), (4, 1), (16, 4)])
def test_a_resumption_gives_blocks_to_as_many_positions_as_it_is_told(
    slots: int, rows: int
) -> None:
    cache = Cache(prompt(7), Preempt(0))
    assert cache.do(Resume(0, slots)) == Outcome("done", None, 0)
    assert cache.view.standing(0) == ("running", 7, 0, (rows,))


# -- several requests at once ----------------------------------------------------------------------


def test_decode_gives_each_of_its_requests_a_token_and_blocks_at_the_edge() -> None:
    cache = Cache(prompt(4), prompt(6, 1), prompt(8, 2))
    assert cache.do(Decode((0, 1, 2))) == Outcome("done", children=(0, 1, 2))
    assert cache.said(
        BlocksAllocated(0, 0, 1, [6]), BlocksAllocated(0, 2, 2, [7]), RequestsDecoded([0, 1, 2])
    )
    assert [cache.view.standing(r)[1] for r in range(3)] == [5, 7, 9]
    assert [cache.view.standing(r)[3] for r in range(3)] == [(2,), (2,), (3,)]


def test_decode_samples_what_growth_would_sample() -> None:
    decoded, grown = Cache(prompt(3), prompt(6, 1)), Cache(prompt(3), prompt(6, 1))
    decoded.do(Decode((1, 0), choice=1), Decode((0,), choice=2))
    grown.do(Grow(0, choice=1), Grow(1, choice=1), Grow(0, choice=2))
    for request in (0, 1):
        assert decoded.engine.requests[request].tokens == grown.engine.requests[request].tokens


def test_decode_names_requests_in_its_order_and_each_once() -> None:
    cache = Cache(prompt(1), prompt(1, 1))
    assert cache.do(Decode((1, 0, 3, 1))) == Outcome("done", children=(1, 0))
    assert cache.said(RequestsDecoded([1, 0]))
    assert [cache.view.standing(r)[1] for r in (0, 1)] == [2, 2]


def test_the_first_to_decode_into_a_shared_block_copies_it_and_the_last_does_not() -> None:
    cache = Cache(prompt(6), *STEP, Fork(0, samples=2))
    assert cache.do(Decode((0, 1, 2))) == Outcome("done", children=(0, 1, 2))
    assert cache.said(
        BlockCopied(0, 0, 1, 2, 3, 2), BlockCopied(0, 1, 1, 2, 4, 2), RequestsDecoded([0, 1, 2])
    )
    assert [cache.view.table(r, 0) for r in range(3)] == [[1, 3], [1, 4], [1, 2]]


def test_decode_copies_a_block_that_is_shared_with_others() -> None:
    cache = Cache(prompt(6), *STEP, Fork(0), prompt(1, 1))
    cache.do(Decode((2, 1)))
    assert cache.said(BlockCopied(0, 1, 1, 2, 4, 2), RequestsDecoded([2, 1]))


def test_decode_takes_no_block_that_was_given_in_advance() -> None:
    cache = Cache(prompt(4, slots=8), prompt(10, 1, slots=4))
    cache.do(Decode((0,)))
    assert cache.said(RequestsDecoded([0]))
    cache.do(Decode((1,)))
    assert cache.said(BlocksAllocated(0, 1, 1, [4, 5]), RequestsDecoded([1])), "all 11 have slots"


def test_a_launch_computes_what_its_items_name_in_their_order() -> None:
    cache = Cache(prompt(6), prompt(5, 1), prompt(4, 2))
    assert cache.do(Launch(items=((2, 4), (0, 3)))) == Outcome("done", count=7)
    assert launched(cache) == [(2, 0, 4), (0, 0, 3)]
    assert cache.do(Launch(items=((0, 1), (1, 99)))) == Outcome("done", count=6)
    assert launched(cache) == [(0, 3, 4), (1, 0, 5)]
    cache.do(Retire(), Retire())
    assert [cache.view.standing(r)[2] for r in range(3)] == [4, 5, 4]


def test_the_first_item_of_a_request_counts() -> None:
    cache = Cache(prompt(6), prompt(5, 1))
    assert cache.do(Launch(items=((1, 2), (0, 1), (3, 4), (1, 5)))) == Outcome("done", count=3)
    assert launched(cache) == [(1, 0, 2), (0, 0, 1)]


def test_items_compute_only_tokens_that_have_slots() -> None:
    cache = Cache(prompt(10, slots=4), prompt(3, 1))
    cache.do(Launch(items=((0, 6),)))
    assert launched(cache) == [(0, 0, 4)]
    cache.do(Launch(items=((0, 6), (1, 1))))
    assert launched(cache) == [(1, 0, 1)], "the other has no slots left"


def test_items_stand_for_themselves_and_no_budget_bounds_them() -> None:
    cache = Cache(prompt(6))
    assert cache.do(Launch(2, items=((0, 5),))) == Outcome("done", count=5)


# -- swap space ------------------------------------------------------------------------------------


def test_swap_out_copies_the_computed_blocks_and_gives_back_all() -> None:
    cache = Cache(prompt(6), *STEP, Grow(0, 6), host_blocks=3)
    assert cache.do(Preempt(0, swap=True)) == Outcome("done", None, 0, transfers=(0,))
    assert cache.said(
        TransferStarted(0, "swap_out", 0, [1, 2], [0, 1], request=0),
        BlocksReleased(0, 0, [3, 2, 1]),
        RequestPreempted(0),
        TransferEnded(0, "completed"),
    )
    assert cache.view.standing(0) == ("swapped", 12, 6, (0,))
    assert cache.view.table(0, 0) == []
    assert (cache.view.free_count(0), cache.engine.host_free(0)) == (8, 1)


def test_swap_in_brings_back_what_was_computed() -> None:
    cache = Cache(prompt(6), *STEP, Grow(0, 6), Preempt(0, swap=True), prompt(1, 1), host_blocks=3)
    assert cache.do(Resume(0)) == Outcome("done", None, 0, cached_tokens=6, transfers=(1,))
    assert cache.said(
        BlocksAllocated(0, 0, 0, [3, 4, 5]),
        TransferStarted(1, "swap_in", 0, [0, 1], [3, 4], request=0),
        TransferEnded(1, "completed"),
        RequestResumed(0, 6),
    )
    assert cache.view.standing(0) == ("running", 12, 6, (3,))
    assert cache.engine.host_free(0) == 3
    cache.do(Launch())
    assert launched(cache) == [(0, 6, 12), (1, 0, 1)]


def test_swapped_blocks_are_findable_again_after_the_next_step() -> None:
    cache = Cache(prompt(6), *STEP, Preempt(0, swap=True), Evict(9), host_blocks=3)
    cache.do(Resume(0))
    assert not cache.view.index(0)
    cache.do(Grow(0), *STEP)
    assert cache.said(StepRetired(1), BlocksPublished(0, 0, 0, [1], [cache.key(0, 0)]))


def test_a_swapped_request_takes_no_prefix_hit() -> None:
    cache = Cache(prompt(6), *STEP, Preempt(0, swap=True), host_blocks=3)
    cache.do(Resume(0))
    assert cache.said(
        BlocksAllocated(0, 0, 0, [2, 3]),
        TransferStarted(1, "swap_in", 0, [0, 1], [2, 3], request=0),
        TransferEnded(1, "completed"),
        RequestResumed(0, 6),
    )
    assert dict(cache.view.index(0)) == {cache.key(0, 0): (1,)}


@pytest.mark.parametrize(("slots", "rows"), [(0, 3), (1, 2), (6, 2), (9, 3), (16, 4)])
def test_a_swapped_request_gets_no_fewer_slots_than_were_swapped_out(slots: int, rows: int) -> None:
    cache = Cache(prompt(6), *STEP, Grow(0, 6), Preempt(0, swap=True), host_blocks=3)
    outcome = cache.do(Resume(0, slots))
    assert outcome == Outcome("done", None, 0, cached_tokens=6, transfers=(1,))
    assert cache.view.standing(0) == ("running", 12, 6, (rows,))


def test_a_request_without_a_computed_token_needs_no_host_block() -> None:
    cache = Cache(prompt(6))
    assert cache.do(Preempt(0, swap=True)) == Outcome("done", None, 0)
    assert cache.said(BlocksReleased(0, 0, [2, 1]), RequestPreempted(0))
    assert cache.view.standing(0) == ("swapped", 6, 0, (0,))
    assert cache.do(Resume(0)) == Outcome("done", None, 0)
    assert cache.view.standing(0) == ("running", 6, 0, (2,))


def test_an_aborted_swapped_request_leaves_no_host_block() -> None:
    cache = Cache(prompt(6), *STEP, Preempt(0, swap=True), host_blocks=2)
    assert cache.do(Abort(0)) == Outcome("done", None, 0)
    assert cache.said(SlotsReleased("host", 0, 0, [0, 1]), RequestAborted(0))
    assert cache.engine.host_free(0) == 2
    assert list(cache.view.requests()) == []


def test_swapped_and_preempted_requests_are_resumed_by_their_rank() -> None:
    cache = Cache(prompt(2), *STEP, prompt(2, 1), *STEP, host_blocks=2)
    cache.do(Preempt(1), Preempt(0, swap=True))
    assert cache.do(Resume(0)) == Outcome("done", None, 0, cached_tokens=2, transfers=(1,))
    assert cache.do(Resume(0)) == Outcome("done", None, 1)


def test_host_blocks_are_used_again() -> None:
    cache = Cache(prompt(6), *STEP, host_blocks=2)
    for _ in range(3):
        cache.do(Preempt(0, swap=True))
        assert cache.engine.host_free(0) == 0
        cache.do(Resume(0))
        assert cache.engine.host_free(0) == 2
    cache.do(Preempt(0, swap=True), Resume(0), Preempt(0))
    assert cache.view.standing(0) == ("preempted", 6, 0, (0,))


def test_a_shared_block_may_be_swapped_out_by_one_of_its_owners() -> None:
    cache = Cache(prompt(6), *STEP, Fork(0), host_blocks=2)
    cache.do(Preempt(1, swap=True))
    assert list(cache.view.ref_counts(0))[:3] == [0, 1, 1]
    cache.do(Resume(0), Grow(0), Grow(1))
    assert cache.view.table(0, 0) == [1, 2]
    assert cache.view.table(1, 0) == [3, 4]


# -- steps -----------------------------------------------------------------------------------------


def test_a_budget_computes_a_prompt_in_chunks_oldest_first() -> None:
    cache = Cache(prompt(6), prompt(3, 1), run_ahead=3)
    chunks = []
    for budget in (4, 4, 4):
        cache.do(Launch(budget))
        (event,) = cache.events
        assert isinstance(event, StepLaunched)
        chunks.append([(item.request, item.start, item.end) for item in event.items])
    assert chunks == [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)], [(1, 2, 3)]]
    cache.do(Retire())
    assert cache.view.standing(0)[2] == 4
    cache.do(Retire())
    assert (cache.view.standing(0)[2], cache.view.standing(1)[2]) == (6, 2)


def test_a_step_may_be_launched_for_a_request_that_is_in_flight() -> None:
    cache = Cache(prompt(6), Launch(), Grow(0), Launch())
    assert cache.said(StepLaunched(1, [StepItem(0, 0, 6, 7, ([1, 2],))]))
    cache.do(Retire())
    assert cache.view.standing(0)[2] == 6
    cache.do(Retire())
    assert cache.view.standing(0)[2] == 7


@pytest.mark.parametrize(
    ("end", "said"), [(Finish(0), RequestFinished(0)), (Preempt(0), RequestPreempted(0))]
)
def test_blocks_in_flight_are_fenced_until_the_last_step_retires(
    end: Operation, said: Event
) -> None:
    cache = Cache(prompt(8), Launch(4), Launch(), end)
    assert cache.said(ReleaseFenced(0, 1), said)
    assert cache.view.free_count(0) == 6
    cache.do(Retire())
    assert cache.said(StepRetired(0)), "the later step still uses them; its result is void"
    assert cache.view.free_count(0) == 6
    cache.do(Retire())
    assert cache.said(StepRetired(1), BlocksReleased(0, 0, [2, 1], 1))
    assert cache.view.free_count(0) == 8
    assert not cache.view.index(0)


def test_a_late_result_does_not_reach_a_preempted_request() -> None:
    cache = Cache(prompt(6), Launch(), Preempt(0), Retire())
    assert cache.view.standing(0) == ("preempted", 6, 0, (0,))


def test_a_late_result_does_not_reach_a_resumed_request() -> None:
    cache = Cache(prompt(6), Launch(), Preempt(0), Resume(0))
    assert cache.view.table(0, 0) == [3, 4], "its old blocks are fenced"
    cache.do(Retire())
    assert cache.said(StepRetired(0), BlocksReleased(0, 0, [2, 1], 0))
    assert cache.view.standing(0) == ("running", 6, 0, (2,))
    assert cache.do(*STEP) == Outcome("done", count=1)
    assert cache.view.standing(0)[2] == 6


# -- refusals --------------------------------------------------------------------------------------


def snapshot(value: Any) -> Any:
    """Everything that an object holds, except the block keys that requests remember."""
    if value is None or isinstance(value, int | str | bytes | type):
        return value
    if isinstance(value, dict):
        return [(snapshot(key), snapshot(item)) for key, item in value.items()]
    if hasattr(value, "__iter__") or isinstance(value, deque):
        return [snapshot(item) for item in value]
    names = getattr(value, "__dict__", None) or type(value).__slots__
    return type(value).__name__, [
        (name, snapshot(getattr(value, name)))
        for name in names
        if not (isinstance(value, Request) and name == "keys")
    ]


CACHED = [prompt(8), *STEP, Finish(0)]
# What leads there, the refused operation, why, and a configuration in which it is done.
REFUSALS: dict[str, tuple[list[Operation], Operation, str, dict[str, int]]] = {
    "admit": ([prompt(5)], prompt(13, 1), NO_FREE_BLOCKS, {"blocks": 6}),
    "admit in use": ([prompt(12), *STEP, prompt(4, 1)], prompt(20), NO_FREE_BLOCKS, {"blocks": 6}),
    "admit free hits": ([*CACHED, prompt(9, 1)], prompt(12), NO_FREE_BLOCKS, {"blocks": 6}),
    "admit ever": ([], prompt(21), LARGER_THAN_POOL, {"blocks": 6}),
    "admit more": ([prompt(1)] * 3, prompt(1), TOO_MANY_REQUESTS, {"requests": 4}),
    "grow": ([prompt(12), prompt(5, 1)], Grow(0), NO_FREE_BLOCKS, {"blocks": 6}),
    "grow far": ([prompt(12), prompt(5, 1)], Grow(1, 4), NO_FREE_BLOCKS, {"blocks": 6}),
    "copy": ([prompt(18), *STEP, Fork(0)], Grow(0), NO_FREE_BLOCKS, {"blocks": 6}),
    "copy and grow": ([prompt(14), *STEP, Fork(0)], Grow(0, 3), NO_FREE_BLOCKS, {"blocks": 6}),
    "fork": ([prompt(1), *STEP, prompt(1)], Fork(0, 2), TOO_MANY_REQUESTS, {"requests": 4}),
    "resume": ([prompt(9), Preempt(0), prompt(9, 1)], Resume(0), NO_FREE_BLOCKS, {"blocks": 6}),
    "resume more": (
        [prompt(1), Preempt(0), *[prompt(1, 1)] * 3],
        Resume(0),
        TOO_MANY_REQUESTS,
        {"requests": 4},
    ),
    "launch more": (
        [prompt(1), Launch(), Grow(0), Launch(), Grow(0)],
        Launch(),
        RUN_AHEAD_LIMIT,
        {"run_ahead": 3},
    ),
    "launch items more": (
        [prompt(9), Launch(1), Launch(1)],
        Launch(items=((0, 1),)),
        RUN_AHEAD_LIMIT,
        {"run_ahead": 3},
    ),
    "admit slots": ([prompt(5)], prompt(3, 1, slots=13), NO_FREE_BLOCKS, {"blocks": 6}),
    "admit slots in part": ([prompt(17)], prompt(9, 1, slots=1), NO_FREE_BLOCKS, {"blocks": 6}),
    "admit slots ever": ([], prompt(3, slots=21), LARGER_THAN_POOL, {"blocks": 6}),
    "reserve": ([prompt(5)], Reserve(0, 21), NO_FREE_BLOCKS, {"blocks": 6}),
    "reserve by one": (
        [prompt(9, slots=1), prompt(16, 1)],
        Reserve(0, 5),
        NO_FREE_BLOCKS,
        {"blocks": 6},
    ),
    "grow to slots": ([prompt(9, slots=4), prompt(9, 1)], Grow(0), NO_FREE_BLOCKS, {"blocks": 6}),
    "decode": (
        [prompt(4), prompt(4, 1), prompt(8, 2)],
        Decode((0, 1)),
        NO_FREE_BLOCKS,
        {"blocks": 6},
    ),
    "decode copies": (
        [prompt(14), *STEP, Fork(0), prompt(1, 1)],
        Decode((0, 1)),
        NO_FREE_BLOCKS,
        {"blocks": 7},
    ),
    "decode at last": ([prompt(16), prompt(1, 1)], Decode((1, 0)), NO_FREE_BLOCKS, {"blocks": 6}),
    "swap out": (
        [prompt(9), *STEP],
        Preempt(0, swap=True),
        NO_HOST_BLOCKS,
        {"host_blocks": 3},
    ),
    "swap out beside another": (
        [prompt(5), *STEP, prompt(4, 1), *STEP, Preempt(1, swap=True)],
        Preempt(0, swap=True),
        NO_HOST_BLOCKS,
        {"host_blocks": 3},
    ),
    "swap in": (
        [prompt(8), *STEP, Grow(0), Preempt(0, swap=True), prompt(9, 1)],
        Resume(0),
        NO_FREE_BLOCKS,
        {"blocks": 6},
    ),
    "swap in ever": (
        [prompt(8), *STEP, Preempt(0, swap=True)],
        Resume(0, slots=21),
        LARGER_THAN_POOL,
        {"blocks": 6},
    ),
    "resume slots": (
        [prompt(9), Preempt(0), prompt(9, 1)],
        Resume(0, slots=12),
        NO_FREE_BLOCKS,
        {"blocks": 6},
    ),
    "swap in more": (
        [prompt(1), *STEP, Preempt(0, swap=True), *[prompt(1, 1)] * 3],
        Resume(0),
        TOO_MANY_REQUESTS,
        {"requests": 4},
    ),
}


@pytest.mark.parametrize(
    ("before", "operation", "reason", "enough"), REFUSALS.values(), ids=REFUSALS
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    before: list[Operation], operation: Operation, reason: str, enough: dict[str, int]
) -> None:
    tight = {"blocks": 5, "requests": 3, "run_ahead": 2, "host_blocks": 2}
    cache = Cache(*before, **tight)
    was = snapshot(cache.engine)
    outcome = cache.do(operation)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("refused", reason)
    assert cache.said()
    assert snapshot(cache.engine) == was
    roomy = Cache(*before, **{**tight, **enough})
    was = snapshot(roomy.engine)
    assert roomy.do(operation).status == "done"  # type: ignore[union-attr]
    assert snapshot(roomy.engine) != was


@pytest.mark.parametrize(
    ("before", "operation", "reason", "cure"),
    [
        ([prompt(1)], Fork(0), NOT_COMPUTED, STEP),
        ([prompt(1), Launch()], Fork(0), NOT_COMPUTED, [Retire()]),
        ([prompt(1), *STEP], Launch(), NOTHING_TO_RUN, [Grow(0)]),
        ([], Launch(), NOTHING_TO_RUN, [prompt(1)]),
        ([prompt(1), Preempt(0)], Launch(), NOTHING_TO_RUN, [Resume(0)]),
        ([prompt(1)], Reset(), BLOCKS_IN_USE, [Finish(0)]),
        ([prompt(1), Launch(), Finish(0)], Reset(), BLOCKS_IN_USE, [Retire()]),
        ([prompt(1), Launch()], Preempt(0, swap=True), IN_FLIGHT, [Retire()]),
        ([prompt(9, slots=4), *STEP], Launch(), NOTHING_TO_RUN, [Reserve(0, 5)]),
        ([prompt(9, slots=4), *STEP], Launch(items=((0, 1),)), NOTHING_TO_RUN, [Reserve(0, 5)]),
        (
            [prompt(1), prompt(1, 1), *STEP, Grow(0)],
            Launch(items=((1, 1),)),
            NOTHING_TO_RUN,
            [Grow(1)],
        ),
        ([], Launch(items=((0, 1),)), NOTHING_TO_RUN, [prompt(1)]),
    ],
)
def test_what_comes_too_early_is_refused_and_changes_nothing(
    before: list[Operation], operation: Operation, reason: str, cure: list[Operation]
) -> None:
    cache = Cache(*before, host_blocks=1)
    was = snapshot(cache.engine)
    outcome = cache.do(operation)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("refused", reason)
    assert cache.said()
    assert snapshot(cache.engine) == was
    assert cache.do(*cure, operation).status == "done"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "operation",
    [
        Grow(0),
        Decode((0, 1)),
        Reserve(0, 9),
        Finish(0),
        Abort(0),
        Fork(0),
        Preempt(0),
        Preempt(0, swap=True),
        Resume(0),
        Resume(0, slots=9),
        Retire(),
    ],
)
def test_an_operation_without_a_candidate_is_skipped(operation: Operation) -> None:
    cache = Cache()
    was = snapshot(cache.engine)
    assert cache.do(operation) == Outcome("skipped")
    assert cache.said()
    assert snapshot(cache.engine) == was
