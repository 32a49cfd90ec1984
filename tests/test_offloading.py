"""The scheduler's use of a memory hierarchy: what is copied when, and who waits for it.

All runs are checked, cache and scheduler, at each operation.  A block has 4 tokens of 100 bytes;
a copy takes 10 ns and 1 ns a byte between device and host, 50 ns and 2 ns a byte to and from disk:
410 ns and 850 ns for one block.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.offloading import LOOKED_AT, PROMOTIONS_MAX, Offloader
from kvproof.engine.policies import POLICIES
from kvproof.engine.policy import Limits, Plan, SchedulerPolicy, SchedulerState
from kvproof.engine.tiers.disk import DiskFullError
from kvproof.invariants.events import Event
from kvproof.invariants.operations import (
    Abort,
    Arrive,
    Evict,
    Operation,
    Retire,
    Run,
    Schedule,
    Segment,
    Wait,
)
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.vocabulary import (
    Deferred,
    PlanRejected,
    Scheduled,
    TransferDelivered,
    TransferQueued,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

COST = CostModel(
    step_ns=100,
    prefill_token_ns=10,
    decode_sequence_ns=1,
    kv_token_read_ns=0,
    host_latency_ns=10,
    host_ps_per_byte=1000,
    disk_latency_ns=50,
    disk_ps_per_byte=2000,
)


class World:
    """A scheduler over a small cache with a host and, if wanted, a disk."""

    def __init__(
        self,
        policy: SchedulerPolicy | str = "fcfs",
        *,
        blocks: int = 8,
        host_blocks: int = 32,
        disk_blocks: int = 0,
        offload: Any = "prefix",
        run_ahead: int = 1,
        **limits: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.subject = SchedulerSubject(
            Configuration(
                blocks=blocks,
                block_size=4,
                run_ahead=run_ahead,
                kv_bytes_per_token=100,
                host_blocks=host_blocks,
                disk_blocks=disk_blocks,
                offload=offload,
                scheduling=Limits(**limits),
            ),
            policy=POLICIES[policy] if isinstance(policy, str) else lambda: policy,
            clock=self.clock,
            cost=COST,
        )
        self.scheduler = self.subject.scheduler
        self.harness = SchedulingHarness(self.subject, audit_interval=1)
        self.events: list[Event] = []

    def do(self, operation: Operation) -> Outcome:
        outcome = self.harness.perform(operation)
        assert not self.harness.violations, self.harness.violations
        self.events += self.harness.last_events
        return outcome

    def arrive(self, source: int, prompt: int, output: int = 1, **more: Any) -> None:
        assert self.do(Arrive((Segment(source, prompt),), output, **more)).status == "done"

    def serve(self, source: int, prompt: int, output: int = 1) -> None:
        """A request from its arrival to its end, and then a long wait."""
        self.arrive(source, prompt, output)
        self.do(Run(100))
        assert not self.scheduler.jobs
        self.do(Wait(1_000_000))

    def forget_on_device(self, source: int) -> None:
        """Somebody else's prompt takes all blocks, and gives them back."""
        self.serve(source, 4 * self.subject.configuration.blocks)

    def queued(self) -> list[TransferQueued]:
        return [event for event in self.events if isinstance(event, TransferQueued)]

    def delivered(self) -> dict[int, int]:
        return {e.transfer: e.now_ns for e in self.events if isinstance(e, TransferDelivered)}

    def deferred(self) -> list[Deferred]:
        return [event for event in self.events if isinstance(event, Deferred)]

    def standings(self) -> list[str]:
        """Of the live requests, by arrival."""
        view = self.subject.state_view
        return [view.standing(number)[0] for number in view.live()]

    def figure(self, name: str) -> int:
        return self.scheduler.metrics()[name]


# -- what copies cost ------------------------------------------------------------------------------


def test_a_copy_costs_its_latency_and_its_bytes() -> None:
    assert COST.copy_ns("store", 400) == COST.copy_ns("promote", 400) == 10 + 400
    assert COST.copy_ns("swap_out", 400) == COST.copy_ns("swap_in", 400) == 10 + 400
    assert COST.copy_ns("demote", 400) == COST.copy_ns("fetch", 400) == 50 + 800
    assert CostModel().copy_ns("store", 50_000_000_000) == 1_000_010_000
    assert CostModel().copy_ns("fetch", 5_000_000_000) == 1_000_100_000


# -- downwards -------------------------------------------------------------------------------------


def test_completed_blocks_are_stored_before_the_next_plan() -> None:
    world = World()
    world.arrive(1, 9, 3)
    world.do(Schedule())
    assert not world.queued()
    world.do(Retire())  # at 100 + 9 · 10 ns
    world.do(Schedule())
    (store,) = world.queued()
    assert store == TransferQueued(0, "store", 2, 800, 190, 190 + 10 + 800, 10, 1000)
    assert world.scheduler.next_delivery_ns == 1000


def test_a_channel_serves_one_copy_after_another() -> None:
    world = World(run_ahead=1)
    world.arrive(1, 9, 9)
    world.do(Run(1))
    world.do(Schedule())  # at 190 ns: two blocks, until 1000 ns
    for _ in range(3):
        world.do(Retire())
        world.do(Schedule())  # before the third, the third block is complete
    first, second = world.queued()
    assert (first.now_ns, first.due_ns) == (190, 1000)
    assert (second.now_ns, second.blocks) == (190 + 3 * 101, 1)
    assert second.due_ns == 1000 + 410
    assert world.do(Wait(1409 - world.clock.now_ns)).status == "done"
    assert world.delivered() == {0: 1000}
    world.do(Wait(1))
    assert world.delivered() == {0: 1000, 1: 1410}
    assert world.figure("store_busy_ns") == 810 + 410


def test_copies_of_different_kinds_do_not_wait_for_each_other() -> None:
    world = World(blocks=20, disk_blocks=32)
    world.arrive(1, 9, 60)
    world.do(Run(1))
    world.do(Schedule())
    world.do(Wait(810))
    world.do(Retire())
    world.do(Schedule())
    store, *later = world.queued()
    assert store.due_ns == 1000
    demote = next(copy for copy in later if copy.kind == "demote")
    assert demote == TransferQueued(1, "demote", 2, 800, 1000, 1000 + 50 + 1600, 50, 2000)


def test_no_more_is_stored_than_fits() -> None:
    world = World(host_blocks=2)
    world.serve(1, 16)
    world.serve(2, 16)
    assert [copy.blocks for copy in world.queued()][:2] == [2, 2]


def test_copies_are_delivered_when_a_step_ends() -> None:
    world = World(blocks=20)
    world.arrive(1, 9, 30)
    world.do(Run(1))
    finishes = [190 + 101 * steps for steps in range(1, 10)]
    for _ in finishes:
        assert not world.delivered()
        world.do(Run(1))
        if world.delivered():
            break
    assert world.delivered() == {0: next(ns for ns in finishes if ns >= 1000)}


# -- upwards ---------------------------------------------------------------------------------------


def test_a_request_waits_for_its_promotion_and_is_admitted_with_it() -> None:
    world = World()
    world.serve(1, 13)
    world.forget_on_device(2)
    world.events.clear()
    world.arrive(1, 13)
    started_ns = world.clock.now_ns
    world.do(Schedule())
    promote = next(copy for copy in world.queued() if copy.kind == "promote")
    assert (promote.blocks, promote.now_ns) == (3, started_ns)
    assert promote.due_ns == started_ns + 10 + 1200
    assert world.deferred() == [Deferred((2,), started_ns)]
    scheduled = next(event for event in world.events if isinstance(event, Scheduled))
    assert (scheduled.parts, scheduled.now_ns) == ((), started_ns + 100)
    world.do(Run(20))
    assert not world.scheduler.jobs
    assert world.delivered()[promote.transfer] == promote.due_ns
    assert world.deferred()[-1] == Deferred((), promote.due_ns)
    assert world.figure("prefix_cache_hits") == 12
    assert world.figure("promotions") == 1
    assert world.figure("promotion_time_ns") == 1210
    assert world.figure("stall_time_ns") == 1210
    assert world.figure("stalls") == len(world.deferred()) - 1 == 13
    assert world.harness.goals["deferred-for-kv"] == 13
    assert world.harness.goals["promoted-before-admission"] == 1


def test_time_passes_up_to_the_next_delivery_where_nothing_runs() -> None:
    world = World()
    world.serve(1, 5)
    world.forget_on_device(2)
    world.arrive(1, 5)
    started_ns = world.clock.now_ns
    for _ in range(5):
        world.do(Schedule())
    assert world.clock.now_ns == started_ns + 410
    world.do(Schedule())
    assert world.figure("prefix_cache_hits") == 4


def test_what_is_on_disk_comes_by_way_of_the_host() -> None:
    world = World(host_blocks=8, disk_blocks=32)
    world.serve(1, 13)
    world.forget_on_device(2)
    world.forget_on_device(3)
    world.events.clear()
    world.arrive(1, 13)
    world.do(Run(100))
    fetch = next(copy for copy in world.queued() if copy.kind == "fetch")
    promote = next(copy for copy in world.queued() if copy.kind == "promote")
    assert (fetch.blocks, fetch.due_ns - fetch.now_ns) == (3, 50 + 2400)
    assert promote.now_ns == fetch.due_ns
    assert world.figure("prefix_cache_hits") == 12
    assert (world.figure("fetches"), world.figure("fetch_time_ns")) == (1, 2450)
    assert world.figure("stall_time_ns") == 2450 + 1210


class Watcher:
    """As fcfs, and remembers whom it was shown."""

    promises = POLICIES["fcfs"]().promises

    def __init__(self) -> None:
        self.shown: list[tuple[int, ...]] = []
        self.extra: tuple[tuple[int, int], ...] = ()

    def plan(self, state: SchedulerState) -> Plan:
        self.shown.append(tuple([request.id for request in state.waiting]))
        plan = POLICIES["fcfs"]().plan(state)
        return Plan(plan.run + self.extra, plan.preempt, plan.swap, plan.reserve)


def test_nobody_overtakes_a_request_that_waits_for_its_kv() -> None:
    policy = Watcher()
    world = World(policy, blocks=12)
    world.serve(1, 13)
    world.forget_on_device(2)
    policy.shown.clear()
    world.arrive(9, 4)
    world.arrive(1, 13)
    world.arrive(9, 4)
    world.do(Run(2))
    assert policy.shown[:2] == [(2,), ()]
    world.do(Run(50))
    assert not world.scheduler.jobs
    admitted = [n for e in world.events if isinstance(e, Scheduled) for n in e.admitted]
    assert admitted == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_was_shown_hidden_and_shown_again_is_served(policy: str) -> None:
    """Policies may remember whom they saw; this one is shown while it does not fit."""
    world = World(policy)
    world.serve(1, 13)
    world.forget_on_device(2)
    world.arrive(3, 22, 4)
    world.do(Run(2))
    world.arrive(1, 13, priority=1)
    world.arrive(4, 5, priority=2)
    world.do(Run(60))
    assert not world.scheduler.jobs
    assert any(3 in event.requests for event in world.deferred())


@pytest.mark.parametrize("number", [2, 3])
def test_a_plan_may_not_run_whom_it_was_not_shown(number: int) -> None:
    policy = Watcher()
    world = World(policy, blocks=12)
    world.serve(1, 13)
    world.forget_on_device(2)
    world.arrive(1, 13)
    world.arrive(9, 4)
    policy.extra = ((number, 1),)
    outcome = world.harness.perform(Schedule())
    assert world.harness.violations[0].property == "PLAN"
    assert "which was not shown to it" in world.harness.violations[0].message
    assert outcome.status == "refused"
    assert any(isinstance(event, PlanRejected) for event in world.harness.last_events)


def test_promotions_are_for_the_first_waiting_requests_while_they_fit() -> None:
    def promoted(blocks: int) -> int:
        world = World(blocks=blocks, host_blocks=64)
        for source in range(1, 7):
            world.serve(source, 5)
        world.forget_on_device(9)
        world.events.clear()
        for source in range(1, 7):
            world.arrive(source, 5)
        world.do(Schedule())
        return len([copy for copy in world.queued() if copy.kind == "promote"])

    assert promoted(5) == 2
    assert promoted(6) == 3
    assert promoted(20) == LOOKED_AT == 4


def test_nothing_is_promoted_while_somebody_preempted_waits() -> None:
    world = World(blocks=6)
    world.serve(1, 9)
    world.forget_on_device(2)
    world.arrive(8, 10, 9)
    world.arrive(9, 10, 9)
    world.do(Run(5))
    assert world.scheduler.suspended
    world.arrive(1, 9)
    while world.scheduler.suspended:
        world.do(Run(1))
        assert "promote" not in [copy.kind for copy in world.queued()]
    world.do(Run(30))
    assert not world.scheduler.jobs


def test_a_request_is_promoted_for_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes is lost at once: still the request does not wait for ever."""
    world = World()
    world.serve(1, 13)
    world.forget_on_device(2)
    world.arrive(1, 13)
    promoted = 0
    for _ in range(10 * PROMOTIONS_MAX):
        world.do(Schedule())
        if not world.scheduler.waiting:
            break
        due_ns = world.scheduler.next_delivery_ns
        assert due_ns is not None
        world.do(Wait(due_ns - world.clock.now_ns))
        promoted += 1
        world.harness.cache.perform(Evict(8))
    assert promoted == PROMOTIONS_MAX
    assert world.figure("prefix_cache_hits") == 0
    world.do(Run(5))
    assert not world.scheduler.jobs


def test_an_aborted_request_does_not_wait_any_more() -> None:
    world = World()
    world.serve(1, 13)
    world.forget_on_device(2)
    world.arrive(1, 13)
    world.do(Schedule())
    world.do(Abort(0))
    world.do(Wait(5_000))
    world.arrive(3, 4)
    world.do(Run(3))
    assert not world.scheduler.jobs
    assert world.figure("stall_time_ns") == 0


# -- waiting, and draining -------------------------------------------------------------------------


def test_waiting_lets_time_pass_and_delivers_each_copy_when_it_has_come() -> None:
    world = World(offload="suspension", host_blocks=0)
    assert world.do(Wait(7)).status == "done"
    assert world.clock.now_ns == 7
    world.do(Wait())
    assert world.clock.now_ns == 7


def test_a_drained_run_leaves_no_copy_and_no_pin() -> None:
    world = World(disk_blocks=4, host_blocks=4)
    world.arrive(1, 29, 3)
    world.do(Run(1))
    world.do(Schedule())
    performed: list[Any] = []
    world.harness.drain(performed)
    assert not world.harness.violations
    assert isinstance(performed[-1], Wait)
    assert world.scheduler.next_delivery_ns is None
    assert not world.scheduler.engine.hierarchy.transfers
    assert world.harness.checks()["QUIES"]


def test_a_run_without_tiers_drains_as_ever() -> None:
    world = World(offload="suspension", host_blocks=0)
    performed: list[Any] = []
    world.harness.drain(performed)
    assert performed == [Run(64)]


def test_no_copy_is_begun_over_and_over_while_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full by itself, and not by an operation, would be a finding: no checks."""
    world = World(host_blocks=16, disk_blocks=16)
    world.harness = SchedulingHarness(world.subject, checked=False)
    failed = []

    def full(transfer: Any) -> None:
        failed.append(transfer)
        raise DiskFullError

    monkeypatch.setattr(world.scheduler.engine.hierarchy, "write", full)
    world.arrive(1, 9)
    world.do(Run(5))
    world.do(Wait(1 << 50))
    assert len(failed) == world.figure("transfers_failed") == 1
    assert world.scheduler.next_delivery_ns is None
    world.do(Wait(1 << 50))
    assert len(failed) == 2


# -- swaps -----------------------------------------------------------------------------------------


def test_swaps_are_copied_within_the_step_that_follows() -> None:
    world = World("fcfs_swap", blocks=4, host_blocks=8, offload="suspension")
    world.arrive(1, 8, 9)
    world.arrive(2, 8, 9)
    world.do(Run(1))
    assert world.clock.now_ns == 100 + 160
    world.do(Run(1))  # the later one makes room: two blocks of 400 bytes
    assert world.standings() == ["running", "swapped"]
    assert world.clock.now_ns == 260 + 100 + 1 + (10 + 800)
    while world.standings()[-1] == "swapped":
        before_ns = world.clock.now_ns
        world.do(Run(1))
    assert world.clock.now_ns == before_ns + 100 + 1 + (10 + 800)


# -- without offload -------------------------------------------------------------------------------


def test_without_prefix_offload_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offloader, "__init__", None)
    world = World(offload="suspension", host_blocks=8)
    world.serve(1, 9, 3)
    assert world.scheduler.offloader is None
    assert world.scheduler.next_delivery_ns is None
    assert not world.queued()


def test_figures_of_copies_are_0_without_them() -> None:
    with_tiers, without = World(), World(offload="none", host_blocks=0)
    names = without.scheduler.metrics().keys()
    assert names == with_tiers.scheduler.metrics().keys()
    for name in ("stalls", "stall_time_ns", "promotions", "fetch_time_ns", "store_busy_ns"):
        assert without.figure(name) == 0
