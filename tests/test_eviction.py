"""Eviction policies: least recently used, and adaptive replacement against its definition."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from time import process_time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvproof.engine.eviction import (
    EVICTION_ORDERS,
    AdaptiveReplacement,
    EvictionPolicy,
    EvictionPolicyFactory,
    LeastRecentlyUsed,
)
from kvproof.invariants.operations import (
    Admit,
    Evict,
    Finish,
    Launch,
    Operation,
    Retire,
    Segment,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.eviction import EvictionPolicySubject


def key(number: int) -> bytes:
    return bytes([number])


def filled(policy: EvictionPolicy, *numbers: int) -> EvictionPolicy:
    """Entry n became evictable under key n, in this order."""
    for number in numbers:
        policy.insert(number, key(number))
    return policy


def used_again(policy: EvictionPolicy, *entries: int) -> EvictionPolicy:
    for entry in entries:
        policy.remove(entry)
        policy.insert(entry, key(entry))
    return policy


def test_the_least_recently_used_goes_first() -> None:
    policy = used_again(filled(LeastRecentlyUsed(4), 0, 1, 2), 0)
    assert (list(policy), policy.victim(), len(policy)) == ([1, 2, 0], 1, 3)
    policy.evicted(1)
    policy.insert(3, key(3), used=False)
    assert list(policy) == [2, 0, 3]


def test_entries_are_forgotten_wherever_they_are() -> None:
    for order in EVICTION_ORDERS.values():
        policy = filled(order(4), 0, 1)
        policy.remove(1)
        for entry in (0, 1, 2):
            policy.forget(entry)
        assert not list(policy)
        with pytest.raises(KeyError):
            policy.remove(0)


# -- adaptive replacement -------------------------------------------------------------------------


def test_what_was_used_again_outlives_a_scan() -> None:
    policy = used_again(filled(AdaptiveReplacement(4), 0, 1, 2, 3), 0, 1)
    assert list(policy) == [2, 3, 0, 1]
    policy.evicted(2)
    policy.insert(2, key(9))
    assert list(policy) == [3, 2, 0, 1]


def test_a_copy_downwards_is_no_use() -> None:
    policy = filled(AdaptiveReplacement(2), 0, 1)
    policy.remove(0)
    policy.insert(0, key(0), used=False)
    assert list(policy) == [1, 0]
    assert list(used_again(policy, 0)) == [1, 0]  # used once, used again
    policy.remove(0)
    policy.insert(0, key(0), used=False)
    policy.insert(2, key(2))
    assert list(policy) == [1, 2, 0]  # still among those used again


def test_a_ghost_moves_the_border_and_comes_back_as_used_again() -> None:
    policy = filled(AdaptiveReplacement(3), 0, 1)
    used_again(policy, 1)
    policy.evicted(0)
    assert policy.target == 0
    policy.insert(2, key(0))
    assert (policy.target, list(policy)) == (1, [1, 2])
    policy.insert(0, key(5))
    assert list(policy) == [1, 2, 0]  # as many as the target are kept among those used once
    policy.evicted(1)
    policy.insert(1, key(1))
    assert (policy.target, list(policy)) == (0, [0, 2, 1])


def test_another_key_in_the_same_entry_is_new() -> None:
    policy = filled(AdaptiveReplacement(2), 0)
    policy.remove(0)
    policy.insert(0, key(7))
    policy.insert(1, key(1))
    assert list(used_again(policy, 1)) == [0, 1]


class Naive:
    """Adaptive replacement as its definition reads: four lists, searched from end to end."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0
        self.t1: list[tuple[int, bytes]] = []
        self.t2: list[tuple[int, bytes]] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.taken: list[tuple[int, bytes, int]] = []

    def insert(self, entry: int, key: bytes, used: bool) -> None:
        before = [(k, which) for e, k, which in self.taken if e == entry]
        self.taken = [t for t in self.taken if t[0] != entry]
        if before and before[0][0] == key:
            which = 2 if used else before[0][1]
        elif key in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) // len(self.b1)))
            self.b1.remove(key)
            which = 2
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) // len(self.b2)))
            self.b2.remove(key)
            which = 2
        else:
            which = 1
        (self.t1 if which == 1 else self.t2).append((entry, key))

    def remove(self, entry: int) -> None:
        for which, entries in ((1, self.t1), (2, self.t2)):
            for e, k in entries[:]:
                if e == entry:
                    entries.remove((e, k))
                    self.taken.append((e, k, which))

    def evicted(self, entry: int) -> None:
        for entries, ghosts in ((self.t1, self.b1), (self.t2, self.b2)):
            for e, k in entries[:]:
                if e == entry:
                    entries.remove((e, k))
                    ghosts.append(k)
        while len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.c:
            self.b2.pop(0)

    def forget(self, entry: int) -> None:
        self.t1 = [(e, k) for e, k in self.t1 if e != entry]
        self.t2 = [(e, k) for e, k in self.t2 if e != entry]
        self.taken = [t for t in self.taken if t[0] != entry]

    def victim(self) -> int:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            return self.t1[0][0]
        return self.t2[0][0]

    def order(self) -> Iterator[int]:
        """The victims, if one after another was evicted."""
        t1, t2 = self.t1[:], self.t2[:]
        while t1 or t2:
            from_t1 = t1 and (len(t1) > self.p or not t2)
            yield (t1 if from_t1 else t2).pop(0)[0]


class Pool:
    """Entries that are free, in use or evictable; drives a policy and its model alike."""

    def __init__(self, capacity: int) -> None:
        self.policy = AdaptiveReplacement(capacity)
        self.model = Naive(capacity)
        self.free = list(range(capacity))
        self.in_use: dict[int, bytes] = {}
        self.evictable: dict[int, bytes] = {}
        self.ghost_hits = 0

    def fill(self, number: int) -> None:
        """A new content, which is in use at first; evicts if it must."""
        if key(number) in (*self.in_use.values(), *self.evictable.values()):
            return
        if not self.free and self.evictable:
            self.evict()
        if self.free:
            self.in_use[self.free.pop()] = key(number)

    def evict(self) -> None:
        victim = self.policy.victim()
        assert victim == self.model.victim()
        self._gone(victim)

    def evict_behind(self, number: int) -> None:
        """One that is not the next: those before it are protected."""
        if self.evictable:
            self._gone(list(self.evictable)[number % len(self.evictable)])

    def _gone(self, entry: int) -> None:
        self.policy.evicted(entry)
        self.model.evicted(entry)
        del self.evictable[entry]
        self.free.append(entry)

    def let_go(self, number: int) -> None:
        if self.in_use:
            entry = list(self.in_use)[number // 2 % len(self.in_use)]
            content, used = self.in_use.pop(entry), number % 2 == 0
            self.ghost_hits += content in self.model.b1 or content in self.model.b2
            self.policy.insert(entry, content, used)
            self.model.insert(entry, content, used)
            self.evictable[entry] = content

    def use(self, number: int) -> None:
        if self.evictable:
            entry = list(self.evictable)[number % len(self.evictable)]
            self.in_use[entry] = self.evictable.pop(entry)
            self.policy.remove(entry)
            self.model.remove(entry)

    def forget(self, number: int) -> None:
        entry = number % self.model.c
        self.policy.forget(entry)
        self.model.forget(entry)
        if self.evictable.pop(entry, None) or self.in_use.pop(entry, None):
            self.free.append(entry)


ACTIONS = (Pool.fill, Pool.let_go, Pool.fill, Pool.let_go, Pool.use, Pool.evict_behind, Pool.forget)
"""The first ones are drawn twice as often."""


def drive(capacity: int, actions: list[tuple[int, int]]) -> Pool:
    pool = Pool(capacity)
    for action, number in actions:
        ACTIONS[action](pool, number)
        assert pool.policy.target == pool.model.p
        assert list(pool.policy) == list(pool.model.order())
        assert len(pool.policy) == len(pool.evictable)
    return pool


FILLED_AND_LET_GO = [(0, 0), (1, 0), (0, 1), (1, 0)]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, len(ACTIONS) - 1), st.integers(0, 9)), max_size=120),
)
@example(1, FILLED_AND_LET_GO)
def test_adaptive_replacement_is_as_defined(capacity: int, actions: list[tuple[int, int]]) -> None:
    drive(capacity, actions)


def test_the_definition_is_put_to_the_test() -> None:
    """Of both ghost lists something comes back, or the comparison would say little."""
    scan = [(0, n % 4) for n in range(40)]
    actions = [step for fill in scan for step in (fill, (1, 0), (4, fill[1]), (1, 0))]
    pool = drive(3, actions)
    assert pool.ghost_hits > 5
    assert pool.model.b1 or pool.model.b2


class Counted(OrderedDict[int, bytes]):
    """Counts what is taken out of its iterators."""

    taken = 0

    def __iter__(self) -> Iterator[int]:
        for entry in super().__iter__():
            self.taken += 1
            yield entry


def test_the_next_victims_are_found_without_looking_at_the_others() -> None:
    policy = AdaptiveReplacement(100)
    filled(policy, *range(100))
    policy._once = counted = Counted(policy._once)
    counted.taken = 0
    entries = iter(policy)
    assert [next(entries), next(entries), counted.taken] == [0, 1, 2]


def test_orders_have_the_names_of_configurations() -> None:
    assert {"lru": LeastRecentlyUsed, "arc": AdaptiveReplacement} == EVICTION_ORDERS


class Fewest(EvictionPolicy):
    """What a policy of one's own needs to have: the rest is inherited."""

    def __init__(self, capacity: int) -> None:
        self.entries: list[int] = []

    def insert(self, entry: int, key: bytes, used: bool = True) -> None:
        self.entries.append(entry)

    def remove(self, entry: int) -> None:
        self.entries.remove(entry)

    def victim(self) -> int:
        return self.entries[0]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)


def test_a_policy_of_ones_own_may_leave_the_rest_as_it_is() -> None:
    policy = filled(Fewest(3), 0, 1, 2)
    policy.evicted(0)
    policy.forget(2)
    policy.forget(2)
    assert list(policy) == [1]


# -- as a subject ----------------------------------------------------------------------------------

FILL_AND_EVICT: tuple[Operation, ...] = (
    *[Admit((Segment(source, 4),)) for source in (0, 1)],
    Launch(),
    Retire(),
    Finish(0),
    Finish(0),
    Evict(2),
)


class TheLastOne(Fewest):
    """Its victim is not the first that it iterates over."""

    def victim(self) -> int:
        return self.entries[-1]


class Hangs(Fewest):
    def victim(self) -> int:
        while True:
            pass


def raised_by(policy: EvictionPolicyFactory) -> tuple[str, float]:
    """What a run with that policy violates, and the seconds of computing that it took."""
    started = process_time()
    subject = EvictionPolicySubject(Configuration(blocks=4, block_size=4), eviction=policy)
    violations = Harness(subject).run(FILL_AND_EVICT)
    return violations[0].message if violations else "", process_time() - started


@pytest.mark.parametrize("policy", [Fewest, LeastRecentlyUsed, AdaptiveReplacement])
def test_a_policy_that_says_one_thing_passes(policy: EvictionPolicyFactory) -> None:
    assert raised_by(policy)[0] == ""


def test_a_policy_whose_victim_is_not_the_first_of_its_order_is_found_out() -> None:
    assert "TheLastOne.victim() is block" in raised_by(TheLastOne)[0]


def test_a_policy_that_has_hung_once_is_not_waited_for_as_long_again() -> None:
    first, again = raised_by(Hangs), raised_by(Hangs)
    assert "did not let evict end within 1 s" in first[0]
    assert "did not let evict end within 0.1 s" in again[0]
    assert again[1] < first[1] / 3
