"""The chapter's two cases, with its numbers, through the real scheduler (survey 1.C and 1.M).

Chat with heterogeneous lengths: A has a prompt of 1k tokens and 100 of output, B 8k and 800, C 2k
and 50, D 16k and 200.  Waste of contiguous reservation: three requests declare 8k each, and end
at 1.2k, 7.6k and 2.0k.  1k is 1000 throughout; the last token that is sampled is never fed back,
so that a request ends with one KV token less than it has tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvproof.engine.arithmetic import blocks_needed
from kvproof.engine.policies import POLICIES
from kvproof.engine.request import Request
from kvproof.fuzz.traces.checked import CheckedTrace, Setting, TraceRun
from kvproof.fuzz.traces.formats import TraceRequest
from kvproof.invariants.operations import Arrive, Operation, Retire, Schedule, Segment
from kvproof.invariants.outcomes import LARGER_THAN_MODEL, Outcome
from kvproof.invariants.scheduling.vocabulary import Completed, Limits, Scheduled
from kvproof.invariants.subject import Configuration
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject

BLOCK_SIZE = 16
CHATS = {"A": (1_000, 100), "B": (8_000, 800), "C": (2_000, 50), "D": (16_000, 200)}
"""Prompt and output tokens."""
NAMES = tuple(CHATS)
KV_TOKENS = {"A": 1_099, "B": 8_799, "C": 2_049, "D": 16_199}
"""In the end (H01)."""
LARGEST = 16_200
"""Prompt and output of D: what each would have to reserve (H03)."""
PROMPT_BLOCKS = 63 + 500 + 125 + 1_000
ALL_PROMPTS = 27_000
"""An iteration's budget that takes in all four prompts: then all of them decode in each step."""


def pool_for(tokens: int) -> int:
    """Blocks."""
    return blocks_needed(tokens, BLOCK_SIZE)


class World:
    """A scheduler with all checks on, and what it tells."""

    def __init__(self, policy: str, blocks: int, **limits: int) -> None:
        configuration = Configuration(
            blocks=blocks, block_size=BLOCK_SIZE, run_ahead=1, scheduling=Limits(**limits)
        )
        self.subject = SchedulerSubject(configuration, policy=POLICIES[policy])
        self.harness = SchedulingHarness(self.subject)
        self.engine = self.subject.cache.engine
        self.scheduler = self.subject.scheduler
        self.steps: list[Scheduled] = []
        self.ended: list[tuple[int, int]] = []
        """(request, step)."""
        self.held: dict[int, set[int]] = {}
        """By request: blocks that were ever in its table."""

    def perform(self, operation: Operation) -> Outcome:
        outcome = self.harness.perform(operation)
        assert not self.harness.violations, self.harness.violations[0].message
        for event in self.harness.last_events:
            if isinstance(event, Scheduled):
                self.steps.append(event)
            elif isinstance(event, Completed):
                self.ended += [(number, event.step) for number in event.finished]
        for job in self.scheduler.by_cache_id.values():
            assert job.cache is not None
            self.held.setdefault(job.id, set()).update(job.cache.tables[0])
        return outcome

    def arrive(self, prompt: int, output: int, max_tokens: int = 0) -> Outcome:
        segment = Segment(self.scheduler.arrivals, prompt)
        return self.perform(Arrive((segment,), output=output, max_tokens=max_tokens))

    def step(self) -> None:
        self.perform(Schedule())
        self.perform(Retire())

    def run_to_end(self) -> None:
        while self.scheduler.jobs:
            self.step()
        assert not self.harness.audit()

    def running(self) -> list[Request]:
        return self.engine.running

    def held_slots(self) -> int:
        return sum(len(request.tables[0]) * BLOCK_SIZE for request in self.running())

    def used_slots(self) -> int:
        return sum(request.computed for request in self.running())


def chats(policy: str, blocks: int, **limits: int) -> World:
    """The four have arrived at the same time."""
    world = World(policy, blocks, **({"token_budget": ALL_PROMPTS} | limits))
    for prompt, output in CHATS.values():
        assert world.arrive(prompt, output).status == "done"
    return world


def order(world: World) -> str:
    return "".join(NAMES[number] for number, _ in world.ended)


# -- chat with heterogeneous lengths -------------------------------------------------------------


def test_kv_tokens_in_the_end() -> None:
    """H01."""
    world = chats("fcfs", pool_for(100_000))
    final: dict[str, int] = {}
    while world.scheduler.jobs:
        world.perform(Schedule())
        for request in world.running():
            final[NAMES[request.id]] = request.scheduled
        world.perform(Retire())
    assert final == KV_TOKENS
    assert sum(final.values()) == 28_146


def test_a_and_c_leave_without_waiting_for_b_and_d() -> None:
    """H04: C after 50 steps, A after 100, D after 200, B after 800; no step waits for another."""
    world = chats("fcfs", pool_for(100_000))
    world.run_to_end()
    assert order(world) == "CADB"
    # The prefill samples the first token, in step 0.
    assert dict(world.ended) == {2: 49, 0: 99, 3: 199, 1: 799}
    sizes = [len(step.parts) for step in world.steps]
    assert sizes == [4] * 50 + [3] * 50 + [2] * 100 + [1] * 600
    assert sum(sizes) == 1_150  # useful slot-steps: one for each output token


@pytest.mark.parametrize("budget", [512, 2_048, 8_192])
def test_chunked_prefill_delays_but_does_not_block(budget: int) -> None:
    """With small budgets D's prompt takes longest; A and C have left long before B all the same."""
    world = chats("fcfs", pool_for(100_000), token_budget=budget)
    world.run_to_end()
    assert order(world).index("A") < order(world).index("B")
    assert order(world).index("C") < order(world).index("B")
    assert len(world.steps) < 800 + ALL_PROMPTS // budget + 2


def test_a_static_batch_wastes_2050_of_3200_slot_steps() -> None:
    """H02: places of those that have ended stay empty until B has."""
    world = chats("static_batch", pool_for(100_000))
    world.step()
    world.arrive(1_000, 100)  # E
    while 1 in world.scheduler.jobs:
        assert 4 not in world.held
        world.step()
    batch = [len(step.parts) for step in world.steps]
    assert len(batch) == 800
    assert 4 * len(batch) == 3_200
    assert 4 * len(batch) - sum(batch) == 2_050
    world.run_to_end()
    assert [number for number, _ in world.ended] == [2, 0, 3, 1, 4]

    # Continuous batching takes E in at the next iteration, and B goes on beside it.
    world = chats("fcfs", pool_for(100_000))
    world.step()
    world.arrive(1_000, 100)
    world.step()
    assert world.steps[1].admitted == (4,)
    assert {part.request for part in world.steps[1].parts} == {0, 1, 2, 3, 4}


def test_maximal_reservation_holds_64800_slots_for_28146_tokens() -> None:
    """H03: four times D's 16,200.

    The survey's 28,150 are prompts and outputs; 28,146 of them are ever in the cache.
    """
    assert sum(prompt + output for prompt, output in CHATS.values()) == 28_150
    assert sum(KV_TOKENS.values()) == 28_146
    reservation = pool_for(LARGEST)
    assert reservation * BLOCK_SIZE == 16_208  # whole blocks: 8 more than asked for
    world = chats("contiguous", 4 * reservation, max_model_tokens=LARGEST)
    world.step()
    assert world.held_slots() == 4 * 16_208 == 4 * LARGEST + 32
    assert 4 * LARGEST == 64_800
    assert world.engine.pools[0].free_count == 0
    share = 28_150 / 64_800  # if all were as long as they ever get, at the same time
    assert round(100 * share) == 43

    # The same memory, paged, holds the four twice over.
    paged = World("fcfs", 4 * reservation, token_budget=2 * ALL_PROMPTS)
    for prompt, output in (*CHATS.values(), *CHATS.values()):
        paged.arrive(prompt, output)
    paged.step()
    assert len(paged.running()) == 8
    paged.run_to_end()
    assert not any(step.preempted for step in paged.steps)


@pytest.mark.parametrize("policy", ["fcfs", "contiguous", "static_batch"])
def test_blocks_of_c_and_a_come_back_in_tables_of_later_requests(policy: str) -> None:
    """H05: two more requests arrive and find the pool full."""
    blocks = {
        "fcfs": PROMPT_BLOCKS + 30,  # C ends before the others need more
        "contiguous": 4 * pool_for(LARGEST),
        "static_batch": sum(map(pool_for, KV_TOKENS.values())),
    }[policy]
    world = chats(policy, blocks, max_model_tokens=LARGEST)
    world.step()
    world.arrive(1_000, 100)  # needs half of C's blocks
    world.arrive(1_900, 100)  # … and does not fit in the other half
    world.step()
    assert not {4, 5} & set(world.held)  # they wait
    world.run_to_end()
    assert not any(step.preempted for step in world.steps)
    for ended in (2, 0):
        assert world.held[ended] & (world.held[4] | world.held[5])
    entered = {n: step.iteration for step in world.steps for n in step.admitted}
    ends = dict(world.ended)
    if policy == "static_batch":
        assert entered[4] == entered[5] == ends[1] + 1  # the barrier
    else:
        # The next iteration after C, or A, has left.
        assert (entered[4], entered[5]) == (ends[2] + 1, ends[0] + 1)
        assert max(ends[4], ends[5]) < ends[1]


def test_near_capacity_policies_stop_preempt_or_move() -> None:
    """H07: a pool in which the four cannot end side by side.  What is decided is an event."""
    blocks = PROMPT_BLOCKS + 8
    preempting = chats("fcfs", blocks)
    preempting.run_to_end()
    assert sum(len(step.preempted) for step in preempting.steps) > 0
    stopping = chats("guaranteed_no_evict", blocks)
    stopping.run_to_end()
    assert not any(step.preempted or step.swapped for step in stopping.steps)
    assert len(stopping.steps[0].admitted) == 3
    assert order(stopping)[-1] in "BD"
    assert sorted(order(preempting)) == sorted(order(stopping)) == list("ABCD")


# -- why maximum contiguous reservation wastes capacity -------------------------------------------

MAXIMUM = 8_000
REALISED = {"A": 1_200, "B": 7_600, "C": 2_000}
"""KV tokens in the end (C03)."""


def three(policy: str, blocks: int, copies: int = 1) -> World:
    """Each declares what is left of 8k as its longest output, and ends with its first token."""
    world = World(policy, blocks, token_budget=1 << 20, max_model_tokens=MAXIMUM)
    for _ in range(copies):
        for tokens in REALISED.values():
            assert world.arrive(tokens, 1, MAXIMUM - tokens).status == "done"
    world.perform(Schedule())
    return world


def scheduled(world: World) -> int:
    return sum(request.scheduled for request in world.running())


def test_three_reservations_of_8k_are_used_to_45_percent() -> None:
    """C03: 10.8k of 24k slots; 13.2k are held for nothing."""
    world = three("contiguous", pool_for(3 * MAXIMUM))
    assert world.held_slots() == 24_000
    assert scheduled(world) == 10_800
    assert scheduled(world) / world.held_slots() == 0.45
    assert world.held_slots() - scheduled(world) == 13_200
    assert world.engine.pools[0].free_count == 0


def test_paged_the_same_three_hold_what_they_use() -> None:
    """Multiples of 16 all three, so that not even the last blocks waste anything (P06)."""
    world = three("fcfs", pool_for(3 * MAXIMUM))
    assert world.held_slots() == scheduled(world) == 10_800
    assert world.engine.pools[0].free_count * BLOCK_SIZE == 13_200


@pytest.mark.parametrize(("policy", "most"), [("contiguous", 3), ("orca", 3), ("fcfs", 7)])
def test_waste_costs_concurrency(policy: str, most: int) -> None:
    """C10: of nine requests on 24k slots, reservations admit floor(24k / 8k), pages seven.

    ORCA reserves as much here, since max_tokens is all that is left of the 8k.
    """
    world = three(policy, pool_for(3 * MAXIMUM), copies=3)
    assert len(world.running()) == most
    world.perform(Retire())
    world.run_to_end()


def test_the_maximum_binds() -> None:
    world = World("contiguous", pool_for(3 * MAXIMUM), max_model_tokens=MAXIMUM)
    assert world.arrive(7_600, 400).status == "done"
    assert world.arrive(7_601, 400).reason == LARGER_THAN_MODEL


# -- the same as traces ---------------------------------------------------------------------------


def traced(policy: str, blocks: int) -> CheckedTrace:
    trace = [
        TraceRequest(0.0, (Segment(number, prompt),), prompt, output)
        for number, (prompt, output) in enumerate(CHATS.values())
    ]
    limits = Limits(token_budget=ALL_PROMPTS, max_model_tokens=LARGEST)
    configuration = Configuration(
        blocks=blocks, block_size=BLOCK_SIZE, run_ahead=1, scheduling=limits
    )
    checked = TraceRun(trace, Setting(configuration), policy).run()
    assert (checked.violations, checked.problem, checked.result.finished) == ((), None, 4)
    return checked


def test_what_kvproof_trace_says_of_the_chats() -> None:
    blocks = 4 * pool_for(LARGEST)
    paged, contiguous = traced("fcfs", blocks).result, traced("contiguous", blocks).result
    static = traced("static_batch", blocks).result
    # Nobody has to wait, so that all three run the same steps …
    assert paged.steps == contiguous.steps == static.steps == 800
    assert paged.percentiles == contiguous.percentiles | {
        "allocated_blocks": paged.percentiles["allocated_blocks"]
    }
    batches: Callable[[float], object] = pytest.approx
    assert paged.metrics.batch_size_by_iteration.sequences_mean == batches(1_150 / 800)
    # … but not with the same memory.
    assert paged.kv_use.used_of_held > 0.99
    assert contiguous.kv_use.used_of_held < 0.6
    assert contiguous.kv_use.fragmentation_slots.maximum == 4 * 16_208 - 28_146
    assert paged.kv_use.fragmentation_slots.maximum < 4 * BLOCK_SIZE
