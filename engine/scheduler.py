"""The iteration-level scheduler: queues, policies' plans, steps, and the clock.

It drives the paged cache through the operations that :mod:`kvproof.invariants.operations` names,
each all-or-nothing, and never touches a block itself.  One iteration:

1. the policy is given a :class:`~kvproof.engine.policy.SchedulerState` and answers with a plan;
2. the plan is checked as a whole, against the contract and against what is free: if anything is
   wrong, nothing of it is applied;
3. requests are preempted or swapped out, then the running ones grow, then others are admitted, in
   the plan's order; one step over all parts is launched.

``retire`` ends the oldest step: requests whose last token was computed get the next output token,
and those that stop give back their blocks.  Up to ``configuration.run_ahead`` steps are in flight:
with two, the next iteration is planned while the tokens of this one are not known yet (survey
Q18), and blocks given back meanwhile stay fenced until the step that uses them is retired.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, overload

from kvproof.engine.arithmetic import blocks_needed
from kvproof.engine.clock import CostModel, VirtualClock
from kvproof.engine.engine import Engine
from kvproof.engine.isolation import SECONDS_PER_CALL, PolicyError, call_policy
from kvproof.engine.metrics import request_metrics, scheduler_metrics
from kvproof.engine.policy import Draft, Plan, RequestState, SchedulerPolicy
from kvproof.engine.request import Request
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
from kvproof.invariants.prompts import prompt_length
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    Completed,
    Part,
    PlanRejected,
    QueueState,
    RequestArrived,
    RequestCancelled,
    Scheduled,
    SchedulerEvent,
)

_by_id = attrgetter("id")
_rank = attrgetter("rank")
_RETIRE = Retire()
_REMEMBERED_HITS = 64
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


class Job:
    """One request of a client, from arrival to end."""

    __slots__ = (
        "admit",
        "arrival_ns",
        "cache",
        "expected",
        "first_token_ns",
        "id",
        "last_token_ns",
        "max_tokens",
        "output",
        "outputs",
        "preemptions",
        "priority",
        "prompt_tokens",
        "rank",
        "scheduled_ns",
        "state",
        "waiting_state",
    )

    def __init__(self, number: int, operation: Arrive, arrival_ns: int) -> None:
        self.id = number
        self.admit = Admit(operation.prompt, salt=operation.salt)
        self.arrival_ns = arrival_ns
        self.priority = operation.priority
        self.prompt_tokens = prompt_length(operation.prompt)
        self.output = operation.output
        """Output tokens after which it stops."""
        self.max_tokens = max(operation.max_tokens, operation.output)
        self.outputs = 0
        """Output tokens delivered."""
        self.expected = 0
        """… and those that steps in flight are sampling."""
        self.state: QueueState = "waiting"
        self.cache: Request | None = None
        """What the cache knows of it; None before its first admission."""
        self.preemptions = 0
        self.rank = -1
        """Of its first admission."""
        self.scheduled_ns = self.first_token_ns = self.last_token_ns = -1
        self.waiting_state = RequestState(
            number,
            "waiting",
            arrival_ns,
            self.priority,
            self.prompt_tokens,
            self.max_tokens,
            pending_tokens=self.prompt_tokens,
        )

    @property
    def final_tokens(self) -> int:
        """Tokens whose KV it has in the end, at most."""
        return self.prompt_tokens + self.max_tokens - 1


class _Hit(NamedTuple):
    """What a request that is to be admitted finds in the cache, or on the host."""

    cached_tokens: int
    blocks: int
    """Device blocks that hold them."""
    taken: int
    """Blocks that its hit takes from the free ones: cached-free ones, or for what is swapped."""

    def blocks_for(self, slots: int, block_size: int) -> int:
        """Free blocks that it takes to give blocks to ``slots`` positions."""
        needed = blocks_needed(slots, block_size)
        if self.cached_tokens and not self.blocks:
            return max(needed, self.taken)  # from the host: all into new blocks
        return max(0, needed - self.blocks) + self.taken


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
        self._hits: dict[int, tuple[int, _Hit]] = {}
        """Of those that wait: what they would find, in which generation of the pools."""
        self._steps: list[_StepRecord] = []
        self._perform = perform
        self._emit = emit
        self._seconds_per_call = seconds_per_call

    @property
    def next_finish_ns(self) -> int | None:
        """Virtual time at which the oldest step in flight ends; None if there is none."""
        return self._steps[0].finish_ns if self._steps else None

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
        self._emit(
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
            self._do(Abort(_index(sorted(self.engine.requests), job.cache.id)))
        self._forget(job)
        self._emit(RequestCancelled(job.id))
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
        state = _State(self)
        try:
            plan = call_policy(self.policy, state, self._seconds_per_call)
            for request, tokens, blocks, cached in state.counted:
                self._emit(BlocksCounted(request, tokens, blocks, cached))
            _Validation(self, state).check(plan)
        except PolicyError as error:
            self._emit(PlanRejected(error.kind, error.message, state.summary()))  # type: ignore[arg-type]
            return Outcome("refused", POLICY_FAILED)
        finally:
            state.close()
        return self._apply(plan, state.hits)

    def _apply(self, plan: Plan, hits: Mapping[int, _Hit]) -> Outcome:
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
        self._emit(
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

    def _suspend(self, job: Job, *, swap: bool) -> None:
        request = _cached(job)
        self._do(Preempt(self._running_index(request), swap))
        job.state = "swapped" if swap else "preempted"
        job.preemptions += 1
        self.suspended[job.id] = job
        del self.by_cache_id[request.id]

    def _admit_all(
        self,
        admissions: list[tuple[Job, int]],
        reserve: Mapping[int, int],
        running: list[tuple[int, int]],
        hits: Mapping[int, _Hit],
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
            elif slots[job.id] > _slots(_cached(job)):
                self._do(Reserve(self._running_index(_cached(job)), slots[job.id]))
            request = _cached(job)
            if request.scheduled + tokens > len(request.tokens):
                # Its latest output token: it was delivered, but the cache has not seen it yet.
                self._do(Decode((self._running_index(request),), CHOICE))

    def _grow(self, run: Iterable[tuple[int, int]]) -> None:
        """Slots for what the running ones compute: the latest output token, or a chunk."""
        running = self.engine.running
        index_of = {request.id: index for index, request in enumerate(running)}
        decoding = []
        for number, tokens in run:
            request = _cached(self.jobs[number])
            if request.scheduled + tokens > len(request.tokens):
                decoding.append(index_of[request.id])
            elif request.scheduled + tokens > _slots(request):
                self._do(Reserve(index_of[request.id], request.scheduled + tokens))
        if decoding:
            self._do(Decode(tuple(decoding), CHOICE))

    def _admit(self, job: Job, slots: int) -> None:
        engine = self.engine
        if job.cache is None:
            outcome = self._do(Admit(job.admit.prompt, salt=job.admit.salt, slots=slots))
            assert outcome.request is not None
            job.cache = engine.requests[outcome.request]
            self._leave_waiting(job)
        else:
            index = _index([other.id for other in engine.preempted], job.cache.id)
            self._do(Resume(index, slots))
            del self.suspended[job.id]
            self.resumptions += 1
        job.state = "running"
        self.by_cache_id[job.cache.id] = job

    def hit_of(self, job: Job) -> _Hit:
        """What an admission of this request would find in the cache, as it is now."""
        generation = sum([pool.generation for pool in self.engine.pools])
        known = self._hits.get(job.id)
        if known is not None and known[0] == generation:
            return known[1]
        if len(self._hits) > _REMEMBERED_HITS:
            self._hits.clear()
        found = self._look_up(job)
        self._hits[job.id] = generation, found
        return found

    def _look_up(self, job: Job) -> _Hit:
        request = job.cache or self.cache.prepare(job.admit)
        if request.swapped:
            return _Hit(request.computed, 0, len(request.host_tables[0]))
        rows, revived = self.engine.hit(request)
        return _Hit(rows * request.block_size, rows, revived)

    def _launch(self, run: Sequence[tuple[int, int]]) -> tuple[tuple[Part, ...], Outcome]:
        engine = self.engine
        index_of = {request.id: index for index, request in enumerate(engine.running)}
        items = tuple([(index_of[_cached(self.jobs[number]).id], tokens) for number, tokens in run])
        outcome = self._do(Launch(items=items))
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
            length = len(_cached(job).tokens)
            if item.end == length:
                index = length - job.prompt_tokens
                samples.append((job, index))
                job.expected = max(job.expected, index + 1)
        begins = max(now, self._steps[-1].finish_ns if self._steps else 0)
        finish = begins + self.cost.duration_ns(prefill, decode, read)
        self._steps.append(_StepRecord(step.number, samples, finish))
        return tuple(parts), outcome

    def _running_index(self, request: Request) -> int:
        return bisect_left(self.engine.running, request.id, key=_by_id)

    def _do(self, operation: Operation) -> Outcome:
        """An operation that must be done: the plan has been found to fit."""
        outcome = self._perform(operation)
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
        self._do(_RETIRE)
        self.clock.advance_to(step.finish_ns)
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
        self._emit(Completed(step.number, now, tuple(sampled), tuple([j.id for j in finished])))
        return Outcome("done", count=len(sampled))

    def _finish(self, job: Job) -> None:
        self.on_finished(job)
        request = _cached(job)
        if job.state == "running":
            self._do(Finish(self._running_index(request)))
        else:  # its last token came from a step launched before it was preempted
            self._do(Abort(_index(sorted(self.engine.requests), request.id)))
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

    # -- figures -----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """The chapter's scheduler figures; see :mod:`kvproof.engine.metrics`."""
        figures = scheduler_metrics(self.engine)
        figures["waiting_sequences"] = len(self.waiting) + len(self.suspended)
        figures["resumptions"] = self.resumptions
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


def job_times(job: Job) -> dict[str, int]:
    """Queue, prefill and decode time in ns, as far as they have passed."""
    scheduled, first = job.scheduled_ns, job.first_token_ns
    return {
        "queue_time_ns": scheduled - job.arrival_ns if scheduled >= 0 else 0,
        "prefill_time_ns": first - scheduled if first >= 0 else 0,
        "decode_time_ns": job.last_token_ns - first if first >= 0 else 0,
    }


def _cached(job: Job) -> Request:
    assert job.cache is not None, "an admitted request is known to the cache"
    return job.cache


def _slots(request: Request) -> int:
    """Positions of a running request that have blocks."""
    return len(request.tables[0]) * request.block_size


def _index(numbers: list[int], number: int) -> int:
    """Where a number stands in a sorted list that holds it."""
    return bisect_left(numbers, number)


# -- what a policy sees ----------------------------------------------------------------------------


class _Waiting(Sequence[RequestState]):
    """The waiting requests, read-only; nothing is copied."""

    __slots__ = ("_states",)

    def __init__(self, states: list[RequestState]) -> None:
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def __reversed__(self) -> Iterator[RequestState]:
        return reversed(self._states)

    @overload
    def __getitem__(self, index: int) -> RequestState: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestState]: ...
    def __getitem__(self, index: Any) -> Any:
        found = self._states[index]
        return tuple(found) if isinstance(index, slice) else found


class _State:
    """The :class:`SchedulerState` of one call."""

    def __init__(self, scheduler: Scheduler) -> None:
        engine, configuration = scheduler.engine, scheduler.configuration
        set_ = object.__setattr__
        set_(self, "_scheduler", scheduler)
        set_(self, "counted", [])
        set_(self, "hits", {})
        set_(self, "iteration", scheduler.iterations)
        set_(self, "now_ns", scheduler.clock.now_ns)
        set_(self, "limits", scheduler.limits)
        set_(self, "block_size", configuration.block_size)
        set_(self, "total_blocks", configuration.blocks)
        set_(self, "max_sequences", configuration.requests)
        free = min([pool.free_count for pool in engine.pools])
        set_(self, "free_blocks", free)
        set_(self, "cached_free_blocks", min([pool.cached_free_count for pool in engine.pools]))
        set_(self, "fenced_blocks", _fenced_blocks(engine))
        set_(self, "free_host_blocks", min([pool.free_count for pool in engine.host_pools]))
        by_cache_id = scheduler.by_cache_id
        set_(
            self,
            "running",
            tuple([_running_state(job) for job in sorted(by_cache_id.values(), key=_rank)]),
        )
        suspended = sorted(scheduler.suspended.values(), key=_by_id)
        set_(self, "preempted", tuple([_suspended_state(job) for job in suspended]))
        set_(self, "waiting", _Waiting(scheduler.waiting))

    _scheduler: Scheduler | None
    hits: dict[int, _Hit]
    counted: list[tuple[int, int, int, int]]
    """What the policy asked about requests that wait: (request, tokens, blocks, cached tokens)."""
    iteration: int
    now_ns: int
    limits: Any
    block_size: int
    total_blocks: int
    max_sequences: int
    free_blocks: int
    cached_free_blocks: int
    fenced_blocks: int
    free_host_blocks: int
    running: tuple[RequestState, ...]
    preempted: tuple[RequestState, ...]
    waiting: _Waiting

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the scheduler's state is read-only: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"the scheduler's state is read-only: {name} cannot be deleted")

    def _job(self, request: RequestState) -> tuple[Scheduler, Job]:
        scheduler = self._scheduler
        if scheduler is None:
            raise RuntimeError("a SchedulerState is valid during its own call of plan only")
        return scheduler, scheduler.jobs[request.id]

    def blocks_for(self, request: RequestState, tokens: int) -> int:
        scheduler, job = self._job(request)
        if job.state == "running":
            held = len(_cached(job).tables[0])
            return max(0, blocks_needed(tokens, scheduler.configuration.block_size) - held)
        return self._count(job, tokens)[0]

    def cached_tokens(self, request: RequestState) -> int:
        _, job = self._job(request)
        return 0 if job.state == "running" else self._count(job, 1)[1]

    def _count(self, job: Job, tokens: int) -> tuple[int, int]:
        hit = self.hit(job)
        blocks = hit.blocks_for(tokens, self.block_size)
        answer = (job.id, tokens, blocks, hit.cached_tokens)
        if answer not in self.counted:
            self.counted.append(answer)
        return blocks, hit.cached_tokens

    def hit(self, job: Job) -> _Hit:
        """Looked up once: nothing changes while a plan is made and checked."""
        found = self.hits.get(job.id)
        if found is None:
            assert self._scheduler is not None
            found = self.hits[job.id] = self._scheduler.hit_of(job)
        return found

    def blocks_freed(self, request: RequestState) -> int:
        scheduler, job = self._job(request)
        return scheduler.engine.blocks_freed(_cached(job)) if job.state == "running" else 0

    def draft(self) -> Draft:
        return Draft(self)

    def close(self) -> None:
        """The call is over."""
        object.__setattr__(self, "_scheduler", None)

    def summary(self) -> str:
        """What the policy was given, in short."""

        def told(request: RequestState) -> str:
            return (
                f"r{request.id} ({request.state}, {request.prompt_tokens}+{request.output_tokens} "
                f"tokens, {request.computed_tokens} computed, {request.held_blocks} blocks)"
            )

        requests = [*self.running, *self.preempted, *islice(self.waiting, 4)]
        return (
            f"iteration {self.iteration}: {self.free_blocks} of {self.total_blocks} blocks of "
            f"{self.block_size} free ({self.cached_free_blocks} of them cached), budget "
            f"{self.limits.token_budget}, {len(self.waiting)} waiting; "
            + ", ".join([told(request) for request in requests[:8]])
        )


def _running_state(job: Job) -> RequestState:
    request = _cached(job)
    scheduled, prompt = request.scheduled, job.prompt_tokens
    known, known_outputs = len(request.tokens), prompt + job.outputs
    # Tokens that a step could compute now.  If there are none, a step in flight is sampling its
    # next token, which may be computed before it is known, unless it is the last.
    pending = (known if known > known_outputs else known_outputs) - scheduled
    if not pending and known - prompt + 1 < job.max_tokens:
        pending = 1
    return RequestState(
        job.id,
        "running",
        job.arrival_ns,
        job.priority,
        prompt,
        job.max_tokens,
        job.outputs,
        scheduled,
        pending,
        len(request.tables[0]),
        job.preemptions,
        request.steps_in_flight > 0,
    )


def known_tokens(job: Job) -> int:
    """Tokens of the request that are known, or (in steps in flight) have slots already."""
    grown = len(_cached(job).tokens) - job.prompt_tokens
    return job.prompt_tokens + max(grown, job.outputs)


def _suspended_state(job: Job) -> RequestState:
    request = _cached(job)
    swapped = job.state == "swapped"
    computed = request.computed if swapped else 0
    return RequestState(
        job.id,
        job.state,
        job.arrival_ns,
        job.priority,
        job.prompt_tokens,
        job.max_tokens,
        job.outputs,
        computed,
        known_tokens(job) - computed,
        0,
        job.preemptions,
        False,
    )


def _fenced_blocks(engine: Engine) -> int:
    """Blocks that only fences of steps in flight hold."""
    fenced = set()
    for step in engine.steps:
        for _, tables in step.fenced:
            fenced.update(tables[0])
    if not fenced:
        return 0
    held = {block for request in engine.running for block in request.tables[0]}
    return len(fenced - held)


# -- the contract ----------------------------------------------------------------------------------


class _Validation:
    """Checks one plan as a whole.  The sums are those that Draft documents."""

    def __init__(self, scheduler: Scheduler, state: _State) -> None:
        self._scheduler = scheduler
        self._engine = scheduler.engine
        self._limits = scheduler.limits
        self._state = state
        self._running = {request.id: request for request in state.running}

    def check(self, plan: Plan) -> None:
        """Raises PolicyError if the plan breaks the contract."""
        victims = self._victims(plan)
        admissions = self._run(plan, victims)
        self._reservations(plan, admissions)
        self._tokens(plan)
        self._sequences(victims, admissions)
        self._host(plan)
        self._blocks(plan, victims, admissions)

    def _job(self, number: int, what: str) -> Job:
        job = self._scheduler.jobs.get(number)
        if job is None:
            known = "it has ended" if 0 <= number < self._scheduler.arrivals else "there is none"
            raise PolicyError("unknown_request", f"the plan {what} request {number}: {known}")
        return job

    def _victims(self, plan: Plan) -> set[int]:
        victims: set[int] = set()
        for number in (*plan.preempt, *plan.swap):
            job = self._job(number, "preempts")
            if number in victims:
                raise PolicyError("twice", f"the plan preempts request {number} twice")
            if job.state != "running":
                raise PolicyError(
                    "unready", f"the plan preempts request {number}, which is {job.state}"
                )
            victims.add(number)
        return victims

    def _run(self, plan: Plan, victims: set[int]) -> list[Job]:
        admissions, seen = [], set()
        for number, tokens in plan.run:
            job = self._job(number, "runs")
            if number in seen:
                raise PolicyError("twice", f"the plan runs request {number} twice")
            seen.add(number)
            if number in victims:
                raise PolicyError("twice", f"the plan both preempts and runs request {number}")
            self._share(job, tokens)
            if job.state != "running":
                admissions.append(job)
        return admissions

    def _share(self, job: Job, tokens: int) -> None:
        pending = self._pending(job)
        if pending < 1:
            raise PolicyError(
                "unready",
                f"the plan runs request {job.id}, whose next token a step in flight is sampling",
            )
        if not 1 <= tokens <= pending:
            raise PolicyError(
                "unready",
                f"the plan runs {tokens} tokens of request {job.id}, which has {pending} to "
                "compute",
            )
        if tokens < pending and not self._limits.chunked_prefill:
            raise PolicyError(
                "chunk",
                f"the plan runs {tokens} of the {pending} tokens of request {job.id}, but chunked "
                "prefill is off",
            )

    def _pending(self, job: Job) -> int:
        if job.state == "running":
            return self._running[job.id].pending_tokens
        if job.state == "swapped":
            return _suspended_state(job).pending_tokens
        length = known_tokens(job) if job.cache else job.prompt_tokens
        return length - self._state.hit(job).cached_tokens

    def _reservations(self, plan: Plan, admissions: list[Job]) -> None:
        admitted = {job.id for job in admissions}
        room = self._engine.configuration.blocks * self._engine.configuration.block_size
        for number, tokens in plan.reserve:
            if number not in admitted:
                raise PolicyError(
                    "reserve",
                    f"the plan reserves for request {number}, which it does not admit",
                )
            if not 0 <= tokens <= room:
                raise PolicyError(
                    "reserve",
                    f"the plan reserves {tokens} tokens for request {number}; the pool has {room}",
                )

    def _tokens(self, plan: Plan) -> None:
        total = sum([tokens for _, tokens in plan.run])
        if total > self._limits.token_budget:
            raise PolicyError(
                "budget",
                f"the plan computes {total} tokens in one iteration, but the token budget is "
                f"{self._limits.token_budget}",
            )

    def _sequences(self, victims: set[int], admissions: list[Job]) -> None:
        running = len(self._engine.running) - len(victims) + len(admissions)
        most = self._engine.configuration.requests
        if admissions and running > most:
            raise PolicyError(
                "sequences", f"the plan makes {running} requests run, but at most {most} may"
            )

    def _host(self, plan: Plan) -> None:
        needed = 0
        for number in plan.swap:
            request = _cached(self._scheduler.jobs[number])
            if request.steps_in_flight:
                raise PolicyError(
                    "in_flight",
                    f"the plan swaps out request {number}, which a step in flight is computing",
                )
            needed += blocks_needed(request.computed, request.block_size)
        free = self._state.free_host_blocks
        if needed > free:
            raise PolicyError(
                "host_blocks",
                f"the plan swaps out {needed} blocks, but {free} host blocks are free",
            )

    def _blocks(self, plan: Plan, victims: set[int], admissions: list[Job]) -> None:
        engine, jobs = self._engine, self._scheduler.jobs
        free = self._state.free_blocks
        freed = sum([engine.blocks_freed(_cached(jobs[number])) for number in victims])
        reserve, size = dict(plan.reserve), self._state.block_size
        needs: list[tuple[int, int]] = []
        for number, tokens in plan.run:
            job = jobs[number]
            if job.state == "running":
                state = self._running[number]
                blocks = blocks_needed(state.computed_tokens + tokens, size) - state.held_blocks
            else:
                blocks = self._admission(job, tokens, reserve, bool(victims))
            if blocks > 0:
                needs.append((number, blocks))
        needed = sum([blocks for _, blocks in needs])
        floor = self._limits.watermark_blocks if admissions else 0
        if needed > free + freed - floor:
            kind = "blocks" if needed > free + freed else "watermark"
            raise PolicyError(kind, self._too_many(needs, needed, freed, floor))

    def _admission(self, job: Job, tokens: int, reserve: Mapping[int, int], preempts: bool) -> int:
        hit = self._state.hit(job)
        slots = max(hit.cached_tokens + tokens, reserve.get(job.id, 0))
        if preempts:
            # Its hits may be on the very blocks that the preempted ones are to give back.
            return blocks_needed(slots, self._state.block_size)
        return hit.blocks_for(slots, self._state.block_size)

    def _too_many(self, needs: list[tuple[int, int]], needed: int, freed: int, floor: int) -> str:
        state = self._state
        each = ", ".join([f"{blocks} for r{number}" for number, blocks in needs if blocks])
        free = f"{state.free_blocks} are free"
        if state.cached_free_blocks:
            free += f" ({state.cached_free_blocks} of them cached-free, which free_blocks includes)"
        if freed:
            free += f" and {freed} become free by preemption"
        if floor:
            free += f", of which {floor} must stay free (the watermark)"
        return f"the plan needs {needed} blocks ({each}), but {free}"
