"""The seeded faults of the scheduler: plans, admission, preemption, order, liveness, figures
(classes 7, 8, 12, 13 and 14 of the catalogue, and two rows of others that are about its queues).

As in :mod:`kvproof.fuzz.faults.catalogue`.  Each is driven with the policy under which it shows;
in some it is the policy that is replaced, since half of a scheduler's mistakes are a policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from msgspec.structs import replace

from kvproof.engine import scheduler_state
from kvproof.engine.engine import Engine
from kvproof.engine.job import Job
from kvproof.engine.offloading import Offloader
from kvproof.engine.policies import fcfs as fcfs_module
from kvproof.engine.policies.fcfs import FirstComeFirstServed
from kvproof.engine.policies.guaranteed_no_evict import GuaranteedNoEvict
from kvproof.engine.policies.max_utilization import MaxUtilization
from kvproof.engine.policies.orca import Orca
from kvproof.engine.policies.priority import StrictPriority
from kvproof.engine.policy import Draft, Plan, RequestState, SchedulerState
from kvproof.engine.request import Request
from kvproof.engine.scheduler import Scheduler
from kvproof.fuzz.faults.fault import Fault, Replacement, enter
from kvproof.invariants.outcomes import LARGER_THAN_POOL, Outcome

_FAULTS: list[Fault] = []


def _fault(
    policy: str, target: Any, method: str, **fields: Any
) -> Callable[[Replacement], Replacement]:
    """A fault that shows in a scheduler with this policy."""
    return enter(_FAULTS, target, method, subject=f"scheduler:{policy}", **fields)


def _planned(
    state: SchedulerState,
    running: Callable[[Draft, RequestState], bool],
    outside: Iterable[RequestState],
) -> Plan:
    """As the built-in policies plan: those that run, each as ``running`` does it, then admissions
    in this order up to the first that does not fit."""
    draft = state.draft()
    for request in state.running:
        running(draft, request)
    if not draft.preempts:
        for request in outside:
            if not draft.run(request):
                break
    return draft.plan()


# -- 7. Preemption and resumption ----------------------------------------------------------------


@_fault(
    "fcfs",
    Draft,
    "run_preempting",
    property="PLAN",
    source="B65, vllm-project/vllm#23347",
    shortest=3,
)
def preempted_request_still_runs(
    original: Replacement, self: Draft, request: RequestState, **how: Any
) -> bool:
    """The victim of a preemption stays on the list of those that run in the same iteration."""
    runs = bool(original(self, request, **how))
    if request.id in self._preempt:
        self._run[request.id] = 1
    return runs


@_fault(
    "priority",
    Draft,
    "run_preempting",
    property="PRIORITY",
    source="B65, vllm-project/vllm#23347",
    shortest=4,
)
def latest_is_preempted_not_least_urgent(
    original: Replacement, self: Draft, request: RequestState, **how: Any
) -> bool:
    """Victims are taken from the end of the running list, which is ordered by admission."""
    return bool(original(self, request, order=None))


@_fault(
    "fcfs",
    scheduler_state.State,
    "cached_tokens",
    property="PLAN",
    source="B68, GeeeekExplorer/nano-vllm#211",
    shortest=3,
)
def resumption_forgets_its_hit(original: Replacement, self: Any, request: RequestState) -> int:
    """Tokens to compute on resumption are counted before its own old blocks are found again."""
    return 0 if request.state == "preempted" else int(original(self, request))


@_fault(
    "fcfs",
    Scheduler,
    "retire",
    property="PROGRESS",
    source="B72, vllm-project/vllm-gaudi#524",
    shortest=3,
)
def recomputed_token_delivered_again(original: Replacement, self: Scheduler) -> Outcome:
    """After a preemption, output tokens are recorded twice: as recomputed, and as decoded."""
    for step in self._steps[:1]:
        step.samples += [
            (job, index + 1)
            for job, index in step.samples
            if job.preemptions and job.outputs == index < job.output - 1
        ]
    outcome: Outcome = original(self)
    return outcome


@_fault(
    "fcfs",
    Scheduler,
    "retire",
    property="PROGRESS",
    source="B74, PaddlePaddle/FastDeploy#3292",
    shortest=4,
)
def late_token_of_a_preempted_request_is_lost(original: Replacement, self: Scheduler) -> Outcome:
    """The result of a step in flight is thrown away if its request was preempted meanwhile."""
    for step in self._steps[:1]:
        step.samples = [sample for sample in step.samples if sample[0].state == "running"]
    outcome: Outcome = original(self)
    return outcome


@_fault(
    "fcfs_swap",
    Draft,
    "swap",
    property="PLAN",
    source="B75, vllm-project/vllm#46278",
    shortest=4,
)
def swaps_out_what_is_being_computed(
    original: Replacement, self: Draft, request: RequestState
) -> bool:
    """A request is swapped out while a step in flight still writes its blocks."""
    return bool(original(self, replace(request, in_flight=False)))


@_fault(
    "fcfs_swap",
    Draft,
    "swap",
    property="PLAN",
    source="B60, sgl-project/sglang#27108",
    shortest=3,
)
def swaps_out_to_a_full_host(original: Replacement, self: Draft, request: RequestState) -> bool:
    """Whether the host has room for what is swapped out is not asked."""
    self._free_host_blocks = self.state.total_blocks * 2
    return bool(original(self, request))


# -- 8. KV on its way ------------------------------------------------------------------------------


@_fault(
    "fcfs",
    Offloader,
    "deliver",
    property="METER",
    source="B83, sgl-project/sglang#32267",
    shortest=2,
)
def one_completion_a_poll(original: Replacement, self: Offloader) -> None:
    """Each look for completed copies finds one of them; the others seem not to have come."""
    later = sorted(self._in_flight)[1:]
    self._in_flight = sorted(self._in_flight)[:1]
    original(self)
    self._in_flight = sorted([*self._in_flight, *later])


@_fault(
    "fcfs",
    Offloader,
    "_defer",
    property="LIVE",
    source="B95, vllm-project/vllm#32255",
    shortest=4,
    also=("BATCH",),
)
def waits_for_kv_that_has_come(
    original: Replacement, self: Offloader, requests: tuple[int, ...]
) -> None:
    """Who waits for KV goes on waiting: for a completion that was there before."""
    jobs = self._scheduler.jobs
    waiting = [n for n in self.deferred if n in jobs and jobs[n].state == "waiting"]
    original(self, requests or tuple(waiting))


@_fault(
    "fcfs",
    Offloader,
    "_queue",
    property="METER",
    source="B158, vllm-project/vllm#43736",
    shortest=4,
)
def promotions_counted_when_started(original: Replacement, self: Offloader, number: int) -> None:
    """A promotion is counted when it is decided on, and not only when it has arrived."""
    kind = self._hierarchy.transfers[number].kind
    original(self, number)
    self.channels[kind].count += kind in ("fetch", "promote")


# -- ends, and the queues ------------------------------------------------------------------------


@_fault("fcfs", Scheduler, "_finish", property="HOLD", source="B04, jjang-ai/vmlx#68", shortest=2)
def finished_request_keeps_its_blocks(original: Replacement, self: Scheduler, job: Job) -> None:
    """A request that has its last token leaves the scheduler, but is never ended in the cache."""
    self._forget(job)


@_fault(
    "fcfs",
    Scheduler,
    "_leave_waiting",
    property="METER",
    source="B98, vllm-project/vllm-ascend#16662",
    shortest=2,
    also=("PLAN",),
)
def aborted_request_stays_in_the_queue(original: Replacement, self: Scheduler, job: Job) -> None:
    """An abort forgets a request, but not that it waits; admission still takes it out."""
    if job.cache is not None:
        original(self, job)


@_fault(
    "fcfs",
    Scheduler,
    "_forget",
    property="METER",
    source="B142, sgl-project/sglang#20273",
    shortest=4,
    also=("PLAN",),
)
def ended_request_stays_preempted(original: Replacement, self: Scheduler, job: Job) -> None:
    """A request that ends while it is preempted stays in the queue of preempted ones."""
    suspended = job.id in self.suspended
    original(self, job)
    if suspended:
        self.suspended[job.id] = job


# -- 12. Liveness, starvation, deadlock ----------------------------------------------------------


@_fault(
    "fcfs",
    Draft,
    "run_preempting",
    property="LIVE",
    source="B155, sgl-project/sglang#19881",
    shortest=3,
)
def nobody_is_preempted_for_want_of_blocks(
    original: Replacement, self: Draft, request: RequestState, **how: Any
) -> bool:
    """A running request that lacks a block waits until another one ends, and so do all others."""
    return self.run(request)


@_fault(
    "fcfs",
    Scheduler,
    "_never_fits",
    property="LIVE",
    source="B134, vllm-project/vllm#39734",
    shortest=1,
)
def what_never_fits_is_accepted(original: Replacement, self: Scheduler, job: Job) -> str | None:
    """A request that is larger than the pool is queued, and holds up all behind it."""
    refusal: str | None = original(self, job)
    return None if refusal == LARGER_THAN_POOL else refusal


@_fault(
    "orca",
    Orca,
    "plan",
    property="STARVE",
    source="B135, vllm-project/vllm#53130",
    shortest=4,
)
def long_prompt_starves(original: Replacement, self: Orca, state: SchedulerState) -> Plan:
    """A request that does not fit is passed over, so those that came later take its place."""
    draft = state.draft()
    for request in state.running:
        draft.run(request)
    for request in state.waiting:
        draft.run(request, reserve=request.final_tokens)
    return draft.plan()


@_fault(
    "orca",
    Orca,
    "plan",
    property="STARVE",
    source="B135, vllm-project/vllm#53130",
    shortest=3,
)
def newcomers_take_the_budget(original: Replacement, self: Orca, state: SchedulerState) -> Plan:
    """New prompts are served before those that run, and may leave them no token of the budget."""
    draft = state.draft()
    for request in state.waiting:
        if not draft.run(request, reserve=request.final_tokens):
            break
    for request in state.running:
        draft.run(request)
    return draft.plan()


@_fault(
    "max_utilization",
    MaxUtilization,
    "plan",
    property="BATCH",
    source="B136, vllm-project/vllm#31731",
    shortest=4,
)
def one_that_waits_stops_the_loop(
    original: Replacement, self: MaxUtilization, state: SchedulerState
) -> Plan:
    """The loop over running requests ends at the first that cannot run in this iteration."""
    draft = state.draft()
    for request in state.running:
        if not draft.run_preempting(request):
            break
    if not draft.preempts:
        for request in chain(state.preempted, state.waiting):
            if not draft.run(request):
                break
    return draft.plan()


@_fault(
    "fcfs",
    FirstComeFirstServed,
    "plan",
    property="BATCH",
    source="B143, vllm-project/vllm#44294",
    shortest=4,
)
def batch_leaves_together(
    original: Replacement, self: FirstComeFirstServed, state: SchedulerState
) -> Plan:
    """Requests that wait come in only when the whole batch before them has finished."""
    outside = chain(state.preempted, state.waiting)
    return _planned(state, Draft.run_preempting, () if state.running else outside)


@_fault(
    "fcfs",
    scheduler_state,
    "_running_state",
    property="BATCH",
    source="B144, PaddlePaddle/FastDeploy#3288",
    shortest=2,
    also=("LIVE",),
)
def stops_at_the_edge_of_a_block(original: Replacement, job: Job) -> RequestState:
    """A request whose prompt fills its blocks exactly is not seen to have anything to compute."""
    state: RequestState = original(job)
    request = job.cache
    assert request is not None
    at_edge = request.scheduled == job.prompt_tokens and not job.prompt_tokens % request.block_size
    return replace(state, pending_tokens=0) if at_edge else state


@_fault(
    "fcfs",
    FirstComeFirstServed,
    "plan",
    property="FCFS",
    source="B138, vllm-project/vllm#41951",
    shortest=4,
)
def newcomer_overtakes_the_preempted(
    original: Replacement, self: FirstComeFirstServed, state: SchedulerState
) -> Plan:
    """A preempted request goes to the end of the queue, behind those that never ran."""
    return _planned(state, Draft.run_preempting, chain(state.waiting, state.preempted))


@_fault(
    "fcfs",
    FirstComeFirstServed,
    "plan",
    property="FCFS",
    source="B136, vllm-project/vllm#31731",
    shortest=3,
)
def shortest_prompt_overtakes(
    original: Replacement, self: FirstComeFirstServed, state: SchedulerState
) -> Plan:
    """So that small requests do not wait behind a large one, the queue is sorted by prompt."""
    waiting = sorted(state.waiting, key=lambda request: request.prompt_tokens)
    return _planned(state, Draft.run_preempting, [*state.preempted, *waiting])


@_fault(
    "priority",
    StrictPriority,
    "plan",
    property="PRIORITY",
    source="B138, vllm-project/vllm#41951",
    shortest=3,
)
def urgent_request_waits(
    original: Replacement, self: StrictPriority, state: SchedulerState
) -> Plan:
    """The queue is kept in the order of arrival, and urgency is looked at only to preempt."""
    return _planned(state, Draft.run_preempting, chain(state.preempted, state.waiting))


@_fault(
    "guaranteed_no_evict",
    GuaranteedNoEvict,
    "plan",
    property="NOEVICT",
    source="B139, vllm-project/vllm#25538",
    shortest=3,
)
def started_request_is_evicted(
    original: Replacement, self: GuaranteedNoEvict, state: SchedulerState
) -> Plan:
    """Only the next chunk is counted when a request starts: later somebody has to be preempted."""
    return _planned(state, Draft.run_preempting, chain(state.preempted, state.waiting))


@_fault(
    "guaranteed_no_evict",
    GuaranteedNoEvict,
    "plan",
    property="LIVE",
    source="B139, vllm-project/vllm#25538",
    shortest=3,
)
def admission_counts_the_prompt_only(
    original: Replacement, self: GuaranteedNoEvict, state: SchedulerState
) -> Plan:
    """Blocks for output tokens are not set aside, and in the end nobody can go on."""
    return _planned(state, Draft.run, state.waiting)


# -- 13. Capacity and admission arithmetic -------------------------------------------------------


@_fault(
    "fcfs",
    Engine,
    "hit",
    property="FIT",
    source="B145, vllm-project/vllm#11562",
    shortest=4,
)
def cached_free_hits_count_as_free(
    original: Replacement, self: Engine, request: Request
) -> tuple[int, int]:
    """A hit on blocks that nobody holds is thought to leave as many blocks free as before."""
    return original(self, request)[0], 0


@_fault(
    "fcfs",
    Draft,
    "run",
    property="PLAN",
    source="B148, NVIDIA/TensorRT-LLM#12665",
    shortest=3,
)
def decodes_cost_no_budget(
    original: Replacement, self: Draft, request: RequestState, **how: Any
) -> bool:
    """Tokens of requests that decode are not counted against the iteration's budget."""
    runs = bool(original(self, request, **how))
    self.tokens_left += runs and request.state == "running" and request.pending_tokens == 1
    return runs


@_fault(
    "fcfs",
    fcfs_module,
    "_fits_whole",
    property="BATCH",
    source="B150, sgl-project/sglang#32433",
    shortest=2,
    also=("LIVE",),
)
def tokens_are_compared_with_blocks(
    original: Replacement, draft: Draft, request: RequestState
) -> bool:
    """A request is admitted if there are as many free blocks as it has tokens."""
    return request.computed_tokens + request.pending_tokens <= draft.free_blocks


@_fault(
    "fcfs",
    Scheduler,
    "schedule",
    property="BUDGET",
    source="B157, NVIDIA/TensorRT-LLM#16072",
    shortest=3,
)
def watermark_ignored(original: Replacement, self: Scheduler) -> Outcome:
    """Blocks that are to stay free for those that run are given to newcomers."""
    limits, self.limits = self.limits, replace(self.limits, watermark_blocks=0)
    try:
        outcome: Outcome = original(self)
    finally:
        self.limits = limits
    return outcome


@_fault(
    "fcfs",
    scheduler_state,
    "_running_state",
    property="PLAN",
    source="B146, vllm-project/vllm#10730",
    shortest=3,
)
def runs_past_the_longest_output(original: Replacement, job: Job) -> RequestState:
    """A request is run ahead for a token beyond its longest output."""
    state: RequestState = original(job)
    return replace(state, pending_tokens=state.pending_tokens or 1)


# -- 14. Figures ---------------------------------------------------------------------------------


@_fault(
    "fcfs",
    Scheduler,
    "_suspend",
    property="METER",
    source="B159, vllm-project/vllm#25780",
    shortest=3,
)
def queue_time_restarts_on_resume(
    original: Replacement, self: Scheduler, job: Job, *, swap: bool
) -> None:
    """The wait after a preemption is counted again as if the request had only now arrived."""
    original(self, job, swap=swap)
    job.scheduled_ns = -1


@_fault(
    "fcfs",
    Scheduler,
    "metrics",
    property="METER",
    source="B161, NVIDIA/TensorRT-LLM#15075",
    shortest=3,
)
def preempted_requests_do_not_wait(original: Replacement, self: Scheduler) -> dict[str, int]:
    """The figure of waiting requests is taken from one queue, and leaves out the preempted."""
    figures: dict[str, int] = original(self)
    return figures | {"waiting_sequences": len(self.waiting)}


FAULTS: tuple[Fault, ...] = tuple(_FAULTS)
"""All seeded faults of the scheduler, in the order of the classes."""
