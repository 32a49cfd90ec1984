"""The iteration-level scheduler: queues, policies' plans, steps, and the clock.

It drives the paged cache through the operations that :mod:`kvproof.invariants.operations` names,
each all-or-nothing, and never touches a block itself.  One iteration:

1. the policy is given a :class:`~kvproof.engine.policy.SchedulerState` and answers with a plan;
2. the plan is checked as a whole, against the contract and against what is free: if anything is
   wrong, nothing of it is applied;
3. requests are preempted or swapped out; those to be admitted take their prefix hits; then all
   take the blocks that they need, and one step over all parts is launched.

``retire`` ends the oldest step: requests whose last token was computed get the next output token,
and those that stop give back their blocks.  Up to ``configuration.run_ahead`` steps are in flight:
with two, the next iteration is planned while the tokens of this one are not known yet (survey
Q18), and blocks given back meanwhile stay fenced until the step that uses them is retired.

Where completed blocks are copied to lower tiers, an :class:`~kvproof.engine.offloading.Offloader`
does that before each plan.  Swaps are copied within the iteration: its step takes longer by that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from kvproof.engine.arithmetic import blocks_needed
from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.engine import Engine
from kvproof.engine.isolation import SECONDS_PER_CALL, PolicyError, call_policy
from kvproof.engine.job import Hit, Job, cached, job_times
from kvproof.engine.metrics import request_metrics, scheduler_metrics
from kvproof.engine.offloading import NO_COPIES, Offloader
from kvproof.engine.plan_validation import Validation
from kvproof.engine.policy import Plan, RequestState, SchedulerPolicy
from kvproof.engine.request import Request
from kvproof.engine.scheduler_state import State
from kvproof.invariants.events import TransferKind
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Arrive,
    Decode,
    Finish,
    Launch,
    Operation,
    Preempt,
    Reserve,
    Resume,
    Retire,
    kind_of,
)
from kvproof.invariants.outcomes import (
    LARGER_THAN_MODEL,
    LARGER_THAN_POOL,
    NOTHING_TO_RUN,
    POLICY_FAILED,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    Completed,
    Part,
    PlanRejected,
    RequestArrived,
    RequestCancelled,
    Scheduled,
    SchedulerEvent,
)

_by_id = attrgetter("id")
_RETIRE = Retire()
_REMEMBERED_HITS = 1 << 14
CHOICE = 0
"""All requests sample alike (greedily): equal sequences continue equally."""


class Cache(Protocol):
    """The paged cache under the scheduler."""

    engine: Engine

    def prepare(self, operation: Admit) -> Request:
        """The request that such an admission would admit, with its keys, to be asked about."""
        ...

    def forget(self, operation: Admit) -> None:
        """That request will not be admitted."""
        ...


class SchedulerError(Exception):
    """The cache refused what the scheduler had found to fit: they do not agree."""


class _StepRecord:
    """A step in flight, as the scheduler remembers it."""

    __slots__ = ("finish_ns", "number", "samples")

    def __init__(self, number: int, samples: list[tuple[Job, int]], finish_ns: int) -> None:
        self.number = number
        self.samples = samples
        """Whose last pending token it computes, and the index of the output token sampled."""
        self.finish_ns = finish_ns


class Scheduler:
    """Continuous batching over one cache, by one policy."""

    def __init__(
        self,
        cache: Cache,
        policy: SchedulerPolicy,
        *,
        perform: Callable[[Operation], Outcome],
        emit: Callable[[SchedulerEvent], None] = lambda event: None,
        clock: VirtualClock | None = None,
        cost: CostModel | None = None,
        on_finished: Callable[[Job], None] = lambda job: None,
        seconds_per_call: float = SECONDS_PER_CALL,
    ) -> None:
        """``perform`` applies an operation to the cache, and may check what it did.

        ``on_finished`` is called with each request that stops, while it still holds its blocks.
        """
        self.on_finished = on_finished
        limits = cache.engine.configuration.scheduling
        if not limits.chunked_prefill and limits.token_budget < limits.max_model_tokens:
            raise ValueError(
                f"without chunked prefill the token budget ({limits.token_budget}) must hold the "
                f"longest request ({limits.max_model_tokens} tokens)"
            )
        self.cache = cache
        self.engine = cache.engine
        self.configuration = cache.engine.configuration
        self.limits = self.configuration.scheduling
        self.policy = policy
        self.clock = clock or VirtualClock()
        self.cost = cost or CostModel()
        self.jobs: dict[int, Job] = {}
        """Live ones, by arrival."""
        self.waiting: list[RequestState] = []
        """Never admitted ones, by arrival."""
        self.suspended: dict[int, Job] = {}
        """Preempted and swapped ones."""
        self.by_cache_id: dict[int, Job] = {}
        """Running ones."""
        self.iterations = 0
        self.resumptions = 0
        self.arrivals = 0
        self._admissions = 0
        self._hits: dict[int, tuple[int, Hit]] = {}
        """Of those that wait: what they would find, in which generation of the pools."""
        self._steps: list[_StepRecord] = []
        self._swap_ns = 0
        """What the swaps of this iteration take."""
        self.perform = perform
        self.emit = emit
        self._seconds_per_call = seconds_per_call
        prefixes = self.configuration.offloads_prefixes
        self.offloader = Offloader(self) if prefixes else None

    @property
    def next_finish_ns(self) -> int | None:
        """Virtual time at which the oldest step in flight ends; None if there is none."""
        return self._steps[0].finish_ns if self._steps else None

    @property
    def next_delivery_ns(self) -> int | None:
        """Virtual time at which the next copy has arrived; None if there is none."""
        return self.offloader.next_delivery_ns if self.offloader is not None else None

    def is_deferred(self, number: int) -> bool:
        """Whether a waiting request may not be admitted, since KV is on its way.

        Its own, or that of one that arrived before it.
        """
        offloader = self.offloader
        return (
            offloader is not None and bool(offloader.deferred) and number >= offloader.deferred[0]
        )

    # -- the clients' side -----------------------------------------------------------------------

    def arrive(self, operation: Arrive) -> Outcome:
        """A request joins the waiting ones.

        Refused at once, with ``larger_than_pool`` or ``larger_than_model``, if it could never run
        to its end (bug B134; survey K17).
        """
        self.clock.advance_to(operation.at_ns)
        now = self.clock.now_ns
        job = Job(self.arrivals, operation, now)
        refusal = self._never_fits(job)
        if refusal:
            return Outcome("refused", refusal)
        self.arrivals += 1
        self.jobs[job.id] = job
        self.waiting.append(job.waiting_state)
        self.emit(
            RequestArrived(job.id, now, job.prompt_tokens, job.max_tokens, job.output, job.priority)
        )
        return Outcome("done", None, job.id)

    def _never_fits(self, job: Job) -> str | None:
        if job.prompt_tokens + job.max_tokens > self.limits.max_model_tokens:
            return LARGER_THAN_MODEL
        room = self.configuration.blocks - self.limits.watermark_blocks
        needed = blocks_needed(job.final_tokens, self.configuration.block_size)
        return LARGER_THAN_POOL if needed > room else None

    def abort(self, number: int) -> Outcome:
        """A live request is cancelled, wherever it stands.  Raises KeyError if it is not live."""
        job = self.jobs[number]
        if job.cache is not None:
            self.must(Abort(_index(sorted(self.engine.requests), job.cache.id)))
        self._forget(job)
        self.emit(RequestCancelled(job.id))
        return Outcome("done", None, job.id)

    def _forget(self, job: Job) -> None:
        del self.jobs[job.id]
        if job.cache is None:
            self.cache.forget(job.admit)
            self._leave_waiting(job)
        else:
            self.by_cache_id.pop(job.cache.id, None)
        self.suspended.pop(job.id, None)

    def _leave_waiting(self, job: Job) -> None:
        del self.waiting[bisect_left(self.waiting, job.id, key=_by_id)]

    # -- one iteration ---------------------------------------------------------------------------

    def schedule(self) -> Outcome:
        """Plan one iteration, apply the plan, and launch its step.

        Refused with ``run_ahead_limit``, ``nothing_to_run`` (nobody is there), or
        ``policy_failed`` if the policy has no valid plan: then nothing is changed.
        """
        if len(self._steps) >= self.configuration.run_ahead:
            return Outcome("refused", RUN_AHEAD_LIMIT)
        if not self.jobs:
            return Outcome("refused", NOTHING_TO_RUN)
        if self.offloader is not None:
            self.offloader.before_plan()
        state = State(self)
        try:
            plan = call_policy(self.policy, state, self._seconds_per_call)
            for request, tokens, blocks, cached_tokens in state.looked_up()[0]:
                self.emit(BlocksCounted(request, tokens, blocks, cached_tokens))
            Validation(self, state).check(plan)
        except PolicyError as error:
            self.emit(PlanRejected(error.kind, error.message, state.summary()))  # type: ignore[arg-type]
            return Outcome("refused", POLICY_FAILED)
        finally:
            state.close()
        return self._apply(plan, state.looked_up()[1])

    def _apply(self, plan: Plan, hits: Mapping[int, Hit]) -> Outcome:
        for number in plan.preempt:
            self._suspend(self.jobs[number], swap=False)
        for number in plan.swap:
            self._suspend(self.jobs[number], swap=True)
        admissions = [
            (self.jobs[number], tokens)
            for number, tokens in plan.run
            if self.jobs[number].state != "running"
        ]
        admitted = [job.id for job, _ in admissions if job.cache is None]
        resumed = [job.id for job, _ in admissions if job.cache is not None]
        for rank, number in enumerate(admitted, self._admissions):
            self.jobs[number].rank = rank
        self._admissions += len(admitted)
        running = [item for item in plan.run if self.jobs[item[0]].state == "running"]
        self._admit_all(admissions, dict(plan.reserve), running, hits)
        parts, outcome = self._launch(plan.run) if plan.run else ((), None)
        self.iterations += 1
        if not self._steps:
            self._let_time_pass()
        self.emit(
            Scheduled(
                self.iterations - 1,
                self.clock.now_ns,
                self._steps[-1].number if outcome else None,
                parts,
                tuple(admitted),
                tuple(resumed),
                tuple(plan.preempt),
                tuple(plan.swap),
            )
        )
        return Outcome("done", count=outcome.count if outcome else 0)

    def _let_time_pass(self) -> None:
        """Nothing runs: time passes all the same, for a policy that waits for it."""
        until_ns = self.clock.now_ns + self.cost.step_ns
        delivery_ns = self.next_delivery_ns
        self.clock.advance_to(until_ns if delivery_ns is None else min(until_ns, delivery_ns))

    def _suspend(self, job: Job, *, swap: bool) -> None:
        request = cached(job)
        if swap:
            self._swap_ns += self._copy_ns("swap_out", request)
        self.must(Preempt(self._running_index(request), swap))
        job.state = "swapped" if swap else "preempted"
        self.suspended[job.id] = job
        del self.by_cache_id[request.id]

    def _copy_ns(self, kind: TransferKind, request: Request) -> int:
        """What it takes to swap the request's computed tokens out or in."""
        size = request.block_size
        blocks = blocks_needed(request.computed, size) * len(self.engine.pools)
        return self.cost.copy_ns(kind, blocks * size * self.configuration.kv_bytes_per_token)

    def _admit_all(
        self,
        admissions: list[tuple[Job, int]],
        reserve: Mapping[int, int],
        running: list[tuple[int, int]],
        hits: Mapping[int, Hit],
    ) -> None:
        """Admissions and growth, in an order in which no allocation evicts another one's hits.

        Those with a prefix hit first, with nothing but it; then all others take blocks.
        """
        slots = {}
        for job, tokens in admissions:
            done = hits[job.id].cached_tokens
            slots[job.id] = max(done + tokens, reserve.get(job.id, 0))
            if done and job.state != "swapped":
                self._admit(job, 1)
        self._grow(running)
        for job, tokens in admissions:
            if job.state != "running":
                self._admit(job, slots[job.id])
            else:
                self.must(Reserve(self._running_index(cached(job)), slots[job.id]))
            request = cached(job)
            if request.scheduled + tokens > len(request.tokens):
                # Its latest output token: it was delivered, but the cache has not seen it yet.
                self.must(Decode((self._running_index(request),), CHOICE))

    def _grow(self, run: Iterable[tuple[int, int]]) -> None:
        """Slots for what the running ones compute: the latest output token, or a chunk."""
        running = self.engine.running
        index_of = {request.id: index for index, request in enumerate(running)}
        decoding = []
        for number, tokens in run:
            request = cached(self.jobs[number])
            if request.scheduled + tokens > len(request.tokens):
                decoding.append(index_of[request.id])
            elif request.scheduled + tokens > _slots(request):
                self.must(Reserve(index_of[request.id], request.scheduled + tokens))
        if decoding:
            self.must(Decode(tuple(decoding), CHOICE))

    def _admit(self, job: Job, slots: int) -> None:
        engine = self.engine
        if job.cache is None:
            admit = job.admit
            outcome = self.must(Admit(admit.prompt, admit.salt, admit.adapter, slots=slots))
            assert outcome.request is not None
            job.cache = engine.requests[outcome.request]
            self._leave_waiting(job)
        else:
            index = _index([other.id for other in engine.preempted], job.cache.id)
            if job.state == "swapped":
                self._swap_ns += self._copy_ns("swap_in", job.cache)
            self.must(Resume(index, slots))
            del self.suspended[job.id]
            self.resumptions += 1
        job.state = "running"
        self._hits.pop(job.id, None)  # it will have other tokens when it asks again
        self.by_cache_id[job.cache.id] = job

    def hit_of(self, job: Job) -> Hit:
        """What an admission of this request would find in the cache, as it is now."""
        generation = sum([pool.generation for pool in self.engine.pools])
        known = self._hits.get(job.id)
        if known is not None and known[0] == generation:
            return known[1]
        if len(self._hits) >= _REMEMBERED_HITS:
            del self._hits[next(iter(self._hits))]
        found = self._look_up(job)
        self._hits[job.id] = generation, found
        return found

    def _look_up(self, job: Job) -> Hit:
        request = job.cache or self.cache.prepare(job.admit)
        if request.swapped:
            return Hit(request.computed, 0, blocks_needed(request.computed, request.block_size))
        rows, revived = self.engine.hit(request)
        return Hit(rows * request.block_size, rows, revived)

    def _launch(self, run: Sequence[tuple[int, int]]) -> tuple[tuple[Part, ...], Outcome]:
        engine = self.engine
        index_of = {request.id: index for index, request in enumerate(engine.running)}
        items = tuple([(index_of[cached(self.jobs[number]).id], tokens) for number, tokens in run])
        outcome = self.must(Launch(items=items))
        step = engine.steps[-1]
        now = self.clock.now_ns
        samples, parts = [], []
        prefill = decode = read = 0
        for item in step.items:
            job = self.by_cache_id[item.request]
            tokens = item.end - item.start
            parts.append(Part(job.id, tokens, item.request))
            if job.scheduled_ns < 0:
                job.scheduled_ns = now
            read += item.end
            if item.start >= job.prompt_tokens:
                decode += 1
            else:
                prefill += tokens
            length = len(cached(job).tokens)
            if item.end == length:
                samples.append((job, length - job.prompt_tokens))
        begins = max(now, self._steps[-1].finish_ns if self._steps else 0)
        finish = begins + self._swap_ns + self.cost.duration_ns(prefill, decode, read)
        self._swap_ns = 0
        self._steps.append(_StepRecord(step.number, samples, finish))
        return tuple(parts), outcome

    def _running_index(self, request: Request) -> int:
        return bisect_left(self.engine.running, request.id, key=_by_id)

    def must(self, operation: Operation) -> Outcome:
        """An operation that must be done: it has been found to be possible."""
        outcome = self.perform(operation)
        if outcome.status != "done":
            raise SchedulerError(
                f"{kind_of(operation)} was {outcome.status} ({outcome.reason}), although the plan "
                "was found to fit"
            )
        return outcome

    # -- results -----------------------------------------------------------------------------------

    def retire(self) -> Outcome:
        """The oldest step ends: its output tokens are delivered, and those that stop are finished.

        Skipped if none is in flight.
        """
        if not self._steps:
            return SKIPPED
        step = self._steps.pop(0)
        self.must(_RETIRE)
        self.clock.advance_to(step.finish_ns)
        if self.offloader is not None:
            self.offloader.deliver()
        now = self.clock.now_ns
        sampled, finished = [], []
        for job, index in step.samples:
            # Each output token once, whoever computed it: a request that was preempted meanwhile
            # gets it, one that ended does not (bug B74; survey, promise 12 of vLLM).
            if job.id not in self.jobs or index != job.outputs:
                continue
            job.outputs += 1
            sampled.append(job.id)
            if job.first_token_ns < 0:
                job.first_token_ns = now
            job.last_token_ns = now
            if job.outputs >= job.output:
                finished.append(job)
        for job in finished:
            self._finish(job)
        self.emit(Completed(step.number, now, tuple(sampled), tuple([j.id for j in finished])))
        return Outcome("done", count=len(sampled))

    def _finish(self, job: Job) -> None:
        self.on_finished(job)
        request = cached(job)
        if job.state == "running":
            self.must(Finish(self._running_index(request)))
        else:  # its last token came from a step launched before it was preempted
            self.must(Abort(_index(sorted(self.engine.requests), request.id)))
        self._forget(job)

    def run(self, iterations: int) -> Outcome:
        """So many iterations, each scheduled and retired; fewer if nothing is left to run."""
        for done in range(iterations):
            outcome = self.schedule()
            if outcome.reason == POLICY_FAILED:
                return outcome
            if self.retire().status == "skipped" and outcome.status != "done":
                return Outcome("done", count=done) if done else outcome
        return Outcome("done", count=iterations)

    def wait(self, duration_ns: int) -> Outcome:
        """So much time passes; copies that have arrived by then are delivered."""
        until_ns = self.clock.now_ns + duration_ns
        if self.offloader is not None:
            self.offloader.wait_until(until_ns)
        self.clock.advance_to(until_ns)
        return Outcome("done")

    # -- figures -----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """The chapter's scheduler figures; see :mod:`kvproof.engine.metrics`."""
        figures = scheduler_metrics(self.engine)
        figures["waiting_sequences"] = len(self.waiting) + len(self.suspended)
        figures["resumptions"] = self.resumptions
        figures |= self.offloader.figures() if self.offloader is not None else NO_COPIES
        return figures

    def request_metrics(self, number: int) -> dict[str, int]:
        """The chapter's figures of one live request; times in ns, 0 until they are known."""
        job = self.jobs[number]
        figures = (
            request_metrics(job.cache)
            if job.cache
            else {"cached_tokens": 0, "allocated_blocks": 0, "preemptions": 0}
        )
        figures["input_tokens"] = job.prompt_tokens
        return figures | job_times(job)


def _slots(request: Request) -> int:
    """Positions of a running request that have blocks."""
    return len(request.tables[0]) * request.block_size


def _index(numbers: list[int], number: int) -> int:
    """Where a number stands in a sorted list that holds it."""
    return bisect_left(numbers, number)
