"""What a policy sees: the scheduler's state during one call, read-only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

from kvproof.engine.arithmetic import blocks_needed
from kvproof.engine.engine import Engine
from kvproof.engine.job import Hit, Job, cached, known_tokens
from kvproof.engine.policy import Draft, RequestState

if TYPE_CHECKING:
    from kvproof.engine.scheduler import Scheduler

_by_id = attrgetter("id")
_rank = attrgetter("rank")


class Waiting(Sequence[RequestState]):
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


class State:
    """The :class:`SchedulerState` of one call."""

    def __init__(self, scheduler: Scheduler) -> None:
        engine, configuration = scheduler.engine, scheduler.configuration
        set_ = object.__setattr__
        set_(self, "_scheduler", scheduler)
        set_(self, "_asked", {})
        set_(self, "_hits", {})
        set_(self, "iteration", scheduler.iterations)
        set_(self, "now_ns", scheduler.clock.now_ns)
        set_(self, "limits", scheduler.limits)
        set_(self, "block_size", configuration.block_size)
        set_(self, "total_blocks", configuration.blocks)
        set_(self, "max_sequences", configuration.requests)
        free = min([pool.free_count for pool in engine.pools])
        set_(self, "free_blocks", free)
        set_(self, "cached_free_blocks", min([pool.cached_free_count for pool in engine.pools]))
        set_(self, "fenced_blocks", _fenced_blocks(engine) + _copied_blocks(engine))
        host_free = min([engine.host_free(pool.group) for pool in engine.pools])
        set_(self, "free_host_blocks", host_free if configuration.suspends else 0)
        by_cache_id = scheduler.by_cache_id
        set_(
            self,
            "running",
            tuple([_running_state(job) for job in sorted(by_cache_id.values(), key=_rank)]),
        )
        suspended = sorted(scheduler.suspended.values(), key=_by_id)
        set_(self, "preempted", tuple([suspended_state(job) for job in suspended]))
        set_(self, "waiting", Waiting(_shown(scheduler)))

    _scheduler: Scheduler | None
    _hits: dict[int, Hit]
    _asked: dict[tuple[int, int, int, int], None]
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
    waiting: Waiting

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
        if type(tokens) is not int:
            raise TypeError(f"blocks_for takes a whole number of tokens, not {tokens!r}")
        scheduler, job = self._job(request)
        if job.state == "running":
            held = len(cached(job).tables[0])
            return max(0, blocks_needed(tokens, scheduler.configuration.block_size) - held)
        return self._count(job, tokens)[0]

    def cached_tokens(self, request: RequestState) -> int:
        _, job = self._job(request)
        return 0 if job.state == "running" else self._count(job, 1)[1]

    def _count(self, job: Job, tokens: int) -> tuple[int, int]:
        hit = self.hit(job)
        blocks = hit.blocks_for(tokens, self.block_size)
        answer = (job.id, tokens, blocks, hit.cached_tokens)
        self._asked[answer] = None
        return blocks, hit.cached_tokens

    def hit(self, job: Job) -> Hit:
        """Looked up once: nothing changes while a plan is made and checked."""
        found = self._hits.get(job.id)
        if found is None:
            assert self._scheduler is not None
            found = self._hits[job.id] = self._scheduler.hit_of(job)
        return found

    def blocks_freed(self, request: RequestState) -> int:
        scheduler, job = self._job(request)
        return scheduler.engine.blocks_freed(cached(job)) if job.state == "running" else 0

    def looked_up(self) -> tuple[Iterable[tuple[int, int, int, int]], dict[int, Hit]]:
        """For the scheduler: what the policy asked, and the hits that it was told of."""
        return self._asked, self._hits

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

        limits = self.limits
        requests = [*self.running, *self.preempted, *islice(self.waiting, 4)]
        return (
            f"iteration {self.iteration}: {self.free_blocks} of {self.total_blocks} blocks free "
            f"(block size {self.block_size}; {self.cached_free_blocks} of them cached), token "
            f"budget {limits.token_budget}, at most {self.max_sequences} running, watermark "
            f"{limits.watermark_blocks}, chunked prefill "
            f"{'on' if limits.chunked_prefill else 'off'}; {len(self.waiting)} waiting; "
            + ", ".join([told(request) for request in requests[:8]])
        )


def _shown(scheduler: Scheduler) -> list[RequestState]:
    """The waiting requests up to the first whose KV is on its way: nobody is to overtake it."""
    waiting, offloader = scheduler.waiting, scheduler.offloader
    if offloader is None or not offloader.deferred:
        return waiting
    return waiting[: bisect_left(waiting, offloader.deferred[0], key=_by_id)]


def _running_state(job: Job) -> RequestState:
    request = cached(job)
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


def suspended_state(job: Job) -> RequestState:
    request = cached(job)
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


def _copied_blocks(engine: Engine) -> int:
    """Blocks that only copies in flight hold."""
    if engine.hierarchy is None:
        return 0
    ref_counts, copied = engine.pools[0].ref_counts, set()
    for transfer in engine.hierarchy.transfers.values():
        if transfer.kind in ("store", "promote"):
            copied.update(transfer.sources if transfer.kind == "store" else transfer.targets)
    return len([block for block in copied if ref_counts[block] == 1])
