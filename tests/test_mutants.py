"""What mutants of the engine survived before: each test here kills some (see docs/mutation.md).

Those of the checks: ``test_check_mutants.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from kvproof.engine.engine import Engine
from kvproof.engine.eviction import AdaptiveReplacement, EvictionPolicy, LeastRecentlyUsed
from kvproof.engine.keys import media_part
from kvproof.engine.pool import BlockPool, PoolExhaustedError
from kvproof.engine.tiers.hierarchy import Hierarchy
from kvproof.engine.tiers.memory import NOBODYS, unfinished
from kvproof.engine.tiers.pool import TierPool
from kvproof.invariants.events import BlocksEvicted, Event, SlotsEvicted
from kvproof.invariants.operations import (
    Abort,
    Admit,
    AnyOperation,
    Cancel,
    Complete,
    Corrupt,
    Evict,
    Fail,
    Finish,
    Fork,
    Grow,
    Land,
    Launch,
    Media,
    Offload,
    Preempt,
    Promote,
    Reset,
    Resume,
    Retire,
    Segment,
    Tier,
    Withhold,
)
from kvproof.invariants.outcomes import (
    NO_DISK_BLOCKS,
    NO_HOST_BLOCKS,
    NOTHING_TO_MOVE,
    OFFLOAD_OFF,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject

Events = list[Event]

TWO_CACHED = (Admit((Segment(0, 8),)), Launch(), Retire(), Finish(0))
"""Blocks of four tokens, and there are two."""


def key(number: int) -> bytes:
    return bytes([number])


def engine_after(*operations: AnyOperation) -> tuple[Engine, list[str]]:
    """The engine, and why it evicted what it did."""
    subject = EngineSubject(Configuration(blocks=2))
    causes: list[str] = []
    for operation in operations:
        assert subject.apply(operation).status == "done"
        events = subject.drain_events()
        causes += [event.cause for event in events if isinstance(event, BlocksEvicted)]
    return subject.engine, causes


@pytest.mark.parametrize(
    ("operation", "cause"),
    [(Admit((Segment(1, 4),)), "pressure"), (Evict(), "request"), (Reset(), "reset")],
)
def test_an_eviction_says_why(operation: AnyOperation, cause: str) -> None:
    assert engine_after(*TWO_CACHED, operation)[1] == [cause]


def test_the_next_victim_comes_first() -> None:
    pool = engine_after(*TWO_CACHED)[0].pools[0]
    expected = list(pool.victims())
    assert sorted(expected) == [1, 2]
    victims = [pool.take(1)[0] for _ in expected]
    assert victims == expected
    assert list(pool.victims()) == []


def test_blocks_with_one_holder_are_counted() -> None:
    pool = BlockPool(3, 0, LeastRecentlyUsed(3), [])
    blocks = pool.take(2)
    pool.share(blocks[:1])
    assert pool.count_sole([*blocks, 3]) == 1


def cached(blocks: int, order: type[EvictionPolicy] = LeastRecentlyUsed) -> BlockPool:
    """A pool of so many blocks, all cached: block 1, under key 1, was let go first."""
    pool = BlockPool(blocks, 0, order(blocks), [])
    for block in pool.take(blocks):
        assert pool.publish(block, key(block))
        pool.release([block])
    return pool


def test_every_change_of_a_pool_makes_it_a_later_generation() -> None:
    pool = cached(3)
    seen = [pool.generation]
    for _ in range(2):
        changes = (
            lambda: pool.share([3]),
            lambda: pool.release([3]),
            lambda: pool.evict(1, "request"),
            lambda: pool.publish(pool.take(1)[0], key(90 + len(seen))),
        )
        for change in changes:
            change()
            seen.append(pool.generation)
    assert seen == sorted(set(seen))


def test_a_second_block_with_the_same_content_is_not_findable() -> None:
    pool = cached(2)
    assert not pool.publish(pool.take(1)[0], key(2))


def test_protected_blocks_are_room_for_nothing() -> None:
    pool = cached(2)
    assert pool.take(1, protect=[1]) == [2]
    with pytest.raises(PoolExhaustedError, match="1 blocks wanted, 0 free"):
        pool.take(1, protect=[1])


def test_no_more_is_found_than_is_asked_for() -> None:
    assert cached(3).match([b"root", key(1), key(2), key(3)], 2) == [1, 2]


def test_another_content_in_the_block_of_a_ghost_is_new() -> None:
    pool = cached(2, AdaptiveReplacement)
    pool.evict(1, "request")
    pool.share([2])
    pool.release([2])
    (block,) = pool.take(1)
    pool.publish(block, key(9))
    pool.release([block])
    assert list(pool.victims()) == [block, 2]


def test_media_of_any_number_are_told_apart() -> None:
    numbers = (0, 2**63 - 1, 2**63, 2**64 - 1)
    assert len({media_part([Media(number, 0, 4)], 0, 4) for number in numbers}) == len(numbers)


# -- adaptive replacement --------------------------------------------------------------------------


def cycled(policy: AdaptiveReplacement, *numbers: int, again: bool = False) -> None:
    """Each became evictable, was used again or not, and was evicted: it is a ghost now."""
    for number in numbers:
        policy.insert(number, key(number))
        if again:
            policy.remove(number)
            policy.insert(number, key(number))
        policy.evicted(number)


def is_known(policy: AdaptiveReplacement, number: int) -> bool:
    """Whether a key that comes back counts as used again: it is evicted after one that is new."""
    policy.insert(98, key(number))
    policy.insert(99, key(99))
    order = list(policy)
    for entry in order:
        policy.forget(entry)
    return order == [99, 98]


def test_arc_remembers_as_many_that_were_used_once_as_there_are_blocks() -> None:
    policy = AdaptiveReplacement(2)
    cycled(policy, 0, 1, 2)
    for number, target in ((0, 0), (1, 1), (2, 2)):
        policy.insert(number, key(number))
        assert policy.target == target


def test_arc_remembers_twice_as_many_as_there_are_blocks_the_oldest_first_forgotten() -> None:
    policy = AdaptiveReplacement(2)
    cycled(policy, 0)
    cycled(policy, 1, 2, 3, 4, again=True)
    assert [is_known(policy, number) for number in (1, 2, 3, 4)] == [False, True, True, True]


def test_the_border_of_arc_moves_by_whole_blocks() -> None:
    policy = AdaptiveReplacement(8)
    cycled(policy, 0, 1, 2)
    cycled(policy, 0, 1, 2)  # comes back: by 1, 1 and 2 blocks
    assert policy.target == 4
    policy.insert(0, key(0))
    cycled(policy, 3, 4, 5)
    assert policy.target == 3
    policy.insert(1, key(1))  # three ghosts against two
    assert policy.target == 2
    cycled(policy, 6, 7, 8, again=True)
    policy.insert(3, key(3))  # four against three
    assert policy.target == 3


# -- slots of a lower tier -------------------------------------------------------------------------


def slots_ready(events: Events) -> TierPool:
    """Two slots of three hold keys 0 and 1, in the order of ARC; key 0 is the next victim."""
    pool = TierPool("host", 3, 0, AdaptiveReplacement(3), events)
    pool.rebuild([(0, key(0)), (1, key(1))])
    return pool


def test_slots_asked_for_are_used_again() -> None:
    pool = slots_ready([])
    pool.touch([key(0)])
    assert list(pool.victims()) == [1, 0]
    pool.pin([1])
    pool.unpin([1], used=False)
    assert list(pool.victims()) == [1, 0], "a copy downwards is no use"
    pool.pin([1])
    pool.unpin([1], used=True)
    pool.pin([0])
    pool.unpin([0], used=False)
    assert list(pool.victims()) == [1, 0]


@pytest.mark.parametrize(("cause", "remembered"), [("corrupt", False), ("request", True)])
def test_only_what_was_evicted_is_remembered(cause: Any, remembered: bool) -> None:
    pool = slots_ready([])
    pool.drop([0], cause)
    (slot,) = pool.take(1)
    pool.reserve([slot], [key(0)])
    pool.publish([slot], [key(0)])
    pool.unpin([slot], used=True)
    pool.touch([key(1)])
    pool.pin([slot])
    pool.unpin([slot], used=False)
    assert list(pool.victims()) == ([1, slot] if remembered else [slot, 1])


def test_evictions_of_slots_are_counted_but_not_by_a_reset() -> None:
    events: Events = []
    pool = slots_ready(events)
    assert [pool.evict(1, "request"), pool.evict(1, "request"), pool.evictions] == [1, 1, 2]
    pool.rebuild([(0, key(0))])
    pool.evict(1, "reset")
    assert pool.evictions == 2
    causes = [event.cause for event in events if isinstance(event, SlotsEvicted)]
    assert causes == ["request", "request", "reset"]


def test_a_slot_is_its_owners() -> None:
    pool = slots_ready([])
    pool.own(pool.take(1), 7)
    assert pool.owners == {2: 7}


# -- what is below the device ----------------------------------------------------------------------


def subject_after(
    *operations: AnyOperation, groups: int = 1, blocks: int = 8, **sizes: Any
) -> EngineSubject:
    defaults = {"host_blocks": 3, "requests": 4, "offload": "both"}
    configuration = Configuration(blocks=blocks, **(defaults | sizes))
    subject = EngineSubject(configuration, engine=partial(Engine, groups=groups))
    for operation in operations:
        assert subject.apply(operation).status == "done"
    return subject


def done(*operations: AnyOperation, **sizes: Any) -> Engine:
    """The engine after these operations."""
    return subject_after(*operations, **sizes).engine


def hierarchy(engine: Engine) -> Hierarchy:
    assert engine.hierarchy is not None
    return engine.hierarchy


def prompt(tokens: int, source: int = 0, **more: Any) -> Admit:
    return Admit((Segment(source, tokens),), **more)


STEP = (Launch(), Retire())
STORED = (prompt(8), *STEP, Finish(0), Offload(), Complete())
SAVED = (*STORED, Offload("disk"), Complete())
PROMOTE = Promote(prompt(9).prompt)
FETCH = Promote(prompt(9).prompt, to="host")


@pytest.mark.parametrize("tokens", [4, 6, 8])
def test_a_block_holds_what_a_step_computed_in_it(tokens: int) -> None:
    engine = done(prompt(tokens, slots=16), *STEP, groups=2)
    (request,) = engine.running
    full, left = divmod(tokens, 4)
    for group, cells in enumerate(hierarchy(engine).memory.cells["device"]):
        keys = request.block_keys(group, full)
        expected = [*keys[1:], *([unfinished(keys[full], left)] if left else [])]
        assert cells[1:5] == [*expected, *[cells[8]] * (4 - len(expected))]


@pytest.mark.parametrize(("tokens", "blocks"), [(4, 1), (5, 2), (7, 2)])
def test_what_is_void_is_computed_for_nobody(tokens: int, blocks: int) -> None:
    engine = done(prompt(tokens, slots=16), Launch(), Abort(0), Retire(), groups=2)
    for cells in hierarchy(engine).memory.cells["device"]:
        assert cells[1:5] == [*[NOBODYS] * blocks, *[cells[8]] * (4 - blocks)]


def test_what_was_evicted_from_the_host_is_not_saved() -> None:
    subject = subject_after(*STORED, Evict(9, "host"), disk_blocks=3)
    assert subject.apply(Offload("disk")).reason == NOTHING_TO_MOVE


@pytest.mark.parametrize(("order", "victims"), [("lru", [0, 9, 8]), ("arc", [9, 0, 8])])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_evicts_in_the_order_that_it_was_given(
    tier: Tier, order: str, victims: list[int]
) -> None:
    """With ARC what comes back after its eviction is evicted after what is new."""
    sizes: dict[str, Any] = {"disk_blocks": 3, f"{tier}_eviction": order}
    (pool,) = hierarchy(done(**sizes)).pools(tier)
    pool.rebuild([(0, key(0))])
    pool.evict(1, "request")
    for number in (0, 9, 8):
        slots = pool.take(1)
        pool.reserve(slots, [key(number)])
        pool.publish(slots, [key(number)])
        pool.unpin(slots, used=True)
    key_of = {slot: key for key, slot in pool.index.items()}
    assert [key_of[slot] for slot in pool.victims()] == [key(number) for number in victims]


def evict_first_row(pool: BlockPool | TierPool, used: int) -> None:
    """As no engine does: of a prefix in two blocks the first goes, for the second is in use."""
    if isinstance(pool, BlockPool):
        pool.share([used])
        pool.evict(1, "request")
        pool.release([used])
    else:
        pool.pin([used])
        pool.evict(1, "request")
        pool.unpin([used], used=True)


def test_hits_of_tiers_add_up_and_end_with_the_first_miss() -> None:
    again = (prompt(9), Finish(0))
    subject = subject_after(prompt(8), *STEP, Finish(0), *again, *again)
    engine = subject.engine
    assert engine.counters.tier_hits == {"device": 4, "host": 0, "disk": 0}
    evict_first_row(engine.pools[0], used=2)
    hierarchy(engine).count_lookup(subject.prepare(prompt(9)), 2)
    assert engine.counters.tier_hits == {"device": 4, "host": 0, "disk": 0}


OTHER = (prompt(4, 1), *STEP, Finish(0), Offload(), Complete())


def test_the_hosts_copies_of_what_the_device_had_are_used_and_no_others() -> None:
    engine = done(*STORED, *OTHER, Evict(1), prompt(9))
    pool = hierarchy(engine).host[0]
    (request,) = engine.running
    first, second = request.block_keys(0, 2)[1:3]
    assert request.cached_tokens == 4
    (other,) = pool.index.keys() - {first, second}
    assert list(pool.victims()) == [pool.index[key] for key in (second, other, first)]


def test_no_more_is_promoted_than_may_be_found() -> None:
    """The last token is always computed, so what it is in is not found."""
    subject = subject_after(*STORED, Evict(9))
    assert subject.apply(Promote(prompt(8).prompt)).count == 1


def test_what_the_host_has_is_not_fetched() -> None:
    subject = subject_after(*SAVED, Evict(9), disk_blocks=3)
    assert subject.apply(FETCH).reason == NOTHING_TO_MOVE


def test_nothing_is_fetched_without_a_disk() -> None:
    assert subject_after(*STORED, Evict(9)).apply(FETCH).reason == OFFLOAD_OFF


def test_what_a_copy_upwards_pins_must_be_free() -> None:
    subject = subject_after(*STORED, Evict(9), Withhold("host", 3))
    assert subject.apply(PROMOTE).reason == NO_HOST_BLOCKS
    run = (*SAVED, Evict(9), Evict(9, "host"), Withhold("disk", 3))
    assert subject_after(*run, disk_blocks=3).apply(FETCH).reason == NO_DISK_BLOCKS


def test_a_fetch_spares_the_first_rows_of_its_own_prompt() -> None:
    run = (*SAVED, Evict(1, "host"), *OTHER, Evict(9), FETCH, Complete())
    subject = subject_after(*run, disk_blocks=3, host_blocks=2)
    found = subject.prepare(prompt(9)).block_keys(0, 2)
    assert sorted(hierarchy(subject.engine).host[0].index) == sorted(found[1:])


def test_a_fetch_spares_nothing_that_its_prompt_may_not_find() -> None:
    subject = subject_after(*SAVED, Evict(9), disk_blocks=3, host_blocks=2)
    pool = hierarchy(subject.engine).host[0]
    evict_first_row(pool, used=pool.index[[*pool.index][1]])
    for operation in (*OTHER, Evict(9), Withhold("host", 1)):
        assert subject.apply(operation).status == "done"
    assert subject.apply(Promote(prompt(8).prompt, to="host")).status == "done"


def copied(source: int, *more: AnyOperation) -> tuple[AnyOperation, ...]:
    """A prompt of one block is computed and copied to the host."""
    return (prompt(4, source), *STEP, Finish(0), Offload(), Complete(), *more)


SAVE = (Offload("disk"), Complete())
BACK = prompt(5, 1).prompt


@pytest.mark.parametrize(
    ("tier", "used", "run"),
    [
        ("host", False, (*copied(1), *copied(2), Offload("disk", blocks=1), Complete())),
        ("host", True, (*copied(1), *copied(2), Evict(9), Promote(BACK), Complete())),
        (
            "disk",
            True,
            (
                *(*copied(1, *SAVE), *copied(2, *SAVE), Evict(9), Evict(9, "host")),
                *(Promote(BACK, to="host"), Complete()),
            ),
        ),
    ],
)
def test_a_copy_upwards_is_a_use_and_one_downwards_is_none(
    tier: Tier, used: bool, run: Sequence[AnyOperation]
) -> None:
    """In the order of ARC: what was used again is evicted after what was used once."""
    arc: dict[str, Any] = {f"{tier}_eviction": "arc"}
    new = copied(3, *(SAVE if tier == "disk" else ()))
    subject = subject_after(*run, *new, disk_blocks=4, host_blocks=4, **arc)
    (pool,) = hierarchy(subject.engine).pools(tier)
    source_of = {
        pool.index[subject.prepare(prompt(5, source)).block_keys(0, 1)[1]]: source
        for source in (1, 2, 3)
    }
    victims = [source_of[slot] for slot in pool.victims()]
    assert victims == ([2, 3, 1] if used else [2, 1, 3])


def test_what_was_to_be_fetched_and_is_not_waits_for_no_copy_to_disk() -> None:
    run = (*SAVED, Evict(9), Evict(9, "host"), FETCH, Cancel())
    subject = subject_after(*run, disk_blocks=3)
    assert subject.apply(Offload("disk")).reason == NOTHING_TO_MOVE


def test_no_more_arrives_than_has_landed() -> None:
    (cells,) = hierarchy(done(*STORED[:-1], Land(0, 1))).memory.cells["host"]
    assert cells[0] != cells[1] == cells[2]


def test_blocks_that_are_found_damaged_add_up() -> None:
    run = (*SAVED, Evict(9), Evict(9, "host"))
    damaged = (FETCH, Corrupt(), Complete())
    saved_again = (prompt(4), *STEP, Finish(0), Offload(), Complete(), *SAVE, Evict(9))
    engine = done(*run, *damaged, *saved_again, Evict(9, "host"), *damaged, disk_blocks=3)
    assert engine.counters.corrupt_blocks == 2


OUT = Preempt(0, swap=True, late=True)


def test_what_could_not_be_copied_out_is_computed_again_at_once() -> None:
    """Though the copy of another group is still on its way."""
    run = (prompt(8), *STEP, OUT, Fail(), Resume(0), Launch())
    assert hierarchy(done(*run, groups=2)).transfers


def test_a_copy_out_that_fails_leaves_other_requests_their_slots() -> None:
    run = (prompt(8), prompt(8, 1), *STEP, Preempt(1, swap=True), OUT, Fail())
    assert hierarchy(done(*run, host_blocks=4)).host[0].owners == {0: 1, 1: 1}


def test_a_reset_says_so_of_all_tiers() -> None:
    subject = subject_after(*SAVED, disk_blocks=3)
    subject.drain_events()
    assert subject.apply(Reset()).status == "done"
    evicted = [one for one in subject.drain_events() if isinstance(one, SlotsEvicted)]
    assert {(one.tier, one.cause) for one in evicted} == {("host", "reset"), ("disk", "reset")}


def test_a_copied_block_holds_what_the_other_held() -> None:
    engine = done(prompt(6), *STEP, Fork(0), Grow(1))
    (cells,) = hierarchy(engine).memory.cells["device"]
    assert cells[3] == cells[2] != cells[4]
