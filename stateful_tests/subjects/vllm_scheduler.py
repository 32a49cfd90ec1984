"""vLLM's whole scheduler as a subject: the real one, unmodified, over its own cache manager.

The scheduler decides by itself; the adapter only plays what is around it, the clients and the
model.  What it does to its cache is overheard at ``allocate_slots`` and ``free`` of its manager
(:mod:`kvproof.stateful_tests.subjects.vllm_overheard`), and told as operations of a cache, each at
the moment when it happens; only what is given back while vLLM takes in a step's samples is told
after that step, with the pool as it was then.  Iterations, samples and ends are told as a
scheduler's events.  So both floors are checked, as those of kvproof's own.

How vLLM maps:

* **Keys are published when slots are allocated**, before the step that computes them is launched.
  What is owed so has to be written by that step.  Steps run in the order of their launch, as on the
  GPU's stream (``Semantics.stream_order``): vLLM gives back blocks that a step in flight uses.
* **Asynchronous scheduling** (``vllm:async_scheduler``) keeps two steps in flight.  A request is
  run for tokens that are being sampled still: these have slots, and are told, from then on; the
  block that they complete is findable once they have come.  Samples of a request that was preempted
  meanwhile are still delivered; those after its last one are void.
* **What a step reads** is not asked of the cache, but followed as a worker follows it: from the
  block ids and the computed tokens in vLLM's ``SchedulerOutput``.
* A token is told to the cache when vLLM gives it a slot; vLLM has known it a little longer.
  Therefore an admission again may hit one block more than the tokens told allow, which is why
  ``exact_admission`` is not promised.  Instead each admission's blocks and hits are counted (FIT).
* ``long_prefill_token_threshold`` is two blocks, and a budget that the pool could not use up is
  lowered to half of the pool: so prompts are computed in chunks, several at a time.
* The front end's part, to refuse what can never fit, is the adapter's: ``max_model_len`` is the
  pool at most, as vLLM demands when it starts.
* Time stands still: figures of time are 0.

* ``vllm:scheduler:groups`` (and ``vllm:async_scheduler:groups``) has two groups of full attention
  over its pool, the second one with blocks twice as large: see
  :mod:`kvproof.stateful_tests.subjects.vllm_groups`.
* ``vllm:scheduler:hybrid`` (and ``vllm:async_scheduler:hybrid``) has two groups, one of them with
  a window.  Workers are not told what is behind it: the tables that a step reads name old blocks
  there.
* ``vllm:scheduler:media`` (and ``vllm:async_scheduler:media``) has an encoder: see
  :mod:`kvproof.stateful_tests.subjects.vllm_encoder`.
* A scheduler with LoRA loads ``max_loras`` adapters, one unless it is told otherwise: requests with
  another one are passed over (``Semantics.adapters``).

Driven is ``Scheduler`` or ``AsyncScheduler``, or a subclass of it.  Not driven: tiers, watermarks,
speculative tokens, and pipelines.

vLLM is imported when the first subject is built, not with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvproof.invariants.errors import InputError
from kvproof.invariants.events import StepItem
from kvproof.invariants.operations import (
    Abort,
    Admit,
    Arrive,
    Operation,
    Preempt,
    Reset,
    Resume,
)
from kvproof.invariants.outcomes import (
    BLOCKS_IN_USE,
    NOTHING_TO_RUN,
    RUN_AHEAD_LIMIT,
    SKIPPED,
    Outcome,
)
from kvproof.invariants.prompts import prompt_length, sampled_token
from kvproof.invariants.scheduling.vocabulary import (
    BlocksCounted,
    Completed,
    Part,
    Promises,
    RequestArrived,
    RequestCancelled,
    RunningReset,
    Scheduled,
)
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.overheard_scheduler import (
    CHOICES,
    STOP,
    OverheardScheduler,
)
from kvproof.stateful_tests.subjects.vllm_encoder import EncoderWorker
from kvproof.stateful_tests.subjects.vllm_overheard import OverheardCache, OverheardHybrid
from kvproof.stateful_tests.subjects.vllm_scheduler_view import VllmSchedulerView
from kvproof.stateful_tests.subjects.vllm_scheduling import (
    FAMILIES,
    NAME,
    fitted,
    groups_of,
    load_scheduling,
    user_scheduler,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

POLICIES = ("fcfs", "priority")
"""vLLM's own; the first one is its default."""

_PROMISES = {
    "fcfs": Promises(fcfs=True, no_barrier=True, work_conserving=True),
    "priority": Promises(strict_priority=True, no_barrier=True, work_conserving=True),
}


def vllm_scheduler_factory(
    policy: str, scheduler_class: str | None = None, *, family: str = NAME, imports: bool
) -> Callable[[Configuration], VllmSchedulerSubject]:
    """A subject with that policy of vLLM's, and perhaps with MODULE:CLASS for its scheduler.

    ``family``: the subject's name without options.  ``imports``: as for ``subject_factory``.
    Raises InputError if there is no such thing.
    """
    if policy not in POLICIES:
        raise InputError(f"vLLM has no policy {policy!r}: there are {', '.join(POLICIES)}")
    options = [policy, scheduler_class] if scheduler_class else [policy][policy == POLICIES[0] :]
    name = ":".join([family, *options])
    if scheduler_class and not imports:
        raise InputError(f"the case is of subject {name!r}: say --subject {name} to import it")
    load_scheduling()  # now, so that a missing package is bad input and not a crash of the subject
    chosen = user_scheduler(family, scheduler_class) if scheduler_class else None
    return partial(
        VllmSchedulerSubject, policy=policy, name=name, family=family, scheduler_class=chosen
    )


# -- the scheduler ---------------------------------------------------------------------------------


class Job:
    """A live request: vLLM's, and what its client and its worker know of it."""

    __slots__ = ("choice", "number", "operation", "request", "tables", "tokens")

    def __init__(self, number: int, operation: Arrive, request: Request) -> None:
        self.number = number
        """Rank of arrival."""
        self.choice = number % CHOICES
        """What the model samples for it: not the same for all, or nobody could tell them apart."""
        self.operation = operation
        self.request = request
        self.tables: list[list[int]] = []
        """The worker's block tables, by group …"""
        self.tokens = 0
        """… and the tokens that the worker has: prompt, and samples so far."""

    def sample(self) -> int:
        """The worker's next token."""
        operation, position = self.operation, self.tokens
        self.tokens += 1
        outputs = self.tokens - self.request.num_prompt_tokens
        if outputs == operation.output < operation.max_tokens:
            return STOP
        return sampled_token(self.choice, position)


class _Flight(Struct):
    """A step whose samples vLLM does not have yet."""

    step: int
    scheduled: Any
    samples: Mapping[str, list[int]]
    """By vLLM's name of the request."""
    results: Any
    behind: list[tuple[Any, Any]] = []
    """Iterations that run nothing, since then: vLLM takes in outcomes in their order."""


class VllmSchedulerSubject(OverheardScheduler):
    """Drives one vLLM scheduler as its engine core would, one operation at a time.

    Raises SubjectUnavailable where vLLM 0.33 is not installed.
    """

    capabilities = frozenset(("arrive", "schedule", "run", "retire", "abort", "reset"))

    def __init__(
        self,
        configuration: Configuration,
        *,
        policy: str = POLICIES[0],
        name: str = NAME,
        family: str = NAME,
        scheduler_class: type[Scheduler] | None = None,
    ) -> None:
        self.vllm = load_scheduling()
        groups = groups_of(family, configuration)
        kind, steps = FAMILIES[family]
        promises = Promises() if groups.arriving_media else _PROMISES[policy]
        super().__init__(name, self._fitted(configuration, steps, groups), promises)
        self.scheduler = self.vllm.new_scheduler(
            self.configuration, groups, policy, scheduler_class or self.vllm.schedulers[kind]
        )
        self._overhear(self._new_cache(groups))
        self.jobs: dict[int, Job] = {}
        """Live requests, by arrival."""
        self.jobs_by_id: dict[str, Job] = {}
        self.cached_tokens: dict[int, int] = {}
        """Of live requests that were admitted: what their first admission hit."""
        self.state_view = VllmSchedulerView(self)
        self._flights: list[_Flight] = []
        self._steps = self._queries = self._hits = 0
        self._noted: dict[type[Operation], list[int]] = {Admit: [], Resume: [], Preempt: []}
        """Whom the present iteration admitted, resumed and preempted."""
        self._block_hasher = self.cache._block_hasher
        self._encoder = EncoderWorker()
        self._handlers |= {Abort: self._abort, Reset: self._reset}

    def _fitted(self, configuration: Configuration, steps: int, groups: Semantics) -> Configuration:
        return fitted(configuration, steps, groups)

    def _new_cache(self, groups: Semantics) -> OverheardCache:
        cache = OverheardHybrid if groups.windows else OverheardCache
        manager = self.scheduler.kv_cache_manager
        return cache(self.configuration, manager, listener=self, groups=groups)

    @property
    def _idle(self) -> bool:
        """Whether an engine would not schedule now."""
        return not self.jobs

    def _blocks_for(self, tokens: int) -> int:
        blocks: int = self.cache._needs(tokens)
        return blocks

    # -- what the cache below overhears ----------------------------------------------------------

    def admission(self, request: Request, end: int) -> Admit:
        operation = self.jobs_by_id[request.request_id].operation
        prompt = (operation.prompt, operation.salt, operation.adapter, operation.media)
        return Admit(*prompt, slots=end)

    def choice(self, request: Request) -> int:
        return self.jobs_by_id[request.request_id].choice

    def counted(self, request: Request, tokens: int, blocks: int, cached: int) -> None:
        number = self.jobs_by_id[request.request_id].number
        self._emit(BlocksCounted(number, tokens, blocks, cached))

    def overheard(self, operation: Operation, request: Request | None) -> None:
        """The scheduler did this to its cache, for that request."""
        noted = self._noted.get(operation.__class__)
        if noted is not None and request is not None:
            noted.append(self.jobs_by_id[request.request_id].number)
        outcome = self._perform(operation)
        if isinstance(operation, Admit):
            self.cached_tokens[self._noted[Admit][-1]] = outcome.cached_tokens

    # -- the clients -----------------------------------------------------------------------------

    def _arrive(self, operation: Arrive) -> Outcome:
        prompt = prompt_length(operation.prompt)
        refusal = self._never_fits(operation, prompt)
        if refusal:
            return Outcome("refused", refusal)
        number = self._arrivals
        self._arrivals += 1
        request = self.vllm.new_request(number, operation, self._block_hasher)
        job = Job(number, operation, request)
        self.jobs[number] = self.jobs_by_id[request.request_id] = job
        self.scheduler.add_request(request)
        self._emit(
            RequestArrived(
                number, 0, prompt, request.max_tokens, operation.output, request.priority
            )
        )
        return Outcome("done", None, number)

    def _abort(self, operation: Abort) -> Outcome:
        if not self.jobs:
            return SKIPPED
        job = list(self.jobs.values())[operation.request % len(self.jobs)]
        status = self.vllm.manager.status.FINISHED_ABORTED
        self.scheduler.finish_requests(job.request.request_id, status)
        self._forget(job)
        self._emit(RequestCancelled(job.number))
        return Outcome("done", None, job.number)

    def _forget(self, job: Job) -> None:
        del self.jobs[job.number], self.jobs_by_id[job.request.request_id]
        self.cached_tokens.pop(job.number, None)

    def _reset(self, operation: Reset) -> Outcome:
        """An operator's doing: new weights, say."""
        self._noted = {Admit: [], Resume: [], Preempt: []}
        done = self._reset_cache(operation)
        preempted = tuple(self._noted[Preempt])
        self.preemptions += len(preempted)
        if operation.running:
            self._emit(RunningReset(preempted))
        if not done:
            return Outcome("refused", BLOCKS_IN_USE)
        return Outcome("done", count=len(preempted))

    def _reset_cache(self, operation: Reset) -> bool:
        done: bool = self.scheduler.reset_prefix_cache(reset_running_requests=operation.running)
        return done

    # -- the engine core ---------------------------------------------------------------------------

    def _schedule(self) -> Outcome:
        queued = sum([1 + len(flight.behind) for flight in self._flights])
        if queued >= self.configuration.run_ahead:  # vLLM's queue of batches is full
            return Outcome("refused", RUN_AHEAD_LIMIT)
        if self._idle:
            return Outcome("refused", NOTHING_TO_RUN)
        self._noted = {Admit: [], Resume: [], Preempt: []}
        scheduled: SchedulerOutput = self.scheduler.schedule()
        step, items = self._steps, self._work(scheduled)
        if items:
            self._steps += 1
            self.cache.launched(step, items)
        else:
            self._ran_nothing(scheduled)
        admitted, resumed, preempted = map(tuple, self._noted.values())
        self.admissions += len(admitted)
        self.resumptions += len(resumed)
        self.preemptions += len(preempted)
        self._emit(
            Scheduled(
                self._iterations,
                0,
                step if items else None,
                self._parts(scheduled),
                admitted,
                resumed,
                preempted,
                (),
            )
        )
        self._iterations += 1
        return Outcome("done", count=scheduled.total_num_scheduled_tokens)

    def _ran_nothing(self, scheduled: SchedulerOutput) -> None:
        results = self._results({})
        if self._flights:
            self._flights[-1].behind.append((scheduled, results))
        else:
            self._take_figures(self.scheduler.update_from_output(scheduled, results))

    def _parts(self, scheduled: SchedulerOutput) -> tuple[Part, ...]:
        return tuple(
            [
                Part(self.jobs_by_id[name].number, tokens, self.cache.by_id[name].number)
                for name, tokens in scheduled.num_scheduled_tokens.items()
            ]
        )

    @property
    def _steps_in_flight(self) -> int:
        return len(self._flights)

    def _retire(self) -> Outcome:
        if not self._flights:
            return SKIPPED
        flight = self._flights.pop(0)
        sampled, finished, misdelivered = [], [], []
        told = self.cache.retire(
            lambda: self.scheduler.update_from_output(flight.scheduled, flight.results)
        )
        self._take_figures(told)
        for outputs in told.values():
            for output in outputs.outputs:
                job = self.jobs_by_id[output.request_id]
                given, own = output.new_token_ids, flight.samples.get(output.request_id, [])
                sampled += [job.number] * len(given)
                if list(given) != own[: len(given)]:
                    misdelivered.append(job.number)
                if output.finish_reason is not None:
                    finished.append(job)
        for job in finished:
            self._forget(job)
        for scheduled, results in flight.behind:
            self._take_figures(self.scheduler.update_from_output(scheduled, results))
        ended = tuple([job.number for job in finished])
        self._emit(Completed(flight.step, 0, tuple(sampled), ended, tuple(misdelivered)))
        return Outcome("done", count=len(sampled))

    # -- the worker --------------------------------------------------------------------------------

    def _work(self, scheduled: SchedulerOutput) -> list[StepItem]:
        """Carry out a step, with what vLLM tells its workers and nothing else; what it computes."""
        items, samples = [], {}
        starts = self._follow(scheduled)
        self._encoder.follow(scheduled, self.scheduler.requests, starts)
        for name, tokens in scheduled.num_scheduled_tokens.items():
            job, live = self.jobs_by_id[name], self.cache.by_id[name]
            end = starts[name] + tokens
            tables = tuple([table[:] for table in job.tables])
            items.append(StepItem(live.number, live.epoch, starts[name], end, tables))
            samples[name] = [job.sample()] if end == job.tokens else []
        if items:
            self.batch_size = len(items)
            flight = _Flight(self._steps, scheduled, samples, self._results(samples))
            self._flights.append(flight)
        return items

    def _follow(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Take in the news of tables and tokens; where each request stands."""
        starts: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:  # resumed ones, too
            job = self.jobs_by_id[new.req_id]
            job.tables = [list(blocks) for blocks in new.block_ids]
            job.tokens = len(new.prefill_token_ids or new.prompt_token_ids or ())
            starts[new.req_id] = new.num_computed_tokens
        known = scheduled.scheduled_cached_reqs
        for name, blocks, computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            job = self.jobs_by_id[name]
            if blocks is not None:
                for table, more in zip(job.tables, blocks, strict=True):
                    table += more
            starts[name] = computed
        return starts

    def _results(self, samples: Mapping[str, list[int]]) -> ModelRunnerOutput:
        return self.vllm.output(
            req_ids=list(samples),
            req_id_to_index={name: index for index, name in enumerate(samples)},
            sampled_token_ids=list(samples.values()),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    # -- figures -----------------------------------------------------------------------------------

    def _take_figures(self, told: Mapping[int, EngineCoreOutputs]) -> None:
        """vLLM's figures of the prefix cache, which it hands out once."""
        for outputs in told.values():
            stats = outputs.scheduler_stats
            if stats is not None:
                self._queries += stats.prefix_cache_stats.queries
                self._hits += stats.prefix_cache_stats.hits

    def prefix_cache_figures(self) -> tuple[int, int]:
        """Tokens that were looked up at first admissions, and those of them that were hit."""
        pending = self.scheduler.kv_cache_manager.prefix_cache_stats
        return self._queries + pending.queries, self._hits + pending.hits
