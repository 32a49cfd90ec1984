"""The engine's prefix cache: what is hit, what is kept apart, what is evicted, several groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.engine.eviction import EvictionPolicy, LeastRecentlyUsed
from kvproof.engine.metrics import REQUEST_METRICS, SCHEDULER_METRICS
from kvproof.fuzz.faults import fault_by_id
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.events import (
    BlocksAllocated,
    BlocksEvicted,
    BlocksPublished,
    BlocksReused,
    Event,
    StepLaunched,
    StepRetired,
)
from kvproof.invariants.operations import (
    Admit,
    Evict,
    Finish,
    Fork,
    Grow,
    Launch,
    Media,
    Operation,
    Preempt,
    Resume,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import NO_FREE_BLOCKS, NO_HOST_BLOCKS, Outcome
from kvproof.invariants.prompts import prompt_tokens
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject

STEP = (Launch(), Retire())
ABLE = EngineSubject.capabilities | EngineSubject(Configuration()).semantics.features()


def prompt(length: int, source: int = 0, **domain: Any) -> Admit:
    return Admit((Segment(source, length),), **domain)


class Cache:
    """An engine that is told operations; keeps the outcome and events of the last one."""

    def __init__(
        self,
        *operations: Operation,
        blocks: int = 8,
        block_size: int = 4,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        **arguments: Any,
    ) -> None:
        configuration = Configuration(
            blocks, block_size, prefix_caching=prefix_caching, host_blocks=host_blocks
        )
        self.subject = EngineSubject(configuration, **arguments)
        self.engine = self.subject.engine
        self.view = self.subject.view()
        self.events: list[Event] = []
        self.do(*operations)

    def do(self, *operations: Operation) -> Outcome:
        outcome = Outcome("skipped")
        for operation in operations:
            outcome = self.subject.apply(operation)
            self.events = list(self.subject.drain_events())
        return outcome

    def event(self, kind: type[Event]) -> Any:
        (found,) = (event for event in self.events if isinstance(event, kind))
        return found

    def compute(self, *admissions: Admit) -> Cache:
        """Admit, compute and finish each, one after the other."""
        for admission in admissions:
            self.do(admission, *STEP, Finish(0))
        return self

    def table(self, request: int) -> list[int]:
        return list(self.view.table(request, 0))


# -- hits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_a_hit_covers_the_full_blocks_below_the_last_token(size: int, rows: int, edge: int) -> None:
    length = rows * size + edge
    if length < 1:
        return
    cache = Cache(blocks=16, block_size=size).compute(prompt(length))
    assert cache.do(prompt(length)).cached_tokens == (length - 1) // size * size
    assert cache.do(prompt(length + size)).cached_tokens == length // size * size


def test_a_hit_reuses_the_very_blocks() -> None:
    cache = Cache().compute(prompt(10))
    outcome = cache.do(prompt(11))
    assert outcome.cached_tokens == 8
    assert list(cache.event(BlocksReused).blocks) == [1, 2]
    assert cache.event(BlocksReused).row == 0
    assert cache.event(BlocksAllocated).row == 2
    assert cache.view.standing(1) == ("running", 11, 8, (3,))


def test_a_step_computes_only_what_was_not_hit() -> None:
    cache = Cache().compute(prompt(10))
    assert cache.do(prompt(11), Launch()).count == 3
    (item,) = cache.event(StepLaunched).items
    assert (item.start, item.end) == (8, 11)
    assert list(item.tables[0]) == [1, 2, 3]


def test_a_hit_shares_with_a_running_request() -> None:
    cache = Cache(prompt(8), *STEP)
    assert cache.do(prompt(9)).cached_tokens == 8
    assert cache.table(1)[:2] == cache.table(0)
    assert [cache.view.ref_counts(0)[block] for block in cache.table(0)] == [2, 2]


def test_a_hit_ends_where_prefixes_part() -> None:
    cache = Cache().compute(prompt(12))
    assert cache.do(Admit((Segment(0, 8), Segment(1, 9)))).cached_tokens == 8
    assert cache.do(Admit((Segment(0, 7), Segment(1, 9)))).cached_tokens == 4
    assert cache.do(prompt(12, 1)).cached_tokens == 0


def test_a_hit_needs_every_block_from_the_first_on() -> None:
    """The second block is still there, but without the first it is no prefix."""
    cache = Cache(eviction=MostRecentlyUsed).compute(prompt(8))
    assert cache.do(Evict(1)) == Outcome("done", count=1)
    assert len(cache.view.index(0)) == 1
    assert cache.do(prompt(9)).cached_tokens == 0


def test_nothing_is_hit_before_it_is_computed() -> None:
    cache = Cache(prompt(8), Launch())
    assert cache.do(prompt(9)).cached_tokens == 0
    cache.do(Retire())
    assert cache.do(prompt(10)).cached_tokens == 8


def test_what_was_grown_is_hit_too() -> None:
    cache = Cache(prompt(6), *STEP, Grow(0, 2), *STEP, Preempt(0))
    assert cache.do(Resume(0)).cached_tokens == 4, "below the last token"
    cache.do(Grow(0), Preempt(0))
    assert cache.do(Resume(0)).cached_tokens == 8


def test_a_duplicate_of_a_findable_block_stays_private() -> None:
    cache = Cache(prompt(8), prompt(8), *STEP)
    assert cache.event(BlocksPublished).request == 0
    assert list(cache.view.index(0).values()) == [(1,), (2,)]
    cache.do(Finish(1))
    assert cache.view.free_count(0) == 6
    assert list(cache.view.free_blocks(0))[:2] == [3, 4], "empty-free: nothing findable in them"


def test_without_prefix_caching_nothing_is_published_or_hit() -> None:
    cache = Cache(prefix_caching=False)
    cache.do(prompt(8), *STEP)
    assert [type(event) for event in cache.events] == [StepRetired]
    cache.do(Finish(0))
    assert cache.do(prompt(9)).cached_tokens == 0
    assert not cache.view.index(0)


IMAGE = (Media(1, 1, 2),)


@pytest.mark.parametrize(
    ("domain", "hit"),
    [
        ({}, False),
        ({"salt": 1, "media": IMAGE}, False),
        ({"salt": 7, "adapter": 2, "media": IMAGE}, False),
        ({"salt": 7, "media": (Media(2, 1, 2),)}, False),
        ({"salt": 7, "media": (Media(1 + (1 << 16), 1, 2),)}, False),
        ({"salt": 7, "media": (Media(1, 2, 1),)}, False),
        ({"salt": 7}, False),
        ({"adapter": 7, "media": IMAGE}, False),
        ({"salt": 7, "media": IMAGE}, True),
        ({"salt": 7, "media": (*IMAGE, Media(1, 99, 2))}, True),
    ],
)
def test_salt_adapter_and_media_keep_prefixes_apart(domain: dict[str, Any], hit: bool) -> None:
    cache = Cache().compute(prompt(9, salt=7, media=IMAGE))
    assert cache.do(prompt(9, **domain)).cached_tokens == (8 if hit else 0)


def test_media_leave_the_blocks_before_them_shared() -> None:
    cache = Cache().compute(prompt(13, media=(Media(1, 5, 2),)))
    assert cache.do(prompt(13, media=(Media(2, 5, 2),))).cached_tokens == 4
    assert cache.do(prompt(13, media=(Media(1, 9, 2),))).cached_tokens == 4


def test_the_order_in_which_media_are_listed_does_not_matter() -> None:
    one, other = Media(1, 0, 1), Media(2, 2, 1)
    cache = Cache().compute(prompt(9, media=(one, other)))
    assert cache.do(prompt(9, media=(other, one))).cached_tokens == 8


# -- eviction --------------------------------------------------------------------------------------


def test_cached_blocks_stay_findable_until_no_empty_block_is_left() -> None:
    cache = Cache(blocks=5).compute(prompt(8))
    cache.do(prompt(12, 1))
    assert not [event for event in cache.events if isinstance(event, BlocksEvicted)]
    assert len(cache.view.index(0)) == 2
    cache.do(prompt(1, 2))
    assert list(cache.event(BlocksEvicted).blocks) == [2]
    assert cache.event(BlocksEvicted).cause == "pressure"
    assert list(cache.event(BlocksAllocated).blocks) == [2]
    assert [type(event) for event in cache.events][:2] == [BlocksEvicted, BlocksAllocated]
    assert list(cache.view.index(0).values()) == [(1,)]


def test_the_least_recently_used_block_goes_first_and_a_hit_makes_recent() -> None:
    cache = Cache().compute(prompt(5, 0), prompt(5, 1), prompt(5, 2))
    cache.compute(prompt(6, 0))
    cache.do(Evict(1))
    assert cache.do(prompt(6, 1)).cached_tokens == 0
    assert cache.do(prompt(6, 2)).cached_tokens == 4
    assert cache.do(prompt(6, 0)).cached_tokens == 4


def test_a_prefix_outlives_its_extension() -> None:
    cache = Cache().compute(prompt(12))
    cache.do(Evict(2))
    assert cache.do(prompt(12)).cached_tokens == 4


def test_an_evicted_block_is_an_empty_one_again() -> None:
    cache = Cache().compute(prompt(8))
    cache.do(Evict(9), prompt(3, 1))
    (block,) = cache.table(1)
    assert block in (1, 2)
    cache.do(Finish(0))
    assert cache.view.free_blocks(0)[0] == block, "with nothing findable in it, it is used first"
    cache.do(prompt(4, 2), *STEP)
    assert cache.table(2) == [block]
    assert list(cache.view.index(0).values()) == [(block,)]


def test_a_hit_is_not_evicted_by_the_admission_that_hits_it() -> None:
    """Two cached blocks, one empty: the hit takes the first, so the other two are there to take."""
    cache = Cache(blocks=3).compute(prompt(8))
    assert cache.do(prompt(7)).cached_tokens == 4
    assert cache.table(1) == [1, 3]
    assert cache.do(prompt(4, 1)).status == "done"
    assert cache.do(prompt(1, 2)) == Outcome("refused", NO_FREE_BLOCKS)


def test_the_null_block_is_never_handed_out() -> None:
    cache = Cache(blocks=4, block_size=1)
    for source in range(20):
        cache.compute(prompt(4, source))
        assert sorted(cache.view.free_blocks(0)) == [1, 2, 3, 4]
    assert cache.do(prompt(4, 99)).status == "done"
    assert sorted(cache.table(20)) == [1, 2, 3, 4]
    assert cache.do(prompt(1, 98)).reason == NO_FREE_BLOCKS
    assert cache.view.ref_counts(0)[0] == 0


class MostRecentlyUsed(EvictionPolicy):
    """What is evicted is what was used last: a policy of one's own."""

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        self._blocks[entry] = None

    def remove(self, entry: int) -> None:
        del self._blocks[entry]

    def victim(self) -> int:
        return next(reversed(self._blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return reversed(self._blocks)


def test_an_eviction_policy_is_a_plug_in() -> None:
    sources = [prompt(5, source) for source in range(3)]
    for policy, victim in ((LeastRecentlyUsed, 0), (MostRecentlyUsed, 2)):
        cache = Cache(eviction=policy).compute(*sources)
        cache.do(Evict(1))
        hits = [cache.do(prompt(6, source)).cached_tokens for source in range(3)]
        assert hits == [0 if source == victim else 4 for source in range(3)]


def _violations(subject: EngineSubject, operations: Sequence[Operation]) -> set[str]:
    return {violation.property for violation in Harness(subject).run(operations)}


def test_another_policy_passes_all_checks_but_not_as_lru() -> None:
    promised: set[str] = set()
    for number in range(40):
        draw = draw_run(f"mru/{number}", ABLE)
        subject = EngineSubject(draw.configuration, eviction=MostRecentlyUsed)
        assert subject.semantics.eviction_order == "any"
        assert _violations(subject, draw.operations) == set()
        subject = EngineSubject(draw.configuration, eviction=MostRecentlyUsed)
        subject.semantics = replace(subject.semantics, eviction_order="lru")
        promised |= _violations(subject, draw.operations)
    assert promised == {"ORDER"}


# -- figures ---------------------------------------------------------------------------------------


def test_the_scheduler_figures() -> None:
    cache = Cache(prompt(9), *STEP, prompt(9), Launch(), Fork(0), Preempt(1), Grow(0, 3), blocks=6)
    figures = cache.view.metrics()
    assert tuple(figures) == SCHEDULER_METRICS
    block_bytes = 4 * 131_072
    below = SCHEDULER_METRICS[SCHEDULER_METRICS.index("batch_size_by_iteration") + 1 :]
    assert figures == {
        "kv_capacity_bytes": 6 * block_bytes,
        "kv_bytes_used": 5 * block_bytes,
        "kv_blocks_total": 6,
        "kv_blocks_free": 1,
        "live_cached_tokens": 18,  # the shared ones of request 0 and of its fork, once for each
        "active_sequences": 2,
        "waiting_sequences": 1,
        "admissions": 2,
        "preemptions": 1,
        "evictions": 0,
        "prefix_cache_hits": 8,
        "prefix_cache_queries": 18,
        "host_offload_bytes": 0,
        "host_promotions": 0,
        "iterations": 2,
        "batch_size_by_iteration": 1,
        **dict.fromkeys(below, 0),
    }
    cache.do(Retire(), Finish(0), Finish(0), Resume(0), Preempt(0), Evict(1))
    figures = cache.view.metrics()
    assert (figures["prefix_cache_hits"], figures["prefix_cache_queries"]) == (8, 18)
    assert (figures["preemptions"], figures["admissions"], figures["evictions"]) == (2, 2, 1)
    assert (figures["kv_blocks_free"], figures["kv_bytes_used"]) == (6, 0)
    cache.do(Evict(99))
    assert cache.view.metrics()["evictions"] == 1 + len(cache.event(BlocksEvicted).blocks)


def test_the_figures_of_swapping() -> None:
    cache = Cache(prompt(9), *STEP, Preempt(0, swap=True), blocks=6, host_blocks=4)
    figures = cache.view.metrics()
    assert figures["host_offload_bytes"] == 3 * 4 * 131_072
    assert (figures["host_promotions"], figures["waiting_sequences"]) == (0, 1)
    cache.do(Resume(0))
    figures = cache.view.metrics()
    assert (figures["host_promotions"], figures["preemptions"]) == (3, 1)
    assert figures["prefix_cache_hits"] == 0, "what comes back from the host is no prefix hit"
    cache.do(Preempt(0, swap=True), Preempt(0, swap=True))
    assert cache.view.metrics()["host_offload_bytes"] == 6 * 4 * 131_072


def test_the_figures_of_a_request() -> None:
    cache = Cache(prompt(9), *STEP, prompt(9), Grow(1, 4))
    assert tuple(cache.view.request_metrics(1)) == REQUEST_METRICS
    expected = {"input_tokens": 9, "cached_tokens": 8, "allocated_blocks": 4, "preemptions": 0}
    assert cache.view.request_metrics(1) == expected
    cache.do(Preempt(1))
    assert cache.view.request_metrics(1) == {**expected, "allocated_blocks": 0, "preemptions": 1}
    cache.do(Resume(0))
    assert cache.view.request_metrics(1) == {**expected, "preemptions": 1}


# -- several groups --------------------------------------------------------------------------------

TWO_GROUPS: Any = partial(Engine, groups=2)


def _free(engine: Engine) -> list[int]:
    return [pool.free_count for pool in engine.pools]


def test_each_group_has_a_table_of_its_own() -> None:
    engine = Engine(Configuration(blocks=4, block_size=4), groups=2)
    engine.pools[1].take(1)
    engine.admit(prompt_tokens((Segment(0, 8),)))
    assert engine.requests[0].tables == [[1, 2], [2, 3]]
    engine.grow(engine.requests[0], [7])
    assert engine.requests[0].tables == [[1, 2, 3], [2, 3, 4]]
    assert _free(engine) == [1, 0]


def test_groups_allocate_all_or_nothing() -> None:
    engine = Engine(Configuration(blocks=4, block_size=4), groups=2)
    engine.admit(prompt_tokens((Segment(0, 4),)))
    engine.pools[1].take(2)
    before, events = _free(engine), len(engine.events)
    assert engine.admit(prompt_tokens((Segment(1, 8),))).reason == NO_FREE_BLOCKS
    assert engine.grow(engine.requests[0], [1] * 5).reason == NO_FREE_BLOCKS
    assert (_free(engine), len(engine.events)) == (before, events)
    assert engine.grow(engine.requests[0], [1] * 4).status == "done"
    assert _free(engine) == [2, 0]


def test_groups_decode_and_reserve_all_or_nothing() -> None:
    engine = Engine(Configuration(blocks=4, block_size=4), groups=2)
    engine.admit(prompt_tokens((Segment(0, 4),)))
    engine.admit(prompt_tokens((Segment(1, 4),)))
    engine.pools[1].take(1)
    requests = [engine.requests[0], engine.requests[1]]
    before, events = _free(engine), len(engine.events)
    assert engine.decode(requests, [7, 7]).reason == NO_FREE_BLOCKS
    assert engine.reserve(requests[0], 12).reason == NO_FREE_BLOCKS
    assert (_free(engine), len(engine.events)) == (before, events)
    assert engine.decode(requests[:1], [7]).status == "done"
    assert engine.requests[0].tables == [[1, 3], [1, 4]]
    assert engine.reserve(requests[0], 8).count == 0
    assert _free(engine) == [1, 0]


def test_groups_are_swapped_out_and_in_together() -> None:
    engine = Engine(Configuration(blocks=4, block_size=4, host_blocks=3), groups=2)
    engine.admit(prompt_tokens((Segment(0, 8),)))
    engine.launch()
    engine.retire()
    hierarchy = engine.hierarchy
    assert hierarchy is not None
    taken = hierarchy.host[1].take(2)
    request = engine.requests[0]
    assert engine.swap_out(request).reason == NO_HOST_BLOCKS
    assert [engine.host_free(group) for group in range(2)] == [3, 1]
    hierarchy.host[1].unpin(taken[:1], used=False)
    assert engine.swap_out(request).transfers == (0, 1)
    assert request.host_tables == [[0, 1], [0, 2]]
    engine.pools[1].take(3)
    assert engine.resume(request).reason == NO_FREE_BLOCKS
    engine.pools[1].release([1, 2, 3])
    assert engine.resume(request).status == "done"
    assert [len(table) for table in request.tables] == [2, 2]
    assert [engine.host_free(group) for group in range(2)] == [3, 2]


def test_groups_agree_on_the_shortest_hit_and_have_keys_of_their_own() -> None:
    cache = Cache(engine=TWO_GROUPS).compute(prompt(12))
    engine = cache.engine
    assert not set(engine.pools[0].index) & set(engine.pools[1].index)
    engine.pools[1].evict(2, "request")
    assert cache.do(prompt(13)).cached_tokens == 4
    assert [len(table) for table in engine.requests[1].tables] == [4, 4]
    assert [pool.ref_counts.count(1) for pool in engine.pools] == [4, 4]


def _two_groups(configuration: Configuration) -> EngineSubject:
    subject = EngineSubject(configuration, engine=TWO_GROUPS)
    subject.semantics = replace(subject.semantics, groups=2)
    return subject


def test_two_groups_pass_all_checks_and_a_fault_in_them_does_not() -> None:
    def run(number: int) -> list[Violation]:
        draw = draw_run(f"groups/{number}", ABLE)
        return list(Harness(_two_groups(draw.configuration)).run(draw.operations))

    assert not any(run(number) for number in range(40))
    with fault_by_id("release-keeps-last-block").installed():
        assert any(run(number) for number in range(5))
