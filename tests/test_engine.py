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
    StepItem,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Operation,
    Preempt,
    Reset,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    LARGER_THAN_POOL,
    NO_FREE_BLOCKS,
    NOT_COMPUTED,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    TOO_MANY_REQUESTS,
    Outcome,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject

STEP = (Launch(), Retire())


def prompt(length: int, source: int = 0) -> Admit:
    return Admit((Segment(source, length),))


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
}


@pytest.mark.parametrize(
    ("before", "operation", "reason", "enough"), REFUSALS.values(), ids=REFUSALS
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    before: list[Operation], operation: Operation, reason: str, enough: dict[str, int]
) -> None:
    tight = {"blocks": 5, "requests": 3, "run_ahead": 2}
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
    ],
)
def test_what_comes_too_early_is_refused_and_changes_nothing(
    before: list[Operation], operation: Operation, reason: str, cure: list[Operation]
) -> None:
    cache = Cache(*before)
    was = snapshot(cache.engine)
    outcome = cache.do(operation)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("refused", reason)
    assert cache.said()
    assert snapshot(cache.engine) == was
    assert cache.do(*cure, operation).status == "done"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "operation", [Grow(0), Finish(0), Abort(0), Fork(0), Preempt(0), Resume(0), Retire()]
)
def test_an_operation_without_a_candidate_is_skipped(operation: Operation) -> None:
    cache = Cache()
    was = snapshot(cache.engine)
    assert cache.do(operation) == Outcome("skipped")
    assert cache.said()
    assert snapshot(cache.engine) == was
