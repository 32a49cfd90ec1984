"""The scheduler under policies that only read out plans: each test knows what happens when.

All runs but those of rejected plans are checked, cache and scheduler, at each operation.
"""

from __future__ import annotations

import re
from typing import Any, cast, get_args, get_type_hints

import pytest
from msgspec import Struct

from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.policies import POLICIES
from kvproof.engine.policy import Limits, Plan, SchedulerPolicy, SchedulerState
from kvproof.engine.scheduler import SchedulerError
from kvproof.invariants.checker import CheckerError
from kvproof.invariants.errors import InputError
from kvproof.invariants.events import Event, StepLaunched
from kvproof.invariants.operations import Abort, Arrive, Operation, Retire, Run, Schedule, Segment
from kvproof.invariants.outcomes import (
    LARGER_THAN_MODEL,
    LARGER_THAN_POOL,
    NOTHING_TO_RUN,
    POLICY_FAILED,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.scheduling.checks.live import Live
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    PlanRejected,
    RequestArrived,
    Scheduled,
)
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

PLAIN_COST = CostModel(step_ns=100, prefill_token_ns=10, decode_sequence_ns=1, kv_token_read_ns=0)


class Scripted:
    """Reads out one plan after another."""

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)
        self.states: list[tuple[int, ...]] = []

    def plan(self, state: SchedulerState) -> Plan:
        return self.plans.pop(0)


class World:
    """A scheduler over a small cache, and what it said."""

    def __init__(
        self,
        *plans: Plan,
        policy: SchedulerPolicy | None = None,
        checked: bool = True,
        blocks: int = 8,
        requests: int = 8,
        run_ahead: int = 1,
        host_blocks: int = 0,
        prefix_caching: bool = True,
        **limits: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.subject = SchedulerSubject(
            Configuration(
                blocks=blocks,
                block_size=4,
                requests=requests,
                run_ahead=run_ahead,
                host_blocks=host_blocks,
                prefix_caching=prefix_caching,
                scheduling=Limits(**limits),
            ),
            policy=lambda: policy or Scripted(*plans),
            clock=self.clock,
            cost=PLAIN_COST,
        )
        self.scheduler = self.subject.scheduler
        self.engine = self.scheduler.engine
        self.harness = SchedulingHarness(self.subject, audit_interval=1) if checked else None
        self.events: list[Event] = []

    def do(self, operation: Operation) -> Outcome:
        if self.harness is None:
            outcome = self.subject.apply(operation)
            self.events += self.subject.drain_events()
        else:
            outcome = self.harness.perform(operation)
            assert not self.harness.violations, self.harness.violations
            self.events += self.harness.last_events
        return outcome

    def arrive(self, prompt: int, output: int = 1, longest: int = 0, **more: Any) -> Outcome:
        """Prompts of two requests have nothing in common, unless ``source`` says so."""
        source = more.pop("source", 100 + self.scheduler.arrivals)
        return self.do(Arrive((Segment(source, prompt),), output, longest, **more))

    def schedule(self) -> Scheduled:
        assert self.do(Schedule()).status == "done"
        return next(e for e in reversed(self.events) if isinstance(e, Scheduled))

    def retire(self) -> Completed:
        assert self.do(Retire()).status == "done"
        return next(e for e in reversed(self.events) if isinstance(e, Completed))

    def step(self) -> Completed:
        """One iteration, scheduled and retired."""
        self.schedule()
        return self.retire()

    def standing(self, request: int) -> tuple[str, int, int]:
        return self.subject.state_view.standing(request)

    def shares(self) -> list[dict[int, int]]:
        """Per iteration the tokens of each request."""
        return [
            {part.request: part.tokens for part in event.parts}
            for event in self.events
            if isinstance(event, Scheduled)
        ]

    def sampled(self) -> list[int]:
        return [n for e in self.events if isinstance(e, Completed) for n in e.sampled]

    @property
    def free(self) -> int:
        return self.scheduler.metrics()["kv_blocks_free"]


def run(*items: tuple[int, int], **more: Any) -> Plan:
    return Plan(items, **more)


# -- the life of a request -------------------------------------------------------------------------


def test_a_request_waits_is_admitted_decodes_and_ends() -> None:
    world = World(run((0, 6)), run((0, 1)), run((0, 1)))
    assert world.arrive(6, output=3) == Outcome("done", request=0)
    assert world.standing(0) == ("waiting", 0, 0)
    scheduled = world.schedule()
    assert (scheduled.admitted, scheduled.resumed, scheduled.step) == ((0,), (), 0)
    assert world.standing(0) == ("running", 0, 0)
    completed = world.retire()
    assert (completed.sampled, completed.finished) == ((0,), ())
    assert world.standing(0) == ("running", 1, 0)
    assert not world.step().finished
    assert world.step().finished == (0,)
    assert world.subject.state_view.live() == []
    assert world.free == 8
    # The KV of the last token is never computed: 6 + 2.
    assert sum(sum(share.values()) for share in world.shares()) == 8


def test_a_request_of_one_token_ends_with_its_prefill() -> None:
    world = World(run((0, 4)))
    world.arrive(4)
    assert world.step() == Completed(0, 140, (0,), (0,))


def test_a_prompt_in_chunks_samples_with_its_last_one() -> None:
    world = World(run((0, 4)), run((0, 5)), run((0, 1)), token_budget=5)
    world.arrive(10)
    assert [world.step().sampled for _ in range(3)] == [(), (), (0,)]
    assert world.shares() == [{0: 4}, {0: 5}, {0: 1}]


def test_a_chunk_takes_blocks_for_what_it_computes_only() -> None:
    world = World(run((0, 4)), run((0, 6)))
    world.arrive(10)
    world.step()
    assert world.free == 7
    world.schedule()
    assert world.free == 5


def test_all_that_decode_get_a_token_in_each_iteration() -> None:
    world = World(policy=POLICIES["fcfs"]())
    for _ in range(3):
        world.arrive(4, output=5)
    world.do(Run(5))
    assert world.shares() == [{0: 4, 1: 4, 2: 4}, *[{0: 1, 1: 1, 2: 1}] * 4]
    assert world.sampled() == [0, 1, 2] * 5


@pytest.mark.parametrize(
    ("narrow", "policy"),
    [
        ({"requests": 2}, "fcfs"),
        ({"blocks": 5}, "guaranteed_no_evict"),
    ],
)
def test_a_finished_requests_slot_is_reused_in_the_next_iteration(
    narrow: dict[str, Any], policy: str
) -> None:
    """The chapter's chain: the short one ends, its slot is taken, the long one goes on."""
    world = World(policy=POLICIES[policy](), prefix_caching=False, **narrow)
    world.arrive(4, output=6)  # long: 9 tokens, 3 blocks
    world.arrive(4, output=2)  # short: 5 tokens, 2 blocks
    world.arrive(4, output=3)  # waits: 6 tokens, 2 blocks
    world.do(Run(6))
    assert world.shares() == [
        {0: 4, 1: 4},
        {0: 1, 1: 1},
        {0: 1, 2: 4},  # request 1 ended with the iteration before
        {0: 1, 2: 1},
        {0: 1, 2: 1},
        {0: 1},
    ]
    assert world.subject.state_view.live() == []


def test_an_iteration_may_run_nothing() -> None:
    world = World(run(), run((0, 4)))
    world.arrive(4)
    assert world.schedule().step is None
    assert world.do(Retire()) == SKIPPED
    assert world.step().sampled == (0,)


def test_time_passes_where_nothing_runs() -> None:
    world = World(Plan(), Plan(), run((0, 4)), Plan(), run_ahead=2)
    world.arrive(4)
    for now in (100, 200):
        assert world.schedule().now_ns == world.clock.now_ns == now, "one step's base cost"
    for _ in range(2):
        assert world.schedule().now_ns == 200, "not while a step is in flight: it takes its time"
    assert world.retire().now_ns == 340


def test_there_is_nothing_to_schedule_or_to_run_without_requests() -> None:
    world = World()
    assert world.do(Schedule()) == Outcome("refused", NOTHING_TO_RUN)
    assert world.do(Run(3)) == Outcome("refused", NOTHING_TO_RUN)
    assert world.do(Abort(0)) == SKIPPED


def test_run_ends_early_when_nothing_is_left() -> None:
    world = World(policy=POLICIES["fcfs"]())
    world.arrive(4, output=2)
    assert world.do(Run(9)) == Outcome("done", count=2)


# -- running ahead ---------------------------------------------------------------------------------


def test_a_token_is_computed_while_it_is_being_sampled() -> None:
    world = World(run((0, 4)), run((0, 1)), run((0, 1)), run_ahead=2)
    world.arrive(4, output=3)
    world.schedule()
    world.schedule()
    assert world.standing(0)[1] == 0, "nothing is known yet"
    assert world.do(Schedule()) == Outcome("refused", RUN_AHEAD_LIMIT)
    assert world.retire().sampled == (0,)
    world.schedule()
    assert world.retire().sampled == (0,)
    assert world.retire().finished == (0,)
    assert world.shares() == [{0: 4}, {0: 1}, {0: 1}]


def test_an_early_stop_voids_the_step_that_ran_ahead_and_its_blocks_stay_fenced() -> None:
    world = World(run((0, 4)), run((0, 1)), run_ahead=2)
    world.arrive(4, output=1, longest=4)
    world.schedule()
    world.schedule()
    assert world.retire().finished == (0,)
    assert world.free == 6, "the second step still writes the second block"
    assert world.retire() == Completed(1, world.clock.now_ns, (), ())
    assert world.free == 8


def test_what_stops_for_certain_is_not_run_ahead() -> None:
    world = World(policy=POLICIES["fcfs"](), run_ahead=2)
    world.arrive(4, output=2)
    assert [bool(world.schedule().parts) for _ in range(2)] == [True, True]
    world.retire()
    assert world.schedule().parts == (), "its second token is its last"
    assert world.retire().finished == (0,)


def test_a_state_tells_what_is_in_flight_ready_and_fenced() -> None:
    seen: list[tuple[Any, ...]] = []

    class Watches(Scripted):
        def plan(self, state: SchedulerState) -> Plan:
            running = [(r.id, r.in_flight, r.pending_tokens) for r in state.running]
            seen.append((running, state.free_blocks, state.cached_free_blocks, state.fenced_blocks))
            return super().plan(state)

    plans = (run((0, 4), (1, 5)), run((1, 1)), run(), run())
    world = World(policy=Watches(*plans), run_ahead=2)
    world.arrive(4)
    world.arrive(5, output=3)
    world.schedule()
    world.schedule()
    world.retire()
    world.schedule()
    world.do(Abort(0))  # request 1, which the second step carries
    world.arrive(4)
    world.schedule()
    assert seen == [
        ([], 8, 0, 0),
        ([(0, True, 0), (1, True, 1)], 5, 0, 0),
        ([(1, True, 1)], 6, 1, 0),  # request 0 has left a full block behind
        ([], 6, 1, 2),
    ]


# -- preemption ------------------------------------------------------------------------------------


def test_a_preempted_request_recomputes_all_and_keeps_its_output_in_order() -> None:
    world = World(
        run((0, 6)),
        run((0, 1)),
        Plan(preempt=(0,)),
        run((0, 8)),  # 6 + 2, of which the last was delivered, but never computed
        run((0, 1)),
        prefix_caching=False,
    )
    world.arrive(6, output=4)
    world.step()
    world.step()
    request = world.scheduler.jobs[0].cache
    assert request is not None
    tokens = list(request.tokens)
    world.schedule()
    assert world.standing(0) == ("preempted", 2, 1)
    assert world.free == 8
    scheduled = world.schedule()
    assert (scheduled.admitted, scheduled.resumed) == ((), (0,))
    assert world.retire().sampled == (0,)
    assert world.standing(0) == ("running", 3, 1)
    assert list(request.tokens)[: len(tokens)] == tokens
    assert world.step().finished == (0,)
    assert world.sampled() == [0] * 4
    assert world.scheduler.metrics()["resumptions"] == 1


def test_a_resumed_request_finds_its_own_blocks_again() -> None:
    world = World(run((0, 9)), Plan(preempt=(0,)), run((0, 2)))
    world.arrive(9, output=2)
    world.step()
    world.schedule()
    world.schedule()  # 10 tokens are known, 8 of them cached
    assert world.retire().finished == (0,)


def test_a_resumption_in_chunks_delivers_nothing_again() -> None:
    world = World(
        run((0, 4)), run((0, 1)), run((0, 1)), Plan(preempt=(0,)), run((0, 4)), run((0, 2)),
        run((0, 1)), prefix_caching=False,
    )  # fmt: skip
    world.arrive(4, output=4)
    for _ in range(3):
        world.step()
    world.schedule()
    # Up to the first two output tokens: the third is known as well, so nothing is sampled.
    assert [world.step().sampled for _ in range(3)] == [(), (), (0,)]
    assert world.sampled() == [0] * 4


def test_a_swapped_request_gets_its_tokens_back() -> None:
    world = World(
        run((0, 6)), run((0, 1)), Plan(swap=(0,)), run((0, 1)), run((0, 1)), host_blocks=2
    )
    world.arrive(6, output=4)
    world.step()
    world.step()
    world.schedule()
    assert world.standing(0) == ("swapped", 2, 1)
    assert (world.free, len(world.engine.steps)) == (8, 0)
    assert world.step().sampled == (0,)
    assert world.shares()[-1] == {0: 1}, "nothing is recomputed"
    assert world.step().finished == (0,)
    figures = world.scheduler.metrics()
    assert (figures["host_promotions"], figures["resumptions"]) == (2, 1)


def test_a_token_sampled_before_a_preemption_is_delivered_once() -> None:
    """Step 0 samples it, and so does step 1, which recomputes all since the preemption."""
    world = World(run((0, 4)), Plan(preempt=(0,)), run((0, 4)), run((0, 1)), run_ahead=3)
    world.arrive(4, output=3)
    world.schedule()
    world.schedule()
    world.schedule()
    assert world.retire().sampled == (0,)
    assert world.standing(0) == ("running", 1, 1)
    assert world.retire().sampled == ()
    assert world.standing(0) == ("running", 1, 1)
    assert world.step().sampled == (0,)


def test_a_preempted_request_may_end_with_the_token_of_an_earlier_step() -> None:
    world = World(run((0, 4)), Plan(preempt=(0,)), run_ahead=2)
    world.arrive(4)
    world.schedule()
    world.schedule()
    assert world.standing(0)[0] == "preempted"
    assert world.retire().finished == (0,)
    assert world.subject.state_view.live() == []
    assert world.free == 8


# -- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "longest", "reason"),
    [
        (26, 3, None),  # 28 tokens of KV: 7 blocks, beside a watermark of 1
        (26, 4, LARGER_THAN_POOL),
        (60, 4, LARGER_THAN_MODEL),
        (30, 1, LARGER_THAN_MODEL),
        (29, 1, LARGER_THAN_POOL),
    ],
)
def test_what_never_fits_is_refused_at_once(prompt: int, longest: int, reason: str | None) -> None:
    world = World(watermark_blocks=1, max_model_tokens=30)
    outcome = world.arrive(prompt, output=1, longest=longest)
    assert outcome == (Outcome("refused", reason) if reason else Outcome("done", request=0))


def test_a_refused_request_is_nobody() -> None:
    world = World(run((0, 4)))
    assert world.arrive(40).status == "refused"
    assert world.arrive(4).request == 0
    assert world.step().finished == (0,)


def test_a_reservation_is_taken_at_admission_and_grown_into() -> None:
    plans = [run((0, 4), reserve=((0, 9),)), *[run((0, 1))] * 5]
    world = World(*plans)
    world.arrive(4, output=6)
    free = [world.free]
    for _ in range(5):
        world.step()
        free.append(world.free)
    assert free == [8, 5, 5, 5, 5, 5]
    assert world.step().finished == (0,)


def test_a_reservation_below_what_is_computed_changes_nothing() -> None:
    world = World(run((0, 9), reserve=((0, 2),)))
    world.arrive(9)
    world.schedule()
    assert world.free == 5


def test_draft_and_scheduler_agree_on_the_watermark() -> None:
    world = World(policy=POLICIES["fcfs"](), blocks=4, watermark_blocks=1)
    world.arrive(8)
    world.arrive(5)
    assert world.schedule().admitted == (0,), "with both, no block would be left free"


def test_whole_prefills_wait_for_the_budget() -> None:
    world = World(
        policy=POLICIES["fcfs"](),
        chunked_prefill=False,
        token_budget=12,
        max_model_tokens=12,
    )
    world.arrive(7)
    world.arrive(6)
    world.do(Run(2))
    assert world.shares() == [{0: 7}, {1: 6}]


def test_whole_prefills_need_a_budget_for_the_longest_request() -> None:
    with pytest.raises(InputError, match=r"budget \(11\) must hold the longest request \(12 tok"):
        World(chunked_prefill=False, token_budget=11, max_model_tokens=12)


def test_the_hits_of_one_admission_survive_the_allocation_of_another() -> None:
    """Six blocks, four of them cached: request 2 needs three, so one of the four is evicted.

    The oldest are the hit of request 3, which stands behind it in the plan: it is taken first.
    """
    world = World(run((0, 8)), run((1, 8)), run((2, 12), (3, 1)), blocks=6)
    world.arrive(8, source=0)
    world.step()
    world.arrive(8, source=1)
    world.step()
    world.arrive(12, source=2)
    world.arrive(9, source=0)
    world.schedule()
    assert world.subject.state_view.request_metrics(3)["cached_tokens"] == 8
    assert world.shares()[-1] == {2: 12, 3: 1}
    assert world.scheduler.metrics()["evictions"] == 2, "those of request 1"
    launched = next(e for e in reversed(world.events) if isinstance(e, StepLaunched))
    assert sorted((item.start, item.end) for item in launched.items) == [(0, 12), (8, 9)]


def test_a_request_whose_prompt_is_cached_computes_its_last_token() -> None:
    world = World(run((0, 8)), run((1, 4)))
    world.arrive(8, source=0)
    world.step()
    world.arrive(8, source=0)
    world.step()
    assert world.shares() == [{0: 8}, {1: 4}], "the block of the last token is computed anew"


# -- aborts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "plans", "run_ahead"),
    [
        ("waiting", (), 1),
        ("running", (run((0, 6)),), 1),
        ("preempted", (run((0, 6)), Plan(preempt=(0,))), 1),
        ("swapped", (run((0, 6)), Plan(swap=(0,))), 1),
        ("running", (run((0, 6)),), 2),  # in flight
        ("preempted", (run((0, 6)), Plan(preempt=(0,))), 2),
    ],
)
def test_an_abort_takes_a_request_from_wherever_it_stands(
    state: str, plans: tuple[Plan, ...], run_ahead: int
) -> None:
    world = World(*plans, run((1, 4)), run_ahead=run_ahead, host_blocks=2)
    world.arrive(6, output=2)
    for _ in plans:
        world.schedule()
        if run_ahead == 1:
            world.do(Retire())
    assert world.standing(0)[0] == state
    assert world.do(Abort(0)) == Outcome("done", request=0)
    assert world.subject.state_view.live() == []
    if run_ahead > 1:
        assert world.free == 6, "the step in flight still writes its blocks"
        assert world.retire().sampled == ()
    assert world.free == 8
    assert world.engine.host_free(0) == 2
    world.arrive(4)
    assert world.step().finished == (1,)
    with pytest.raises(KeyError):
        world.scheduler.abort(0)


# -- figures and time ------------------------------------------------------------------------------


def test_queue_prefill_and_decode_times() -> None:
    plans = (run((0, 4)), run((0, 1), (1, 2)), run((1, 2)), run((1, 1)))
    world = World(*plans, requests=2)
    times = world.subject.state_view.request_metrics
    world.arrive(4, output=2)
    world.step()  # 100 + 4 * 10
    assert world.clock.now_ns == 140
    world.arrive(4, output=3)
    assert times(1) == {
        "input_tokens": 4, "cached_tokens": 0, "allocated_blocks": 0, "preemptions": 0,
        "queue_time_ns": 0, "prefill_time_ns": 0, "decode_time_ns": 0,
    }  # fmt: skip
    world.clock.advance(60)  # it waits until 200
    world.step()  # 100 + 2 * 10 + 1
    assert world.clock.now_ns == 321
    world.step()  # 100 + 2 * 10
    assert (times(1)["queue_time_ns"], times(1)["prefill_time_ns"]) == (60, 241)
    world.step()  # 100 + 1
    assert times(1)["decode_time_ns"] == 101


def test_a_preemption_does_not_restart_the_times() -> None:
    world = World(run((0, 4)), Plan(preempt=(0,)), run((0, 5)))
    times = world.subject.state_view.request_metrics
    world.arrive(4, output=3)
    world.step()
    before = times(0)
    world.schedule()
    world.clock.advance(1000)
    assert times(0)["queue_time_ns"] == before["queue_time_ns"]
    world.step()
    after = times(0)
    assert (after["queue_time_ns"], after["prefill_time_ns"]) == (0, before["prefill_time_ns"])
    assert (after["decode_time_ns"], after["preemptions"]) == (1250, 1), "1000 + 2 x 100 + 50"


def test_steps_in_flight_take_their_time_one_after_another() -> None:
    world = World(run((0, 4)), run((0, 1)), run_ahead=2)
    world.arrive(4, output=3)
    world.schedule()
    world.schedule()
    assert world.clock.now_ns == 0
    assert [world.retire().now_ns for _ in range(2)] == [140, 241]


def test_an_arrival_is_not_before_its_time() -> None:
    world = World(run((0, 4)), run((0, 1)))
    world.arrive(4, output=2, at_ns=500)
    assert world.clock.now_ns == 500, "the clock moves on to it"
    world.step()
    assert world.subject.state_view.request_metrics(0)["queue_time_ns"] == 0
    world.arrive(4, at_ns=200)
    assert world.scheduler.jobs[1].arrival_ns == world.clock.now_ns == 640, "and never back"


def test_figures_count_what_happened() -> None:
    world = World(
        run((0, 8), (1, 4)), run((0, 1), (1, 1)), Plan(preempt=(1,)), run((0, 1), (1, 2)),
        run((2, 1)), host_blocks=2,
    )  # fmt: skip
    world.arrive(8, output=3, source=0)
    world.arrive(4, output=3)
    world.step()
    figures = world.scheduler.metrics()
    assert figures["active_sequences"] == figures["batch_size_by_iteration"] == 2
    assert figures["live_cached_tokens"] == 12
    world.step()
    world.schedule()
    assert world.scheduler.metrics()["waiting_sequences"] == 1
    world.step()
    world.arrive(9, source=0)
    assert world.step().finished == (2,)
    figures = world.scheduler.metrics()
    told = ("admissions", "preemptions", "resumptions", "iterations", "prefix_cache_hits")
    assert [figures[name] for name in told] == [3, 1, 1, 4, 8]
    assert figures["prefix_cache_queries"] == 8 + 4 + 9
    assert (figures["active_sequences"], figures["waiting_sequences"]) == (0, 0)


# -- plans that break the contract -----------------------------------------------------------------


class Bad(Struct, frozen=True):
    """A plan that must be rejected as a whole."""

    kind: str
    plan: Plan
    message: str


_GOOD = ((1, 1),)
"""Each bad plan also does this, which by itself is fine."""

BAD_PLANS = (
    Bad("unknown_request", run((9, 1)), "the plan runs request 9: there is none"),
    Bad("unknown_request", run((-1, 1)), "the plan runs request -1: there is none"),
    Bad("unknown_request", run((0, 1)), "the plan runs request 0: it has ended"),
    Bad("unknown_request", Plan(_GOOD, preempt=(0,)), "the plan preempts request 0: it has ended"),
    Bad("twice", run(*_GOOD, *_GOOD), "the plan runs request 1 twice"),
    Bad("twice", Plan(preempt=(1, 1)), "the plan preempts request 1 twice"),
    Bad("twice", Plan(preempt=(1,), swap=(1,)), "the plan preempts request 1 twice"),
    Bad("twice", Plan(_GOOD, preempt=(1,)), "the plan both preempts and runs request 1"),
    Bad("impossible", Plan(_GOOD, preempt=(4,)), "preempts request 4, which is waiting"),
    Bad("impossible", Plan(_GOOD, preempt=(3,)), "preempts request 3, which is preempted"),
    Bad(
        "impossible",
        run(*_GOOD, (2, 1)),
        "runs request 2, whose next token a step in flight is sampling",
    ),
    Bad("impossible", run((1, 2)), "runs 2 tokens of request 1, which has 1 to compute"),
    Bad("impossible", run((1, 0)), "runs 0 tokens of request 1, which has 1 to compute"),
    Bad("impossible", run((1, -1)), "runs -1 tokens of request 1, which has 1 to compute"),
    Bad("impossible", run((3, 8)), "runs 8 tokens of request 3, which has 4 to compute"),
    Bad(
        "budget",
        run((4, 9), (5, 13)),
        "computes 22 tokens in one iteration, but the token budget is 16",
    ),
    Bad("sequences", run((3, 4), (4, 9)), "makes 4 requests run, but at most 3 may"),
    Bad(
        "blocks",
        run((5, 13), reserve=((5, 24),)),
        "needs 6 blocks (6 for r5), but 5 are free (2 of them cached-free, which free_blocks "
        "includes), of which 1 must stay free (the watermark)",
    ),
    Bad("watermark", run((5, 13), reserve=((5, 20),)), "needs 5 blocks (5 for r5), but 5 are free"),
    Bad(
        "blocks",
        Plan(((5, 13),), preempt=(1,), reserve=((5, 32),)),
        "needs 8 blocks (8 for r5, counted without prefix hits, because it preempts), but 5 are "
        "free (2 of them cached-free, which free_blocks includes) and 2 become free by preemption",
    ),
    Bad("host_blocks", Plan(swap=(1,)), "swaps out 2 blocks, but 1 host blocks are free"),
    Bad("in_flight", Plan(swap=(2,)), "swaps out request 2, which a step in flight is computing"),
    Bad("reserve", Plan(_GOOD, reserve=((1, 9),)), "reserves for request 1, which it does not"),
    Bad("reserve", Plan(_GOOD, reserve=((9, 9),)), "reserves for request 9, which it does not"),
    Bad(
        "reserve",
        run((4, 9), reserve=((4, 33),)),
        "reserves 33 tokens for request 4; the pool has 32",
    ),
)


def _crowded() -> World:
    """Request 0 has ended, 1 runs, 2 is in flight, 3 is preempted, 4 and 5 wait."""
    world = World(
        run((0, 5), (1, 6)),
        run((3, 7)),
        Plan(((2, 4),), preempt=(3,)),
        checked=False,
        requests=3,
        run_ahead=2,
        host_blocks=1,
        token_budget=16,
        watermark_blocks=1,
    )
    world.arrive(5)
    world.arrive(6, output=8)
    world.arrive(4)
    world.arrive(7, output=5)
    world.step()
    world.step()
    world.schedule()
    world.arrive(9)
    world.arrive(13)
    return world


def _everything(world: World) -> Any:
    """All that a plan can change."""
    scheduler, engine = world.scheduler, world.engine
    return (
        [(pool.ref_counts[:], pool.keys[:], [*pool.free_blocks()]) for pool in engine.pools],
        engine.host_free(0),
        [
            (r.id, [*r.tokens], [[*table] for table in r.tables], r.computed, r.scheduled, r.epoch)
            for r in engine.requests.values()
        ],
        [r.id for r in engine.running],
        [r.id for r in engine.preempted],
        [step.number for step in engine.steps],
        [(j.id, j.state, j.outputs, j.rank) for j in scheduler.jobs.values()],
        [state.id for state in scheduler.waiting],
        [*scheduler.suspended],
        [*scheduler.by_cache_id],
        scheduler.iterations,
        world.clock.now_ns,
        scheduler.metrics(),
    )


_CROWDED_STATE = (
    r"iteration 3: 5 of 8 blocks free \(block size 4; 2 of them cached\), token budget 16, at most "
    r"3 running, watermark 1, chunked prefill on; \d waiting; "
)


@pytest.mark.parametrize("bad", BAD_PLANS, ids=lambda bad: bad.message[:40])
def test_a_plan_that_breaks_the_contract_is_rejected_as_a_whole(bad: Bad) -> None:
    world = _crowded()
    before = _everything(world)
    world.scheduler.policy = Scripted(bad.plan, run(*_GOOD))
    assert world.do(Schedule()) == Outcome("refused", POLICY_FAILED)
    rejected = world.events[-1]
    assert isinstance(rejected, PlanRejected)
    assert (rejected.kind, bad.message in rejected.message) == (bad.kind, True), rejected.message
    assert re.match(_CROWDED_STATE, rejected.state)
    assert "r1 (running, 6+1 tokens, 6 computed, 2 blocks)" in rejected.state
    assert _everything(world) == before
    assert world.do(Schedule()).status == "done", "a good plan is still taken"


def test_without_chunked_prefill_a_prompt_may_not_be_chunked() -> None:
    world = World(
        run((0, 3)),
        checked=False,
        chunked_prefill=False,
        token_budget=16,
        max_model_tokens=16,
    )
    world.arrive(9)
    world.do(Schedule())
    rejected = world.events[-1]
    assert isinstance(rejected, PlanRejected)
    assert (rejected.kind, rejected.message) == (
        "chunk",
        "the plan runs 3 of the 9 tokens of request 0, but chunked prefill is off",
    )


def test_every_kind_of_broken_contract_has_a_bad_plan() -> None:
    kinds = set(get_args(get_type_hints(PlanRejected)["kind"]))
    of_the_policy = {"exception", "hang", "wrong_type", "mutation"}  # tests/test_isolation.py
    assert {bad.kind for bad in BAD_PLANS} | {"chunk"} == kinds - of_the_policy


def test_run_stops_where_a_policy_fails() -> None:
    world = World(run((0, 4)), run((0, 7)), run((0, 1)), checked=False)
    world.arrive(4, output=3)
    assert world.do(Run(3)) == Outcome("refused", POLICY_FAILED)
    assert world.standing(0) == ("running", 1, 0)


def test_a_rejected_plan_is_a_finding() -> None:
    world = World(run((0, 5)))
    world.arrive(4)
    assert world.harness is not None
    assert world.harness.perform(Schedule()) == Outcome("refused", "stopped_by_violation")
    (violation,) = world.harness.violations
    assert violation.property == "PLAN"
    assert violation.message == (
        "impossible: the plan runs 5 tokens of request 0, which has 4 to compute"
    )


def test_a_checker_that_stumbles_is_no_crash_of_the_subject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stumbles(*arguments: Any) -> None:
        raise ZeroDivisionError("a checker's own mistake")

    monkeypatch.setattr(Live, "after_event", lambda self: {RequestArrived: stumbles})
    world = World()
    assert world.harness is not None
    with pytest.raises(CheckerError, match="a checker's own mistake"):
        world.harness.perform(Arrive((Segment(0, 4),)))
    assert not world.harness.violations


def test_a_policy_asks_about_whole_numbers_of_tokens() -> None:
    class AsksAboutHalves:
        def plan(self, state: SchedulerState) -> Plan:
            state.blocks_for(state.waiting[0], cast(int, 4.5))
            return Plan()

    world = World(policy=AsksAboutHalves(), checked=False)
    world.arrive(4)
    assert world.do(Schedule()) == Outcome("refused", POLICY_FAILED)
    rejected = world.events[-1]
    assert isinstance(rejected, PlanRejected)
    assert "TypeError: blocks_for takes a whole number of tokens, not 4.5" in rejected.message


def test_a_cache_that_does_not_agree_is_an_error_not_a_plan() -> None:
    world = World(run((0, 4)), checked=False)
    world.arrive(4)
    world.subject.connect(lambda operation: Outcome("refused", "no_free_blocks"), _deaf)
    with pytest.raises(SchedulerError, match=r"admit was refused \(no_free_blocks\), although"):
        world.do(Schedule())


def _deaf(event: Event) -> None:
    pass
