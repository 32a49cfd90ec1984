"""What mutants of the engine survived before: each test here kills some (see docs/mutation.md).

Those of the checks: ``test_check_mutants.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvproof.engine.engine import Engine
from kvproof.engine.eviction import AdaptiveReplacement, EvictionPolicy, LeastRecentlyUsed
from kvproof.engine.keys import media_part
from kvproof.engine.pool import BlockPool, PoolExhaustedError
from kvproof.engine.tiers.pool import TierPool
from kvproof.invariants.events import BlocksEvicted, Event, SlotsEvicted
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Evict,
    Finish,
    Launch,
    Media,
    Reset,
    Retire,
    Segment,
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
