"""Silence on correct policies, however odd: nothing may be said of any of them.

They keep the contract and what they promise, but decide otherwise than the built-in ones do: by
hand, in other orders, one at a time, by turns, with pauses, at random.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvproof.engine.isolation import PolicyError
from kvproof.engine.plan_validation import Validation
from kvproof.engine.policy import (
    Plan,
    Promises,
    RequestState,
    SchedulerPolicy,
    SchedulerState,
)
from kvproof.engine.scheduler_state import State
from kvproof.fuzz.swarm import draw_run
from kvproof.invariants.operations import (
    AnyOperation,
    Arrive,
    Run,
    Schedule,
    Segment,
)
from kvproof.invariants.subject import Configuration
from kvproof.invariants.verdict import Violation
from kvproof.stateful_tests.scheduling_harness import SchedulingHarness
from kvproof.stateful_tests.subjects.scheduler import PolicyFactory, SchedulerSubject

RUNS = 30


def outside(state: SchedulerState) -> list[RequestState]:
    return [*state.preempted, *state.waiting]


def next_size(request: RequestState) -> int:
    """Tokens whose keys and values it has once all that is pending is computed."""
    return request.computed_tokens + request.pending_tokens


# -- in other orders -------------------------------------------------------------------------------


class LastInFirstOut:
    """The newest of those that wait is admitted first."""

    promises = Promises(no_barrier=True, work_conserving=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts:
            for request in sorted(outside(state), key=lambda r: -r.id):
                if not draft.run(request):
                    break
        return draft.plan()


class ShortestRemainingFirst:
    """Victims are those with most to do."""

    promises = Promises(no_barrier=True, work_conserving=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        order = sorted(state.running, key=self._left)
        for request in order:
            draft.run_preempting(request, order=order)
        if not draft.preempts:
            for request in sorted(outside(state), key=self._left):
                if not draft.run(request):
                    break
        return draft.plan()

    def _left(self, request: RequestState) -> tuple[int, int]:
        return request.prompt_tokens + request.max_tokens - request.computed_tokens, request.id


class LongestPrefixFirst:
    """Those come first of whose prompt most is cached."""

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts:
            by_prefix = sorted(state.waiting, key=lambda r: (-state.cached_tokens(r), r.id))
            for request in [*state.preempted, *by_prefix]:
                if not draft.run(request):
                    break
        return draft.plan()


class ListsTheNewestFirst:
    """First come, first served; only the plan lists them the other way round."""

    promises = Promises(fcfs=True, no_barrier=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts:
            for request in outside(state):
                if not draft.run(request):
                    break
        plan = draft.plan()
        return Plan(run=tuple(reversed(plan.run)), preempt=plan.preempt)


class AdmitsFirst:
    """Admits before it runs those that run; all they may need is reserved."""

    promises = Promises(fcfs=True, no_eviction=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.waiting:
            if not draft.run(request, reserve=request.final_tokens):
                break
        for request in state.running:
            draft.run(request)
        return draft.plan()


class PreemptsForTheUrgent:
    """A less urgent one makes room for a more urgent one, though no block is lacking."""

    promises = Promises(strict_priority=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        running = sorted(state.running, key=self._urgency)
        others = sorted(outside(state), key=self._urgency)
        if others and running and others[0].priority < running[-1].priority:
            lacks = self._lacks(state, others[0], draft.free_blocks)
            if lacks and not state.fenced_blocks and not any(r.in_flight for r in running):
                draft.preempt(running[-1])
        for request in running:
            draft.run_preempting(request, order=running)
        if not draft.preempts:
            for request in others:
                if state.blocks_for(request, next_size(request)) > draft.free_blocks:
                    break
                if not draft.run(request):
                    break
        return draft.plan()

    def _urgency(self, request: RequestState) -> tuple[int, int]:
        return request.priority, request.id

    def _lacks(self, state: SchedulerState, request: RequestState, free: int) -> bool:
        needed = state.blocks_for(request, next_size(request))
        places = state.max_sequences - len(state.running)
        return needed > free - state.limits.watermark_blocks or places < 1


# -- by turns and with pauses ----------------------------------------------------------------------


class Quantum:
    """One at a time; after four output tokens it makes room for the next."""

    def __init__(self) -> None:
        self.began: dict[int, int] = {}
        self.order: list[int] = []

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        others = outside(state)
        live = {request.id for request in [*state.running, *others]}
        self.order = [number for number in self.order if number in live]
        self.order += [number for number in sorted(live) if number not in self.order]
        if not state.running:
            first = next(request for request in others if request.id == self.order[0])
            if draft.run(first):
                self.began[first.id] = first.output_tokens
            return draft.plan()
        (request,) = state.running
        if others and self._had_its_turn(request):
            self.order.remove(request.id)
            self.order.append(request.id)
            draft.preempt(request)
        else:
            draft.run(request)
        return draft.plan()

    def _had_its_turn(self, request: RequestState) -> bool:
        return request.output_tokens - self.began[request.id] >= 4 and not request.in_flight


class SwapsByTurns:
    """One that had three tokens is swapped out, if somebody waits."""

    def __init__(self) -> None:
        self.began: dict[int, int] = {}

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        others = outside(state)
        if others and len(state.running) > 1:
            for request in state.running:
                had = request.output_tokens - self.began.get(request.id, request.output_tokens)
                if had >= 3 and draft.swap(request):
                    break
        for request in state.running:
            draft.run_preempting(request, swap=True)
        if not draft.preempts:
            for request in others:
                fits = state.blocks_for(request, next_size(request)) <= draft.free_blocks
                if not fits or not draft.run(request):
                    break
                self.began[request.id] = request.output_tokens
        return draft.plan()


class Jumpy:
    """Preempts whoever had two tokens, also while it is in flight."""

    def __init__(self) -> None:
        self.began: dict[int, int] = {}

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        others = sorted(outside(state), key=lambda r: (r.preemptions, r.id))
        for request in others:
            state.cached_tokens(request)
        for request in state.running:
            had = request.output_tokens - self.began.get(request.id, 0)
            if others and had >= 2 and draft.preempt(request):
                break
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts:
            for request in others:
                if draft.run(request):
                    self.began[request.id] = request.output_tokens
        return draft.plan()


class EveryOtherIteration:
    """Pauses in every second iteration; one request at a time."""

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        if state.iteration % 2:
            return draft.plan()
        draft.run(state.running[0] if state.running else state.waiting[0])
        return draft.plan()


class WaitsForABatch:
    """Waits for four requests, up to 5 ms."""

    promises = Promises(fcfs=True, no_eviction=True, no_barrier=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run(request)
        waiting = state.waiting
        full = len(waiting) >= 4
        if waiting and (full or state.now_ns - waiting[0].arrival_ns >= 5_000_000):
            for request in waiting:
                if not draft.run(request, reserve=request.final_tokens):
                    break
        return draft.plan()


class PausesAdmissions:
    """Admits nobody in the iteration after one that admits."""

    promises = Promises(fcfs=True, no_barrier=True)

    def __init__(self) -> None:
        self.admitted = False

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts and not self.admitted:
            for request in outside(state):
                if not draft.run(request):
                    break
        self.admitted = draft.admits
        return draft.plan()


class HalfDuplex:
    """Prefills, and does all else, by turns."""

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        if state.iteration % 2:
            for request in state.running:
                if request.computed_tokens < request.prompt_tokens:
                    draft.run_preempting(request)
            plan = draft.plan()
            if plan.run:
                return plan
        for request in state.running:
            draft.run_preempting(request)
        if not draft.preempts:
            for request in outside(state):
                if not draft.run(request):
                    break
        return draft.plan()


# -- little at a time ------------------------------------------------------------------------------


class OneToken:
    """One token of each request in an iteration, whatever the budget."""

    promises = Promises(fcfs=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        one = 1 if state.limits.chunked_prefill else None
        for request in state.running:
            draft.run(request, tokens=one)
        for request in state.waiting:
            if not draft.run(request, tokens=one, reserve=request.final_tokens):
                break
        return draft.plan()


class Serial:
    """One request at a time, the newest first, token by token."""

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        one = 1 if state.limits.chunked_prefill else None
        if state.running:
            draft.run(state.running[0], tokens=one)
        elif state.waiting:
            draft.run(state.waiting[-1], tokens=one)
        return draft.plan()


class Swaps:
    """The latest is swapped out for want of blocks, and comes back in its order."""

    promises = Promises(fcfs=True, no_barrier=True, work_conserving=True)

    def plan(self, state: SchedulerState) -> Plan:
        draft = state.draft()
        for request in state.running:
            draft.run_preempting(request, swap=True)
        if not draft.preempts:
            for request in outside(state):
                if state.blocks_for(request, next_size(request)) > draft.free_blocks:
                    break
                if not draft.run(request):
                    break
        return draft.plan()


# -- by hand ---------------------------------------------------------------------------------------


class ByHand:
    """Its own arithmetic: all is reserved, and the youngest stands first in the plan."""

    promises = Promises(no_eviction=True, no_barrier=True, work_conserving=True, starvation_bound=0)

    def plan(self, state: SchedulerState) -> Plan:
        limits = state.limits
        free, budget = state.free_blocks - limits.watermark_blocks, limits.token_budget
        run, reserve = [], []
        for request in sorted(state.running, key=lambda r: r.id):
            count = min(request.pending_tokens, budget)
            if count and (count == request.pending_tokens or limits.chunked_prefill):
                run.append((request.id, count))
                budget -= count
        places = state.max_sequences - len(state.running)
        for request in state.waiting:
            pending = request.pending_tokens - state.cached_tokens(request)
            count = min(pending, budget)
            needed = state.blocks_for(request, request.final_tokens)
            if not count or places < 1 or needed > free:
                break
            if count < pending and not limits.chunked_prefill:
                break
            free, budget, places = free - needed, budget - count, places - 1
            run.append((request.id, count))
            reserve.append((request.id, request.final_tokens))
        return Plan(run=tuple(reversed(run)), reserve=tuple(reserve))


class PreemptsByHand:
    """Its own arithmetic, with preemption: what is fenced comes back later."""

    promises = Promises(fcfs=True, no_barrier=True)

    def plan(self, state: SchedulerState) -> Plan:
        limits = state.limits
        self.free, self.budget, self.coming = (
            state.free_blocks,
            limits.token_budget,
            state.fenced_blocks,
        )
        self.kept = list(state.running)
        self.run: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        victims: list[int] = []
        for request in state.running:
            if request in self.kept:
                self._run(state, request, victims)
        if not victims:
            self._admit(state)
        return Plan(tuple(self.run.items()), tuple(victims))

    def _run(self, state: SchedulerState, request: RequestState, victims: list[int]) -> None:
        chunked = state.limits.chunked_prefill
        count = min(request.pending_tokens, self.budget)
        if count < 1 or (count < request.pending_tokens and not chunked):
            return

        def needed(tokens: int) -> int:
            return state.blocks_for(request, request.computed_tokens + tokens)

        while chunked and count > 1 and needed(count) > self.free:
            count -= 1
        while needed(count) > self.free and not self.coming:
            victim = self.kept.pop()
            victims.append(victim.id)
            self.free += self.taken.pop(victim.id, 0) + state.blocks_freed(victim)
            self.budget += self.run.pop(victim.id, 0)
            if victim.in_flight:
                self.coming += victim.held_blocks
            if victim is request:
                return
        if needed(count) <= self.free:
            self.run[request.id], self.taken[request.id] = count, needed(count)
            self.free, self.budget = self.free - needed(count), self.budget - count

    def _admit(self, state: SchedulerState) -> None:
        limits = state.limits
        places = state.max_sequences - len(state.running)
        for request in outside(state):
            swapped = request.state == "swapped"
            done = request.computed_tokens if swapped else state.cached_tokens(request)
            pending = request.pending_tokens - (0 if swapped else done)
            count = min(pending, self.budget)
            needed = state.blocks_for(request, done + count)
            if count < 1 or places < 1 or needed > self.free - limits.watermark_blocks:
                break
            if count < pending and not limits.chunked_prefill:
                break
            self.run[request.id] = count
            self.free, self.budget, places = self.free - needed, self.budget - count, places - 1


# -- at random -------------------------------------------------------------------------------------


class RandomPlans:
    """Any valid plan; it may thus turn in circles."""

    def __init__(self) -> None:
        self.rng = Random(12345)

    def plan(self, state: Any) -> Plan:
        rng = self.rng
        preempt, swap = self._victims(state, rng.choice((0.03, 0.15, 0.3)))
        out = {*preempt, *swap}
        candidates = [*state.running, *state.preempted, *state.waiting[:6]]
        rng.shuffle(candidates)
        run: list[tuple[int, int]] = []
        reserve: list[tuple[int, int]] = []
        for request in candidates:
            more = self._reserves(state, request)
            for count in self._counts(state, request) if request.id not in out else ():
                plan = Plan(
                    (*run, (request.id, count)), tuple(preempt), tuple(swap), (*reserve, *more)
                )
                if self._is_valid(state, plan):
                    run.append((request.id, count))
                    reserve += more
                    break
        return Plan(tuple(run), tuple(preempt), tuple(swap), tuple(reserve))

    def _victims(self, state: State, share: float) -> tuple[list[int], list[int]]:
        preempt: list[int] = []
        swap: list[int] = []
        for request in state.running:
            if self.rng.random() < share:
                swapped = Plan(preempt=tuple(preempt), swap=(*swap, request.id))
                swaps = self.rng.random() < 0.6 and self._is_valid(state, swapped)
                (swap if swaps else preempt).append(request.id)
        return preempt, swap

    def _counts(self, state: State, request: RequestState) -> list[int]:
        """Numbers of its tokens to try."""
        found = request.state in ("running", "swapped")
        pending = request.pending_tokens - (0 if found else state.cached_tokens(request))
        if pending < 1:
            return []
        counts = [pending, self.rng.randint(1, pending), 1]
        self.rng.shuffle(counts)
        return counts if self.rng.random() < 0.7 else [pending]

    def _reserves(self, state: State, request: RequestState) -> list[tuple[int, int]]:
        if request.state == "running" or self.rng.random() > 0.3:
            return []
        return [(request.id, self.rng.randint(0, state.total_blocks * state.block_size))]

    def _is_valid(self, state: State, plan: Plan) -> bool:
        assert state._scheduler is not None
        try:
            Validation(state._scheduler, state).check(plan)
        except PolicyError:
            return False
        return True


# -- what is said of them --------------------------------------------------------------------------


def said(policy: PolicyFactory, seed: str, run: int) -> list[Violation]:
    """What is said in one run of the swarm, to the end of all requests."""
    draw = draw_run(f"{seed}/{run}", SchedulerSubject.capabilities)
    harness = SchedulingHarness(
        SchedulerSubject(draw.configuration, policy=policy), audit_interval=None if run % 4 else 1
    )
    performed: list[AnyOperation] = list(draw.operations)
    if not harness.run(draw.operations):
        harness.drain(performed)
        harness.audit()
    return list(harness.violations)


CORRECT: tuple[type[SchedulerPolicy], ...] = (
    LastInFirstOut,
    ShortestRemainingFirst,
    LongestPrefixFirst,
    ListsTheNewestFirst,
    AdmitsFirst,
    PreemptsForTheUrgent,
    Quantum,
    SwapsByTurns,
    Jumpy,
    EveryOtherIteration,
    WaitsForABatch,
    PausesAdmissions,
    HalfDuplex,
    OneToken,
    Serial,
    Swaps,
    ByHand,
    PreemptsByHand,
)


@pytest.mark.parametrize("policy", CORRECT)
def test_nothing_is_said_of_a_correct_policy(policy: type[SchedulerPolicy]) -> None:
    for run in range(RUNS):
        assert said(policy, "unusual", run) == []


def test_of_random_valid_plans_only_their_circles_are_told() -> None:
    for run in range(RUNS):
        assert {violation.property for violation in said(RandomPlans, "random", run)} <= {"LIVE"}


def test_what_a_request_would_find_is_looked_up_anew_when_it_waits_again() -> None:
    """It was asked about while it waited, ran, got a token, and waits again with one more.

    Nothing changed in the pool between the two questions, but the request did.
    """
    harness = SchedulingHarness(
        SchedulerSubject(Configuration(blocks=5, block_size=1, requests=1), policy=Jumpy),
        audit_interval=1,
    )
    for operation in (
        Arrive((Segment(1, 1),), 2),
        Run(2),
        Arrive((Segment(1, 1),), 3),
        Schedule(),
        Run(2),
        Arrive((Segment(0, 1),)),
        Schedule(),
        Schedule(),
    ):
        harness.perform(operation)
        assert harness.violations == ()
