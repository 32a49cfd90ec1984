"""What mutants of the scheduler survived before: each test here kills some (docs/mutation.md)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvproof.engine import scheduler as scheduler_module
from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.engine import Engine
from kvproof.engine.job import Hit, Job
from kvproof.engine.policy import Limits, Plan, SchedulerState
from kvproof.engine.request import Request
from kvproof.engine.scheduler import Scheduler
from kvproof.invariants.operations import Abort, Arrive, Finish, Operation, Reserve, Segment
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.vocabulary import Scheduled, SchedulerEvent
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.subjects.engine import EngineSubject

STEP_NS = 100
NS_PER_COPY = 10
ONE_NS_A_BYTE = CostModel(
    step_ns=STEP_NS,
    prefill_token_ns=0,
    decode_sequence_ns=0,
    kv_token_read_ns=0,
    host_latency_ns=NS_PER_COPY,
    host_ps_per_byte=1000,
)


class Reader:
    """Reads out one plan after another, and remembers who ran."""

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)
        self.running: list[tuple[int, ...]] = []

    def plan(self, state: SchedulerState) -> Plan:
        self.running.append(tuple([request.id for request in state.running]))
        return self.plans.pop(0)


class World:
    """A scheduler by itself over a cache of blocks of four tokens, and what it said."""

    def __init__(
        self, *plans: Plan, groups: int = 1, cost: CostModel = ONE_NS_A_BYTE, **more: Any
    ) -> None:
        sizes = {"blocks": 16, "block_size": 4, "requests": 8, "scheduling": Limits()}
        configuration = Configuration(**(sizes | more))
        cache = EngineSubject(configuration, engine=partial(Engine, groups=groups))
        self.policy = Reader(*plans)
        self.clock = VirtualClock()
        self.events: list[SchedulerEvent] = []
        self.asked_for: list[Operation] = []
        self.finished: list[Job] = []

        def perform(operation: Operation) -> Outcome:
            self.asked_for.append(operation)
            return cache.apply(operation)

        self.scheduler = Scheduler(
            cache,
            self.policy,
            perform=perform,
            emit=self.events.append,
            clock=self.clock,
            cost=cost,
            on_finished=self.finished.append,
        )

    def arrive(self, *prompts: int, output: int = 9, source: int | None = None) -> None:
        """Prompts have nothing in common, but for those of the same ``source``."""
        for prompt in prompts:
            number = self.scheduler.arrivals if source is None else source
            arrival = Arrive((Segment(number, prompt),), output)
            assert self.scheduler.arrive(arrival).status == "done"

    def step(self) -> Outcome:
        outcome = self.scheduler.schedule()
        assert outcome.status == "done"
        self.scheduler.retire()
        return outcome

    def step_ns(self) -> int:
        before_ns = self.clock.now_ns
        self.step()
        return self.clock.now_ns - before_ns

    def request(self, number: int) -> Request:
        found = self.scheduler.jobs[number].cache
        assert found is not None
        return found


def run(*items: tuple[int, int], **more: Any) -> Plan:
    return Plan(items, **more)


def test_those_who_run_are_shown_as_they_were_admitted() -> None:
    world = World(run((1, 4), (0, 4)), run((2, 4)), run((4, 4), (3, 4)), run((0, 1)))
    world.arrive(4, 4, 4, 4, 4)
    for _ in range(4):
        world.step()
    assert world.policy.running[-1] == (1, 0, 2, 4, 3)


def test_iterations_are_numbered_and_say_how_many_tokens_they_run() -> None:
    world = World(run((0, 4), (1, 5)), run(), run((0, 1), (1, 1)))
    world.arrive(4, 5)
    counts = [world.step().count for _ in range(3)]
    assert counts == [9, 0, 2]
    scheduled = [event for event in world.events if isinstance(event, Scheduled)]
    assert [event.iteration for event in scheduled] == [0, 1, 2]


def test_swaps_take_the_time_of_their_bytes_in_all_groups() -> None:
    world = World(
        run((0, 6), (1, 4)),
        run((2, 1), swap=(0, 1)),
        run((0, 1), (1, 1)),
        run((2, 1)),
        groups=2,
        host_blocks=8,
        kv_bytes_per_token=1000,
    )
    world.arrive(6, 4, 1)
    times = [world.step_ns() for _ in range(4)]
    copies_ns = 2 * NS_PER_COPY + (2 + 1) * 2 * 4 * 1000
    assert times == [STEP_NS, STEP_NS + copies_ns, STEP_NS + copies_ns, STEP_NS]
    assert all(type(time) is int for time in times)


def test_a_policy_has_the_seconds_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(run((0, 4)))
    world.arrive(4)
    given: list[float] = []

    def call(policy: Reader, state: Any, seconds: float = 0.0) -> Plan:
        given.append(seconds)
        return policy.plan(state)

    monkeypatch.setattr(scheduler_module, "call_policy", call)
    world.step()
    assert given == [scheduler_module.SECONDS_PER_CALL]


def test_a_step_costs_what_it_computes_and_reads() -> None:
    cost = CostModel(step_ns=0, prefill_token_ns=1, decode_sequence_ns=100, kv_token_read_ns=10_000)
    world = World(run((0, 4), (1, 6)), run((0, 1), (1, 1), (2, 3)), cost=cost)
    world.arrive(4, 6, 3)
    assert world.step_ns() == 10 + 10 * 10_000
    assert world.step_ns() == 3 + 2 * 100 + (5 + 7 + 3) * 10_000


def test_the_first_token_is_first_though_it_comes_at_once() -> None:
    at_once = CostModel(step_ns=0, prefill_token_ns=0, decode_sequence_ns=0, kv_token_read_ns=0)
    world = World(run((0, 4)), run((0, 1)), cost=at_once)
    world.arrive(4)
    world.step()
    world.scheduler.wait(50)
    world.step()
    assert world.scheduler.request_metrics(0)["decode_time_ns"] == 50


def test_a_request_that_stops_is_handed_over_and_finished() -> None:
    world = World(run((0, 4), (1, 4)), run((1, 1)))
    world.arrive(4, output=1)
    world.arrive(4)
    (job, _) = world.scheduler.jobs.values()
    assert world.scheduler.run(2) == Outcome("done", count=2)
    assert world.finished == [job]
    assert [one for one in world.asked_for if isinstance(one, Abort | Finish)] == [Finish(0)]


def test_a_retired_step_says_how_many_tokens_it_sampled() -> None:
    world = World(run((0, 4), (1, 4), (2, 3)))
    world.arrive(4, 4, 4)
    world.scheduler.schedule()
    assert world.scheduler.retire() == Outcome("done", count=2)


# -- blocks ----------------------------------------------------------------------------------------

FIRST = [(4, 1), (3, 1), (5, 1)]
"""A newcomer, one that was swapped out, and one that finds the first of its two tokens."""


@pytest.mark.parametrize("first", FIRST)
def test_no_allocation_evicts_what_another_admission_finds(first: tuple[int, int]) -> None:
    """The pool is full of cached blocks of a token each, and those to be found are the oldest."""
    world = World(
        run((0, 2)),
        run((1, 1)),
        run((2, 4), (3, 1)),
        run(swap=(3,)),
        run(first, (6, 1)),
        blocks=8,
        block_size=1,
        host_blocks=2,
    )
    world.arrive(2, output=1, source=50)
    world.arrive(1, output=1, source=60)
    world.arrive(4, output=1, source=70)
    world.arrive(1, output=3)
    for _ in range(4):
        world.step()
    world.arrive(1, output=3)
    world.arrive(3, output=3, source=60)
    world.arrive(3, output=3, source=50)
    assert world.scheduler.engine.pools[0].cached_free_count == 8
    world.step()
    assert world.request(6).cached_tokens == 2


def test_nothing_is_reserved_that_is_there() -> None:
    world = World(run((0, 4), reserve=((0, 8),)), run((0, 4)), run((0, 4)))
    world.arrive(12)
    for _ in range(3):
        world.step()
    asked_for = [one for one in world.asked_for if isinstance(one, Reserve)]
    assert asked_for == [Reserve(0, 12)]


def test_what_comes_back_takes_blocks_for_what_it_computes() -> None:
    world = World(run((0, 12)), Plan(preempt=(0,)), run((0, 4)), prefix_caching=False)
    world.arrive(12)
    for _ in range(3):
        world.step()
    assert len(world.request(0).tables[0]) == 1


def test_what_waits_is_looked_up_once_in_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.arrive(4, 4)
    scheduler = world.scheduler
    looked_up: list[int] = []
    look_up = scheduler._look_up

    def counted(job: Job) -> Hit:
        looked_up.append(job.id)
        return look_up(job)

    monkeypatch.setattr(scheduler, "_look_up", counted)
    monkeypatch.setattr(scheduler_module, "_REMEMBERED_HITS", 1)
    first, second = scheduler.jobs.values()
    for job in (first, first, second, second, first):
        assert scheduler.hit_of(job) == Hit(0, 0, 0)
    assert looked_up == [0, 1, 0], "one hit is remembered"
    scheduler.engine.pools[0].generation += 1
    scheduler.hit_of(first)
    assert looked_up == [0, 1, 0, 0]


def test_who_was_admitted_is_looked_up_anew() -> None:
    """It finds the block of its prompt only when there is a token behind it.  What it gives back is
    still read by a step, so no generation of the pool has passed by then."""
    again = run((1, 1))
    world = World(run((0, 4)), run((1, 4)), again, Plan(preempt=(1,)), again, run_ahead=2)
    world.arrive(4, source=50)
    world.step()
    world.arrive(4, source=50)
    world.scheduler.schedule()
    world.scheduler.schedule()
    world.scheduler.retire()
    (pool,) = world.scheduler.engine.pools
    generation = pool.generation
    world.scheduler.schedule()
    assert pool.generation == generation
    assert world.scheduler.hit_of(world.scheduler.jobs[1]).cached_tokens == 4
    assert world.scheduler.schedule() == Outcome("done", count=1)


def test_a_hit_that_is_not_remembered_is_none_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_REMEMBERED_HITS", 1)
    world = World(run((0, 4), (1, 4)))
    world.arrive(4, 4)
    assert world.step().count == 8
