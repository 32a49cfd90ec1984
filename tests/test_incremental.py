"""Incremental checks and full audits see the same, and a replay blames the same operation.

Fully: everything is audited after each operation.  Incrementally: what an operation touched is
compared with the view a few operations later, and everything in a sampled audit and at the end.
What is put right again in between is seen by the full way only; this is measured here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from unittest.mock import patch

import pytest
from msgspec import Struct

from kvproof.fuzz.faults import Fault, cache_faults, fault_by_id
from kvproof.fuzz.swarm import Draw, draw_run
from kvproof.invariants import checker
from kvproof.invariants.checker import AUDITED_SHARE, audit_interval
from kvproof.invariants.operations import Operation
from kvproof.invariants.subject import Configuration
from kvproof.invariants.tier_books import Tiers
from kvproof.invariants.verdict import primary
from kvproof.invariants.view import TieredView
from kvproof.stateful_tests.harness import Harness
from kvproof.stateful_tests.subjects.engine import EngineSubject

ABLE = EngineSubject.capabilities | EngineSubject(Configuration()).semantics.features()

FULL, SAMPLED, NEVER = 1, None, 0
"""Audit intervals: after each operation, as by default, none at all."""

RUNS_MAX = 40
FAILING = 4
"""Each fault is looked at in up to ``RUNS_MAX`` runs, or until so many of them fail."""

AUDIT_SEES_FIRST = {
    "no-copy-on-write",  # a shared block that is yet to be written
    "copy-for-two-owners-only",
    "key-field-survives-eviction",  # the order of the free blocks
    "evicts-the-hottest",
    "device-hits-let-the-host-age",
    "arc-forgets-its-ghosts",
    "hit-covers-the-whole-prompt",  # figures
    "stores-counted-when-started",
    "tiers-share-a-miss-counter",
    "lookups-counted-when-refused",
    "hits-counted-again-on-resume",
    "evictions-count-what-was-asked",
}
"""Faults whose damage lies where only audits look, until it does more damage or is undone."""

ONLY_AUDITED = {
    "stores-counted-when-started",
    "tiers-share-a-miss-counter",
    "lookups-counted-when-refused",
    "hits-counted-again-on-resume",
    "evictions-count-what-was-asked",
}
"""Faults of exported figures, which nothing but an audit compares."""


class Blame(Struct, frozen=True):
    """The first bad operation, and the property that says most of what it broke."""

    op: int
    property: str


def blame(draw: Draw, operations: list[Operation], interval: int | None) -> Blame | None:
    harness = Harness(EngineSubject(draw.configuration), audit_interval=interval)
    for operation in operations:
        harness.perform(operation)
        if harness.violations:
            break
    harness.drain([])
    if interval != NEVER:
        harness.audit()
    if not harness.violations:
        return None
    violation = primary(harness.violations)
    return Blame(violation.op, violation.property)


class Compared(Struct, frozen=True):
    """One run, looked at in several ways."""

    full: Blame | None
    incremental: Blame | None
    replayed: Blame | None
    """The incremental finding, replayed and audited at each operation up to there."""
    settled: Blame | None
    """Incrementally, but what was touched is compared after each operation."""
    unaudited: Blame | None


def compare(draw: Draw) -> Compared:
    operations: list[Operation] = [*draw.operations]
    incremental = blame(draw, operations, SAMPLED)
    replayed = None
    if incremental is not None:
        # Beyond the draw, draining performs the same operations again.
        replayed = blame(draw, operations[: incremental.op + 1], FULL)
    with patch.object(checker, "SETTLED_EVERY", 1):
        settled = blame(draw, operations, SAMPLED)
    full = blame(draw, operations, FULL)
    return Compared(full, incremental, replayed, settled, blame(draw, operations, NEVER))


@cache
def compared(fault: Fault | None) -> tuple[Compared, ...]:
    """Runs under the fault, up to those that fail; each test looks at the same ones."""
    with fault.installed() if fault else nullcontext():
        return tuple(_until_enough_fail(fault))


def _until_enough_fail(fault: Fault | None) -> Iterator[Compared]:
    failing = number = 0
    while failing < FAILING and number < RUNS_MAX:
        name = fault.id if fault else "none"
        seen = compare(draw_run(f"incremental/{name}/{number}", ABLE))
        failing += seen.full is not None
        number += 1
        yield seen


def test_without_a_fault_neither_sees_anything() -> None:
    runs = compared(None)
    assert len(runs) == RUNS_MAX
    assert set(runs) == {Compared(None, None, None, None, None)}


fault_by_fault = pytest.mark.parametrize("fault", cache_faults(), ids=lambda fault: fault.id)


@fault_by_fault
def test_whatever_is_seen_the_full_way_sees_no_later(fault: Fault) -> None:
    for run in compared(fault):
        for other in (run.incremental, run.settled, run.unaudited):
            if other is not None:
                assert run.full is not None
                assert run.full.op <= other.op


@fault_by_fault
def test_a_replay_audited_at_each_operation_blames_the_first_bad_one(fault: Fault) -> None:
    for run in compared(fault):
        if run.incremental is not None:
            assert run.replayed == run.full


@fault_by_fault
def test_settled_at_each_operation_both_ways_blame_the_same_one(fault: Fault) -> None:
    if fault.id in AUDIT_SEES_FIRST:
        return
    for run in compared(fault):
        assert (run.settled is None) == (run.full is None)
        if run.settled is not None and run.full is not None:
            assert run.settled.op == run.full.op


def test_settling_every_few_operations_misses_next_to_nothing() -> None:
    """Only state that is wrong for less than a settlement, and right again, can escape."""
    runs = [run for fault in cache_faults() for run in compared(fault) if run.full is not None]
    assert len(runs) > 2 * len(cache_faults()), "the comparison is not vacuous"
    missed = [run for run in runs if run.incremental is None]
    assert len(missed) <= 0.01 * len(runs)
    assert len([run for run in runs if run.settled is None]) <= len(missed) + 1


def test_most_faults_are_seen_without_any_audit() -> None:
    """Audits are a safety net: the incremental checks see nearly everything themselves."""
    failing: Counter[str] = Counter()
    unaudited: Counter[str] = Counter()
    for fault in cache_faults():
        for run in compared(fault):
            failing[fault.id] += run.full is not None
            unaudited[fault.id] += run.unaudited is not None
    never = {name for name, runs in failing.items() if runs and not unaudited[name]}
    assert ONLY_AUDITED <= never <= AUDIT_SEES_FIRST
    assert unaudited.total() > 0.8 * failing.total()


def test_audits_become_rarer_with_size_and_are_never_switched_off() -> None:
    assert audit_interval(6) == audit_interval(40) == AUDITED_SHARE == 20
    assert audit_interval(1000) == 500
    assert audit_interval(1 << 24) == 1 << 23


def _audits(interval: int | None, operations: int) -> int:
    harness = Harness(EngineSubject(Configuration()), audit_interval=interval)
    run = draw_run("audits", ABLE).operations
    for number in range(operations):
        harness.perform(run[number % len(run)])
    return harness.checker.audits


def test_audits_are_made_at_a_sampled_share_of_operations() -> None:
    assert 80 <= _audits(SAMPLED, 2000) <= 120
    assert _audits(SAMPLED, 200) == _audits(SAMPLED, 200)
    assert _audits(FULL, 200) == 200
    assert _audits(NEVER, 200) == 0


# -- the books -------------------------------------------------------------------------------------


def assert_books_agree_with_the_view(harness: Harness) -> None:
    """Every table, count, key, free block, length and step, compared without any check."""
    books, view = harness.checker.books, harness.subject.view()
    assert list(books.requests) == list(view.requests())
    for request in books.requests.values():
        assert view.standing(request.id) == request.standing(books.block_size)
        assert request.length == len(request.tags) == view.standing(request.id)[1]
    assert [step.number for step in books.steps] == list(view.steps_in_flight())
    for group in books.groups:
        number = group.group
        for request in books.requests.values():
            assert list(view.table(request.id, number)) == request.tables[number]
        assert list(view.ref_counts(number)) == group.refs
        assert dict(view.index(number)) == group.blocks_of
        free = list(view.free_blocks(number))
        assert len(free) == view.free_count(number) + group.withheld
        assert len(free) == group.usable - group.referenced == group.free + group.withheld
        assert {block for block, refs in enumerate(group.refs) if not refs} == {0, *free}
        assert sorted(free[group.empty_free :]) == sorted(group.cached_free)
        assert free[group.empty_free :] == list(group.adaptive or group.cached_free)
    if books.tiers is not None:
        assert_tiers_agree_with_the_view(books.tiers, view)


def assert_tiers_agree_with_the_view(tiers: Tiers, view: TieredView) -> None:
    """Every slot, pin, key, victim and byte, and every transfer."""
    assert list(view.transfers()) == list(tiers.in_flight)
    ends: Counter[tuple[str, int, int]] = Counter()
    for transfer in tiers.in_flight.values():
        ends.update((transfer.source, transfer.group, entry) for entry in transfer.sources)
        ends.update((transfer.target, transfer.group, entry) for entry in transfer.targets)
    for tier in tiers.all:
        name, group = tier.tier, tier.group
        pins = [ends[name, group, slot] for slot in range(tier.capacity)]
        assert list(view.tier_pins(name, group)) == tier.pins == pins
        assert tier.busy == {slot for slot, count in enumerate(pins) if count} | {*tier.owner}
        assert view.free_tier_count(name, group) == tier.free
        assert dict(view.tier_index(name, group)) == tier.slot_of_key
        assert tier.slot_of_key == {key: slot for slot, key in tier.key_of.items()}
        assert list(view.victims(name, group)) == list(tier.order)
        assert {*tier.order} == {*tier.key_of} - tier.busy
        for slot, key in tier.key_of.items():
            content = None if slot in tier.corrupt else key
            assert view.tier_content(name, group, slot) == content


def test_the_books_agree_with_the_view_after_thousands_of_operations() -> None:
    operations = 0
    for number in range(60):
        draw = draw_run(f"books/{number}", ABLE)
        harness = Harness(EngineSubject(draw.configuration), audit_interval=NEVER)
        for index, operation in enumerate(draw.operations):
            harness.perform(operation)
            if index % 5 == 0:
                assert_books_agree_with_the_view(harness)
        harness.drain([])
        assert_books_agree_with_the_view(harness)
        assert not harness.violations
        operations += harness.checker.operations
    assert operations > 5000


def _books_agree_in(number: int) -> bool:
    draw = draw_run(f"books/{number}", ABLE)
    harness = Harness(EngineSubject(draw.configuration), audit_interval=NEVER)
    try:
        for operation in draw.operations:
            harness.perform(operation)
            assert_books_agree_with_the_view(harness)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    "fault", ["counter-drifts", "refused-admission-keeps-its-hits", "stale-key-after-reuse"]
)
def test_books_and_view_of_a_faulty_engine_disagree(fault: str) -> None:
    numbers = range(30)
    assert all(_books_agree_in(number) for number in numbers)
    with fault_by_id(fault).installed():
        assert not all(_books_agree_in(number) for number in numbers)
