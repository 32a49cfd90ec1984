"""What mutants of the checker survived before: each test here kills some (see docs/mutation.md).

It is the engine that is observed; where something has to be wrong, its counts of references are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvproof.engine.engine import Engine
from kvproof.invariants.books import Books
from kvproof.invariants.checker import (
    AUDITED_SHARE,
    SETTLED_EVERY,
    Checker,
    CheckerError,
    audit_interval,
    settlement_interval,
)
from kvproof.invariants.checks.atom import Atom
from kvproof.invariants.checks.ref import Ref
from kvproof.invariants.events import BlocksReleased
from kvproof.invariants.operations import (
    Admit,
    AnyOperation,
    Arrive,
    Finish,
    Grow,
    Offload,
    Preempt,
    Retire,
    Segment,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.property import Check
from kvproof.invariants.scheduling.books import SchedulingBooks
from kvproof.invariants.scheduling.checks.live import Live
from kvproof.invariants.scheduling.checks.progress import Progress
from kvproof.invariants.scheduling.view import SchedulerView
from kvproof.invariants.scheduling.vocabulary import Completed, Limits, Promises, RequestArrived
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.subjects.engine import EngineSubject

PROMPT = Admit((Segment(0, 5),))


class Witness:
    """The engine; from ``wrong`` on it shows one reference more of each block."""

    def __init__(self, configuration: Configuration, groups: int = 1, **semantics: Any) -> None:
        self.configuration = configuration
        self.subject = EngineSubject(configuration, engine=partial(Engine, groups=groups))
        self.semantics = replace(self.subject.semantics, **semantics)
        self.wrong = False

    def view(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subject.view(), name)

    def ref_counts(self, group: int) -> Sequence[int]:
        counts = self.subject.view().ref_counts(group)
        return [count + 1 for count in counts] if self.wrong else counts


class World:
    """A checker that is told truly of the engine."""

    def __init__(
        self,
        *checks: type[Check],
        interval: int | None = 1,
        configuration: Configuration | None = None,
        **more: Any,
    ) -> None:
        self.witness = Witness(configuration or Configuration(blocks=8, requests=4), **more)
        chosen = {"checks": checks} if checks else {}
        self.checker = Checker(self.witness, interval=interval, **chosen)  # type: ignore[arg-type]

    def do(self, *operations: AnyOperation) -> list[Violation]:
        seen: Sequence[Violation] = ()
        for operation in operations:
            outcome = self.witness.subject.apply(operation)
            events = list(self.witness.subject.drain_events())
            seen = self.checker.observe(operation, outcome, events)
        return list(seen)


def test_pools_of_any_size_are_settled_and_audited_in_time() -> None:
    blocks = (1, 40, 42, 768, 832, 8192, 8256, 1 << 20)
    assert [settlement_interval(size) for size in blocks] == [12, 12, 12, 12, 13, 128, 128, 128]
    assert [audit_interval(size) for size in blocks[:5]] == [20, 20, 21, 384, 416]


@pytest.mark.parametrize(
    ("configuration", "every"),
    [
        (Configuration(blocks=30), AUDITED_SHARE),
        (Configuration(blocks=60), 30),
        (Configuration(blocks=60, host_blocks=20), 40),
        (Configuration(blocks=60, host_blocks=20, disk_blocks=30, offload="both"), 55),
        (Configuration(blocks=60, host_blocks=40, offload="none"), 50),
    ],
)
def test_blocks_of_all_tiers_make_audits_rarer(configuration: Configuration, every: int) -> None:
    assert World(interval=None, configuration=configuration).checker.audit_every == every


def _gaps_between_audits(world: World, operations: int) -> list[int]:
    gaps, latest = [], 0
    for number in range(1, operations):
        before = world.checker.audits
        world.do(Retire())
        if world.checker.audits > before:
            gaps.append(number - latest)
            latest = number
    return gaps[1:]


@pytest.mark.parametrize("interval", [2, 20, 50])
def test_audits_come_on_average_as_often_as_asked_and_never_at_a_fixed_pace(interval: int) -> None:
    world = World(Ref, interval=interval)
    world.do(PROMPT)
    gaps = _gaps_between_audits(world, 400 * interval)
    assert min(gaps) >= 1
    assert max(gaps) <= 2 * interval - 1
    assert len({*gaps}) > min(interval, 10)
    assert 0.85 * interval < sum(gaps) / len(gaps) < 1.15 * interval


@pytest.mark.parametrize(
    ("interval", "live", "every"),
    [(None, 4, AUDITED_SHARE), (None, 60, 60), (AUDITED_SHARE, 60, AUDITED_SHARE)],
)
def test_audits_are_rarer_with_many_live_requests_unless_an_interval_was_asked_for(
    interval: int | None, live: int, every: int
) -> None:
    full = Configuration(blocks=6, block_size=16, requests=64)
    world = World(Ref, interval=interval, configuration=full)
    for _ in range(live):
        world.do(Admit((Segment(0, 5),)), Preempt(0))
    assert len(world.checker.books.requests) == live
    gaps = _gaps_between_audits(world, 400 * every)
    assert max(gaps) <= 2 * every - 1
    assert 0.85 * every < sum(gaps) / len(gaps) < 1.15 * every


def test_what_is_touched_is_compared_every_few_operations() -> None:
    world = World(Ref, interval=0)
    world.do(PROMPT)
    world.witness.wrong = True
    assert [world.do(Retire()) for _ in range(SETTLED_EVERY - 2)] == [[]] * (SETTLED_EVERY - 2)
    (violation, *_) = world.do(Retire())
    assert (violation.property, violation.op) == ("REF", SETTLED_EVERY - 1)
    assert (world.checker.settlements, world.checker.audits) == (1, 0)


def test_the_same_is_told_once_with_the_operation_at_which_it_was_seen_first() -> None:
    world = World(Ref)
    world.witness.wrong = True
    first = world.do(PROMPT)
    assert {violation.op for violation in first} == {0}
    assert world.do(Retire(), Retire()) == first
    assert list(world.checker.audit()) == first


def test_what_was_skipped_unseen_is_counted() -> None:
    world = World(Ref)
    world.checker.pass_over(Retire)
    world.do(PROMPT, Retire(), Grow(0))
    world.checker.pass_over(Retire)
    assert world.checker.counts[Retire] == {"done": 0, "refused": 0, "skipped": 3}
    assert world.checker.counts[Grow] == {"done": 1, "refused": 0, "skipped": 0}
    assert world.checker.operations == 5


def test_a_check_is_put_to_the_test_by_what_it_looks_at() -> None:
    """Three audits, three settlements, an allocation that it does not see and a release."""
    world = World(Ref)
    world.do(PROMPT, Retire(), Finish(0))
    check = world.checker.checks[0]
    looked = len([1 for operation in (PROMPT, Retire(), Finish(0)) if _looks(check, operation)])
    assert world.checker.checked() == {"REF": check.checked + 3 + 3 + looked}


def _looks(check: Check, operation: AnyOperation) -> bool:
    status = "skipped" if isinstance(operation, Retire) else "done"
    kind = type(operation)
    return check.expects(kind, status) or check.concludes(kind, status)  # type: ignore[arg-type]


def test_groups_of_one_pool_have_one_shadow_and_others_have_their_own() -> None:
    for shared, shadows in ((True, 1), (False, 3)):
        world = World(groups=3, shared_pool=shared)
        for check in world.checker.checks:
            assert len(check.shadows) == 3
            assert len({*map(id, check.shadows)}) == shadows


def test_reserved_blocks_have_a_place_in_the_shadow() -> None:
    world = World()
    assert len(world.checker.checks[0].shadows[0].content) == 9 * world.checker.books.block_size


class Stumbles(Check):
    """Knows nothing of requests that are called 9."""

    def conclude(self, operation: object, outcome: Outcome) -> None:
        if any(event.request == 9 for event in self.books.events if hasattr(event, "request")):
            raise KeyError(9)


def test_a_check_that_stumbles_over_what_another_sees_is_excused() -> None:
    lie = [BlocksReleased(0, 9, [3])]
    world = World(Ref, Stumbles)
    world.do(PROMPT)
    (violation,) = world.checker.observe(Retire(), Outcome("done"), lie)
    assert (violation.property, violation.block, violation.op) == ("REF", 3, 1)
    alone = World(Stumbles)
    alone.do(PROMPT)
    with pytest.raises(CheckerError, match=r"at operation 1: KeyError\(9\)"):
        alone.checker.observe(Retire(), Outcome("done"), lie)
    assert alone.checker.violations == []


class Lost(Check):
    """Knows nothing when all is to be looked at."""

    def audit(self) -> None:
        raise KeyError("nothing")


def test_an_audit_that_stumbles_is_excused_by_what_is_wrong() -> None:
    world = World(Ref, Lost, interval=0)
    with pytest.raises(CheckerError, match=r"^before the first operation: KeyError\('nothing'\)"):
        world.checker.audit()
    world.do(PROMPT)
    with pytest.raises(CheckerError, match=r"at operation 0: KeyError\('nothing'\)"):
        world.checker.audit()
    world.witness.wrong = True
    seen = world.checker.audit()
    assert {(violation.property, violation.op) for violation in seen} == {("REF", 0)}


def test_who_looks_at_copies_is_not_remembered_from_where_nothing_is_below() -> None:
    below = Configuration(blocks=8, requests=4, host_blocks=4, offload="prefix")
    alone, with_host = World(Atom), World(Atom, configuration=below)
    assert alone.witness.semantics == with_host.witness.semantics
    looks = [world.checker._looks(Offload, "refused") for world in (alone, with_host)]
    assert looks == [((), (0,)), ((0,), (0,))]


def scheduling_books() -> SchedulingBooks:
    configuration = Configuration(blocks=8)
    return SchedulingBooks(Limits(), Promises(), configuration, Books(configuration, Semantics()))


def test_who_is_preempted_over_and_over_is_named() -> None:
    seen: list[Violation] = []
    Live(scheduling_books(), cast(SchedulerView, None), seen.append)._ping_pong(3)
    assert [(violation.property, violation.request) for violation in seen] == [("LIVE", 3)]


@pytest.mark.parametrize(
    ("arrived", "says"),
    [
        (RequestArrived(5, 0, 7, 2, 2, 0), "arrived with 7 prompt tokens and priority 0"),
        (RequestArrived(5, 0, 4, 9, 3, 0), "arrived to stop at 3 of at most 9 output tokens"),
    ],
)
def test_who_arrives_otherwise_than_sent_is_named(arrived: RequestArrived, says: str) -> None:
    seen: list[Violation] = []
    books: Any = scheduling_books()
    sent = Arrive((Segment(0, 4),), output=2, max_tokens=2)
    books.live[5] = SimpleNamespace(id=5, arrival=sent)
    Progress(books, cast(SchedulerView, None), seen.append)._arrived(arrived)
    assert [violation.request for violation in seen] == [5]
    assert says in seen[0].message


def test_what_is_computed_of_whom_the_cache_does_not_know_is_told() -> None:
    seen: list[Violation] = []
    books: Any = scheduling_books()
    request = SimpleNamespace(id=5, ended=False, epoch=0, cache_request=9, computed=3)
    books.retired = [SimpleNamespace(request=request, epoch=0)]
    progress = Progress(books, cast(SchedulerView, None), seen.append)
    progress._completed(cast(Completed, None))
    assert [violation.request for violation in seen] == [5]
    assert seen[0].message == (
        "3 tokens of request 5 are computed, but in the cache it is not there"
    )
