"""Decisions of the scheduler policies, on states made by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import pytest

from kvproof import stateful_tests
from kvproof.engine.policies import POLICIES, POLICY_NAMES
from kvproof.engine.policy import (
    Draft,
    Limits,
    Plan,
    Promises,
    QueueState,
    RequestState,
    SchedulerPolicy,
    SchedulerState,
)

_PLACES = (
    Path(__file__).parent.parent / "stateful_tests",
    Path(str(stateful_tests.__file__)).parent,
)
EXAMPLES = next(place for place in _PLACES if (place / "examples").is_dir()) / "examples/policies"
"""Beside the tests, or in the package: mutants are tested in a copy of both."""
BLOCK_SIZE = 4


@dataclass
class StateStub:
    """A state without prefix hits: every block has one holder."""

    running: Sequence[RequestState] = ()
    waiting: Sequence[RequestState] = ()
    preempted: Sequence[RequestState] = ()
    limits: Limits = field(default_factory=Limits)
    total_blocks: int = 100
    max_sequences: int = 100
    fenced_blocks: int = 0
    free_host_blocks: int = 0
    cached_free_blocks: int = 0
    free_blocks: int = -1
    block_size: int = BLOCK_SIZE
    iteration: int = 0
    now_ns: int = 0

    def __post_init__(self) -> None:
        if self.free_blocks < 0:
            held = sum(request.held_blocks for request in self.running)
            self.free_blocks = self.total_blocks - held - self.fenced_blocks

    def blocks_for(self, request: RequestState, tokens: int) -> int:
        held = request.held_blocks if request.state == "running" else 0
        return max(0, -(-tokens // self.block_size) - held)

    def cached_tokens(self, request: RequestState) -> int:
        return 0

    def blocks_freed(self, request: RequestState) -> int:
        return 0 if request.in_flight else request.held_blocks

    def draft(self) -> Draft:
        return Draft(self)


def make_request(number: int, state: QueueState, prompt: int, **fields: Any) -> RequestState:
    values: dict[str, Any] = {"arrival_ns": number, "priority": 0, "max_tokens": 8} | fields
    return RequestState(number, state, prompt_tokens=prompt, **values)


def waits(number: int, prompt: int = 4, **fields: Any) -> RequestState:
    return make_request(number, "waiting", prompt, pending_tokens=prompt, **fields)


def was_preempted(number: int, prompt: int = 4, **fields: Any) -> RequestState:
    return make_request(number, "preempted", prompt, pending_tokens=prompt, **fields)


def runs(number: int, computed: int, pending: int = 1, **fields: Any) -> RequestState:
    """A running request that holds the blocks of what is computed.  By default it decodes."""
    values: dict[str, Any] = {"held_blocks": -(-computed // BLOCK_SIZE), "max_tokens": 100} | fields
    return make_request(
        number, "running", 1, computed_tokens=computed, pending_tokens=pending, **values
    )


def plan_of(name: str, state: SchedulerState) -> Plan:
    return POLICIES[name]().plan(state)


def ids(plan: Plan) -> list[int]:
    return [number for number, _ in plan.run]


# -- the registry ------------------------------------------------------------------------------


def test_each_policy_is_made_without_arguments_and_makes_promises() -> None:
    for policy in POLICIES.values():
        assert isinstance(policy.promises, Promises)  # type: ignore[attr-defined]
        assert isinstance(policy(), SchedulerPolicy)


# -- what all have in common -------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_nothing_to_do_is_an_empty_plan(name: str) -> None:
    assert plan_of(name, StateStub()) == Plan()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_requests_that_wait_are_admitted_by_arrival_up_to_the_first_that_does_not_fit(
    name: str,
) -> None:
    state = StateStub(
        waiting=[waits(0, 8, max_tokens=1), waits(1, 16, max_tokens=1), waits(2, 4, max_tokens=1)],
        total_blocks=4,
        limits=Limits(max_model_tokens=8),
    )
    assert plan_of(name, state).run == ((0, 8),)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_the_budget_bounds_an_iteration_and_prompts_are_cut_to_it(name: str) -> None:
    limits = Limits(token_budget=10, max_model_tokens=16)
    state = StateStub(waiting=[waits(0, 8), waits(1, 8), waits(2, 8)], limits=limits)
    assert plan_of(name, state).run == ((0, 8), (1, 2))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_prompts_are_not_cut_where_that_is_not_allowed(name: str) -> None:
    limits = Limits(token_budget=10, max_model_tokens=16, chunked_prefill=False)
    state = StateStub(waiting=[waits(0, 8), waits(1, 8), waits(2, 2)], limits=limits)
    assert plan_of(name, state).run == ((0, 8),)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_sequences_are_bounded(name: str) -> None:
    limits = Limits(max_model_tokens=16)
    state = StateStub(waiting=[waits(n) for n in range(4)], max_sequences=3, limits=limits)
    assert ids(plan_of(name, state)) == [0, 1, 2]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_the_watermark_stays_free_in_an_iteration_that_admits(name: str) -> None:
    limits = Limits(max_model_tokens=4, watermark_blocks=1)
    state = StateStub(
        waiting=[waits(n, max_tokens=1) for n in range(4)], total_blocks=4, limits=limits
    )
    assert ids(plan_of(name, state)) == [0, 1, 2]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_request_that_is_not_ready_is_left_alone(name: str) -> None:
    limits = Limits(max_model_tokens=16)
    state = StateStub(
        running=[runs(0, 4, 0, in_flight=True, max_tokens=4), runs(1, 4, max_tokens=4)],
        limits=limits,
        total_blocks=9,
    )
    plan = plan_of(name, state)
    assert plan.run == ((1, 1),)
    assert not plan.preempt
    assert not plan.swap


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_policy_is_deterministic_and_leaves_the_state_alone(name: str) -> None:
    state = StateStub(
        running=[runs(n, 4 * n) for n in range(1, 4)],
        waiting=[waits(n, n, priority=-n) for n in range(4, 9)],
        total_blocks=6,
    )
    before = repr(state)
    assert plan_of(name, state) == plan_of(name, state)
    assert repr(state) == before


# -- preemption --------------------------------------------------------------------------------

FIRST_COME = ["fcfs", "max_utilization", "fcfs_swap"]
PREEMPTING = [*FIRST_COME, "priority"]


@pytest.mark.parametrize("name", PREEMPTING)
def test_the_latest_is_preempted_for_want_of_blocks_and_nobody_admitted(name: str) -> None:
    running = [runs(0, 4), runs(1, 5), runs(2, 12)]
    plan = plan_of(name, StateStub(running=running, waiting=[waits(3, 1)], total_blocks=6))
    assert plan == Plan(run=((0, 1), (1, 1)), preempt=(2,))


@pytest.mark.parametrize("name", PREEMPTING)
def test_the_last_one_preempts_itself(name: str) -> None:
    state = StateStub(running=[runs(0, 5), runs(1, 4)], total_blocks=3)
    assert plan_of(name, state) == Plan(run=((0, 1),), preempt=(1,))


@pytest.mark.parametrize("name", PREEMPTING)
def test_nobody_is_preempted_for_blocks_that_steps_in_flight_will_give_back(name: str) -> None:
    state = StateStub(
        running=[runs(0, 4), runs(1, 5)], waiting=[waits(2, 1)], total_blocks=4, fenced_blocks=1
    )
    assert plan_of(name, state) == Plan(run=((1, 1),))


@pytest.mark.parametrize("name", PREEMPTING)
def test_one_victim_in_flight_is_enough(name: str) -> None:
    """Its blocks are not free at once; the request that asked waits for them."""
    running = [runs(0, 4), runs(1, 5), runs(2, 4, 0, in_flight=True)]
    plan = plan_of(name, StateStub(running=running, total_blocks=4))
    assert plan == Plan(run=((1, 1),), preempt=(2,))


@pytest.mark.parametrize("name", PREEMPTING)
def test_a_chunk_that_does_not_fit_is_cut_to_the_free_blocks(name: str) -> None:
    state = StateStub(running=[runs(0, 6, 20), runs(1, 5)], total_blocks=5)
    assert plan_of(name, state) == Plan(run=((0, 6), (1, 1)))


@pytest.mark.parametrize("name", FIRST_COME)
def test_preempted_requests_come_back_before_new_ones(name: str) -> None:
    state = StateStub(preempted=[was_preempted(5, 8)], waiting=[waits(1, 4)], total_blocks=2)
    assert ids(plan_of(name, state)) == [5]
    state = StateStub(preempted=[was_preempted(5, 12)], waiting=[waits(1, 4)], total_blocks=2)
    assert ids(plan_of(name, state)) == []


def test_fcfs_admits_where_the_whole_prompt_fits_max_utilization_where_the_chunk_does() -> None:
    state = StateStub(
        waiting=[waits(0, 12, max_tokens=1)],
        running=[runs(1, 5)],
        total_blocks=4,
        limits=Limits(token_budget=9),
    )
    assert plan_of("fcfs", state).run == ((1, 1),)
    assert plan_of("max_utilization", state).run == ((1, 1), (0, 8))


def test_a_victim_is_swapped_out_if_it_can_be_and_else_recomputed() -> None:
    running = [runs(0, 4), runs(1, 4)]
    state = StateStub(running=running, total_blocks=2, free_host_blocks=1)
    assert plan_of("fcfs_swap", state) == Plan(run=((0, 1),), swap=(1,))
    assert plan_of("fcfs", state) == Plan(run=((0, 1),), preempt=(1,))
    state.free_host_blocks = 0
    assert plan_of("fcfs_swap", state) == Plan(run=((0, 1),), preempt=(1,))
    running[1] = runs(1, 4, 0, in_flight=True)
    state.free_host_blocks = 1
    assert plan_of("fcfs_swap", state) == Plan(preempt=(1,))


def test_a_swapped_request_comes_back_for_what_it_lacks() -> None:
    swapped = make_request(0, "swapped", 4, computed_tokens=6, pending_tokens=1)
    state = StateStub(preempted=[swapped], waiting=[waits(1)], total_blocks=3)
    assert plan_of("fcfs_swap", state).run == ((0, 1), (1, 4))
    state = StateStub(preempted=[swapped], waiting=[waits(1)], total_blocks=1)
    assert plan_of("fcfs_swap", state) == Plan()


# -- priority ----------------------------------------------------------------------------------


def test_priority_admits_by_urgency_then_arrival() -> None:
    state = StateStub(
        preempted=[was_preempted(0, priority=1)],
        waiting=[waits(1, priority=2), waits(2, priority=1), waits(3, priority=0)],
    )
    assert ids(plan_of("priority", state)) == [3, 0, 2, 1]


def test_priority_stops_at_the_most_urgent_that_does_not_fit() -> None:
    state = StateStub(
        preempted=[was_preempted(0, 4, priority=1)], waiting=[waits(1, 12)], total_blocks=2
    )
    assert plan_of("priority", state) == Plan()


def test_priority_preempts_the_least_urgent_and_of_those_the_latest_arrival() -> None:
    running = [runs(0, 4, priority=2), runs(1, 4, priority=2), runs(2, 5, priority=0)]
    assert plan_of("priority", StateStub(running=running, total_blocks=4)) == Plan(
        run=((2, 1), (0, 1)), preempt=(1,)
    )
    running = [runs(0, 4, priority=3), runs(1, 4, priority=2), runs(2, 4, priority=0)]
    assert plan_of("priority", StateStub(running=running, total_blocks=3)) == Plan(
        run=((2, 1),), preempt=(0, 1)
    )


def test_priority_keeps_its_queue_over_iterations() -> None:
    policy = POLICIES["priority"]()
    queue = [waits(n, priority=10 - n) for n in range(4)]
    assert ids(policy.plan(StateStub(waiting=queue, max_sequences=1))) == [3]
    # The plan was not applied, for what reason ever: the request still stands first.
    assert ids(policy.plan(StateStub(waiting=queue, max_sequences=1))) == [3]
    # Request 3 was admitted, 2 was aborted, 4 and 5 are new.
    queue = [*queue[:2], waits(4, priority=10), waits(5, priority=9)]
    assert ids(policy.plan(StateStub(waiting=queue, max_sequences=2))) == [1, 5]
    assert ids(policy.plan(StateStub(waiting=queue[:1], max_sequences=2))) == [0]
    assert ids(policy.plan(StateStub(waiting=[waits(6)]))) == [6]


class CountingQueue(Sequence[RequestState]):
    """Counts how many of its requests are looked at."""

    def __init__(self, requests: list[RequestState]) -> None:
        self.requests = requests
        self.looks = 0

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, place: int) -> RequestState: ...

    @overload
    def __getitem__(self, place: slice) -> list[RequestState]: ...

    def __getitem__(self, place: int | slice) -> RequestState | list[RequestState]:
        assert isinstance(place, int)
        self.looks += 1
        return self.requests[place]

    def __iter__(self) -> Iterator[RequestState]:
        for request in self.requests:
            self.looks += 1
            yield request


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_long_queue_costs_nothing(name: str) -> None:
    policy = POLICIES[name]()
    queue = CountingQueue([waits(n) for n in range(10_000)])
    policy.plan(StateStub(waiting=queue, max_sequences=1))  # the newcomers are looked at once
    queue.looks = 0
    for _ in range(10):
        policy.plan(StateStub(waiting=queue, max_sequences=1, limits=Limits(max_model_tokens=16)))
    assert queue.looks <= 10 * 40


# -- without preemption ------------------------------------------------------------------------


def test_no_evict_sets_aside_what_started_requests_may_still_need() -> None:
    # Request 0 has 4 of at most 12 tokens: two more blocks are set aside for it.
    running = [runs(0, 4, max_tokens=12)]
    queue = [waits(1, 4, max_tokens=5), waits(2, 4, max_tokens=1)]
    state = StateStub(running=running, waiting=queue, total_blocks=5)
    assert plan_of("guaranteed_no_evict", state).run == ((0, 1), (1, 4))
    state = StateStub(running=running, waiting=queue, total_blocks=4)
    assert plan_of("guaranteed_no_evict", state).run == ((0, 1),)


def test_no_evict_counts_what_it_admits_in_the_same_iteration() -> None:
    queue = [waits(n, 4, max_tokens=5) for n in range(3)]
    assert ids(plan_of("guaranteed_no_evict", StateStub(waiting=queue, total_blocks=5))) == [0, 1]


def test_a_static_batch_takes_nobody_in_before_it_has_ended() -> None:
    policy = POLICIES["static_batch"]()
    queue = [waits(n, 4, max_tokens=5) for n in range(4)]
    state = StateStub(waiting=queue[:2], total_blocks=7)
    assert ids(policy.plan(state)) == [0, 1]
    state = StateStub(running=[runs(1, 4)], waiting=queue[2:], total_blocks=7)
    assert policy.plan(state).run == ((1, 1),)
    assert ids(policy.plan(StateStub(waiting=queue[2:], total_blocks=7))) == [2, 3]


def test_members_of_a_static_batch_start_as_the_budget_allows() -> None:
    policy = POLICIES["static_batch"]()
    limits = Limits(token_budget=6)
    queue = [waits(n, 4, max_tokens=5) for n in range(4)]
    state = StateStub(waiting=queue, total_blocks=6, limits=limits)
    assert policy.plan(state).run == ((0, 4), (1, 2))
    running = [runs(0, 4), runs(1, 2, 2)]
    state = StateStub(running=running, waiting=queue[2:], total_blocks=6, limits=limits)
    assert policy.plan(state).run == ((0, 1), (1, 2), (2, 3))
    running = [runs(0, 5), runs(1, 4), runs(2, 3, 1)]
    state = StateStub(running=running, waiting=queue[3:], total_blocks=9, limits=limits)
    assert ids(policy.plan(state)) == [0, 1, 2]


def test_a_static_batch_is_chosen_anew_by_what_is_free() -> None:
    policy = POLICIES["static_batch"]()
    queue = [waits(n, 4, max_tokens=5) for n in range(4)]
    assert ids(policy.plan(StateStub(waiting=queue, total_blocks=8, max_sequences=4))) == [
        *range(4)
    ]
    state = StateStub(waiting=queue[1:], total_blocks=8, fenced_blocks=6)
    assert ids(policy.plan(state)) == [1]


def test_orca_reserves_the_longest_output() -> None:
    queue = [waits(n, 4, max_tokens=9) for n in range(3)]
    plan = plan_of("orca", StateStub(waiting=queue, total_blocks=7))
    assert plan == Plan(run=((0, 4), (1, 4)), reserve=((0, 12), (1, 12)))


def test_a_contiguous_cache_reserves_the_longest_context() -> None:
    queue = [waits(n) for n in range(5)]
    state = StateStub(waiting=queue, total_blocks=8, limits=Limits(max_model_tokens=10))
    plan = plan_of("contiguous", state)
    assert plan == Plan(run=((0, 4), (1, 4)), reserve=((0, 10), (1, 10)))


def test_a_context_longer_than_the_pool_takes_all_of_it() -> None:
    state = StateStub(
        waiting=[waits(0), waits(1)], total_blocks=8, limits=Limits(watermark_blocks=1)
    )
    assert plan_of("contiguous", state) == Plan(run=((0, 4),), reserve=((0, 28),))


def test_a_contiguous_cache_has_as_many_places_as_reservations_however_much_is_shared() -> None:
    running = [runs(n, 4, held_blocks=0) for n in range(2)]  # as if all of it were shared
    state = StateStub(
        running=running, waiting=[waits(2)], total_blocks=6, limits=Limits(max_model_tokens=12)
    )
    assert ids(plan_of("contiguous", state)) == [0, 1]


# -- the draft ---------------------------------------------------------------------------------


class SharingStub(StateStub):
    """Request 1 finds its first block with request 0, which runs."""

    def blocks_for(self, request: RequestState, tokens: int) -> int:
        return super().blocks_for(request, tokens) - (request.id == 1)

    def cached_tokens(self, request: RequestState) -> int:
        return BLOCK_SIZE if request.id == 1 else 0


def test_a_victims_block_is_not_both_freed_and_reused() -> None:
    running = [runs(0, 8)]
    state = SharingStub(running=running, waiting=[waits(1, 12)], total_blocks=2)
    draft = state.draft()
    assert draft.preempt(running[0])
    assert not draft.run(state.waiting[0])


def test_a_draft_that_admits_does_not_preempt_any_more() -> None:
    state = StateStub(running=[runs(0, 4), runs(1, 4)], waiting=[waits(2, 1)], total_blocks=3)
    draft = state.draft()
    assert draft.run(state.waiting[0])
    assert not draft.run_preempting(state.running[0])
    assert draft.plan() == Plan(run=((2, 1),))


def test_a_request_that_is_run_already_preempts_nobody() -> None:
    state = StateStub(running=[runs(0, 4), runs(1, 5)], total_blocks=4)
    draft = state.draft()
    assert draft.run_preempting(state.running[0])
    assert not draft.run_preempting(state.running[0])
    assert draft.plan() == Plan(run=((0, 1),))


def test_a_swap_takes_host_blocks_for_what_is_computed() -> None:
    state = StateStub(running=[runs(0, 8, held_blocks=5), runs(1, 4)], free_host_blocks=2)
    draft = state.draft()
    assert draft.swap(state.running[0]), "its reserved blocks hold nothing to be copied"
    assert not draft.swap(state.running[1])
    assert draft.plan() == Plan(swap=(0,))


def test_preempting_is_for_those_that_run() -> None:
    state = StateStub(running=[runs(0, 4)], waiting=[waits(1)], preempted=[was_preempted(2)])
    draft = state.draft()
    assert not draft.run_preempting(state.waiting[0])
    assert not draft.run_preempting(state.preempted[0])
    assert draft.plan() == Plan()


# -- the examples ------------------------------------------------------------------------------


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (policy,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    )
    return policy()


def test_examples_are_short_and_say_where_they_are_wrong() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 7
    for file in files:
        lines = file.read_text().splitlines()
        correct = file.name == "shortest_first.py"
        assert len(lines) < (25 if correct else 40)
        assert any("# Wrong: " in line for line in lines) != correct
        assert isinstance(load_example(file.stem), SchedulerPolicy)


def test_shortest_first() -> None:
    state = StateStub(waiting=[waits(0, 8), waits(1, 4), waits(2, 2)], total_blocks=2)
    assert ids(load_example("shortest_first").plan(state)) == [2, 1]


def test_cached_blocks_counted_twice_are_too_many() -> None:
    state = StateStub(
        waiting=[waits(0, max_tokens=1), waits(1, max_tokens=1)],
        total_blocks=1,
        cached_free_blocks=1,
    )
    assert ids(load_example("counts_cached_blocks_twice").plan(state)) == [0, 1]
    state.cached_free_blocks = 0
    assert ids(load_example("counts_cached_blocks_twice").plan(state)) == [0]


def test_the_block_edge_is_missed_and_nothing_else() -> None:
    policy = load_example("off_by_one_at_block_edge")
    for computed in range(1, 10):
        state = StateStub(running=[runs(0, computed)], total_blocks=-(-computed // BLOCK_SIZE))
        fits = state.blocks_for(state.running[0], computed + 1) == 0
        assert fits == (computed % BLOCK_SIZE > 0)
        assert ids(policy.plan(state)) == [0]  # wrong where it does not fit


def test_decodes_are_forgotten_in_the_budget() -> None:
    state = StateStub(
        running=[runs(0, 4), runs(1, 4)], waiting=[waits(2, 8)], limits=Limits(token_budget=8)
    )
    plan = load_example("forgets_token_budget").plan(state)
    assert sum(tokens for _, tokens in plan.run) == 10


def test_two_half_loaded_prompts_wait_for_each_other() -> None:
    state = StateStub(running=[runs(0, 8, 8), runs(1, 8, 8)], total_blocks=4)
    assert load_example("deadlocks_half_loaded").plan(state) == Plan()
    assert plan_of("fcfs", state) == Plan(run=((0, 8),), preempt=(1,))


def test_the_round_robin_throws_out_whom_it_has_just_let_in() -> None:
    policy = load_example("preempts_what_it_admitted")
    limits = Limits(token_budget=8)
    state = StateStub(
        running=[runs(0, 8, 8)], waiting=[waits(1, 16)], total_blocks=4, limits=limits
    )
    assert policy.plan(state) == Plan(run=((1, 8),), preempt=(0,))
    state = StateStub(
        running=[runs(1, 8, 8)], preempted=[was_preempted(0, 16)], total_blocks=4, limits=limits
    )
    assert policy.plan(state) == Plan(run=((0, 8),), preempt=(1,))


def test_short_newcomers_overtake_a_long_request() -> None:
    policy = load_example("starves_long_requests")
    for number in range(1, 60):
        state = StateStub(waiting=[waits(0, 12), waits(number, 4)], total_blocks=3, running=[])
        assert ids(policy.plan(state)) == [number]
