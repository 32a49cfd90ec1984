"""vLLM's Scheduler with its offloading connector as a subject: both real, and unmodified.

The scheduler's half of ``OffloadingConnector`` decides what is copied to the host and what is
loaded from it; the worker's half is told by it what to copy, and reports.  What lies behind the
worker, the copies themselves, is played: each ends some iterations later, out of order.  All is
told as operations of a cache with a host below it, each at the moment when it happens
(:mod:`kvproof.stateful_tests.subjects.vllm_connector_cache`).

How it maps, beside what :mod:`kvproof.stateful_tests.subjects.vllm_scheduler` says:

* **A load.**  A request that waits is given blocks for what the device and the host have of its
  prompt, and waits for the copy.  To the cache's checks it is admitted, and loading; to the
  scheduler's it waits and holds blocks (``BlocksHeld``), and is admitted when it is first run.
  What was loaded becomes findable when the scheduler looks at the request again.
* **A store** is of blocks that are computed by the step being scheduled, or that a request had
  which has ended.  vLLM does not hold them for it: it has the copy waited for before a step writes
  into one (``Semantics.copies_hold``).  So what is copied is compared, at the moment when it is
  copied, with what its key stands for.
* **A request that is cancelled while it loads** is gone for its client at once; its blocks are
  given back when the copy has ended.
* The engine goes on with nobody to serve, as long as the connector has work.

``vllm:async_scheduler:offload`` has steps in flight.  A worker carries out one after the other:
what it is told with the next one it does when the one before has ended, and copies wait for the
steps that were launched before them (``Semantics.copies_after_steps``), as vLLM's do by their
stream.  What a request gives back while a step is in flight, vLLM keeps until that one is taken in:
:mod:`kvproof.stateful_tests.subjects.vllm_connector_fences`.  The last block that such a step
completes may be stored though nobody ever finds it on the device.  An iteration in which nothing
can be run takes its place in the queue of batches, as in vLLM's engine core.

``vllm:scheduler:tiering`` has vLLM's tiered manager with a tier below the host in place of that of
the host alone: :mod:`kvproof.stateful_tests.subjects.vllm_connector_tiers`.

With a connector a request may overtake those before it that wait for copies: that requests are
admitted in their order is not promised, nor that nobody waits while there is room.  With steps in
flight it is not promised that no running request waits, either: where one lacks a block and nobody
can give any back before a step has ended, vLLM runs none of those behind it.

Not driven: loads within a step (``sync_load_budget_bytes``), chunks of several blocks, resets of
the connector's own cache, several groups; failed loads, which vLLM's worker does not know for this
connector (it asserts that none has failed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvproof.invariants.operations import Admit, Arrive, Operation, Reset, Resume
from kvproof.invariants.outcomes import Outcome
from kvproof.invariants.scheduling.vocabulary import BlocksHeld, Promises, QueueState
from kvproof.invariants.subject import Configuration, Semantics
from kvproof.stateful_tests.subjects.vllm_connector_cache import ConnectorCache
from kvproof.stateful_tests.subjects.vllm_connector_fences import FencedCache
from kvproof.stateful_tests.subjects.vllm_connector_tiers import DISK_BLOCKS, TieredCache
from kvproof.stateful_tests.subjects.vllm_connector_worker import (
    ASYNC_NAME,
    LATEST,
    NAME,
    TIERED_NAME,
    Worker,
    family_of,
    load_connector,
)
from kvproof.stateful_tests.subjects.vllm_scheduler import Job, VllmSchedulerSubject
from kvproof.stateful_tests.subjects.vllm_scheduler_view import VllmSchedulerView
from kvproof.stateful_tests.subjects.vllm_scheduling import PREFIX

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from kvproof.invariants.events import StepItem

HOST_BLOCKS = 4
"""Where a configuration has none: without a host there is nothing to check."""
LEAST_BLOCK = 2
"""Tokens per block, at least.  Where it is one, vLLM 0.33.0 never serves a prompt of one token that
the host has: once it is loaded it has no token computed, and is looked up and loaded anew."""
_CACHES = {NAME: ConnectorCache, ASYNC_NAME: FencedCache, TIERED_NAME: TieredCache}
_CANNOT_RESET = "Failed to reset KV cache even when all the running requests are preempted"
_PROMISES = Promises(no_barrier=True, copies_end_in=2 * LATEST)
_ASYNC_PROMISES = Promises(copies_end_in=2 * LATEST)


def vllm_connector_factory(name: str) -> Callable[[Configuration], VllmConnectorSubject]:
    load_connector()  # now, so that a missing package is bad input and not a crash of the subject
    return partial(VllmConnectorSubject, name=name)


class ConnectorSchedulerView(VllmSchedulerView):
    """vLLM's queues and figures, with those of copies."""

    _subject: VllmConnectorSubject

    def live(self) -> Sequence[int]:
        """Without those that are cancelled and wait for the end of a copy."""
        requests = self._scheduler.requests
        return [n for n in super().live() if not requests[f"{PREFIX}{n}"].is_finished()]

    def _queue(self, request: Request) -> QueueState:
        if request in self._scheduler.kv_holding_waiting:
            preempted = request.num_preemptions > 0
            return "preempted" if preempted else "waiting"
        return super()._queue(request)

    def metrics(self) -> Mapping[str, int]:
        subject = self._subject
        configuration = subject.configuration
        block_bytes = configuration.block_size * configuration.kv_bytes_per_token
        return {
            **super().metrics(),
            "host_offload_bytes": subject.cache.moved["store"] * block_bytes,
            "host_promotions": subject.cache.moved["promote"],
        }


class VllmConnectorSubject(VllmSchedulerSubject):
    """Drives one vLLM scheduler with its connector, as its engine core and a worker would.

    Raises SubjectUnavailable where vLLM 0.33 is not installed.
    """

    def __init__(
        self, configuration: Configuration, *, name: str = NAME, least_block: int = LEAST_BLOCK
    ) -> None:
        self._kind = name
        fitted = replace(
            configuration,
            block_size=max(configuration.block_size, least_block),
            host_blocks=configuration.host_blocks or HOST_BLOCKS,
        )
        super().__init__(
            fitted,
            name=name,
            family=family_of(name),
            scheduler_class=load_connector().scheduler_class(fitted, name),
        )
        self.promises = _ASYNC_PROMISES if name == ASYNC_NAME else _PROMISES
        self.state_view = ConnectorSchedulerView(self)
        self._worker = Worker(self.scheduler, self.cache.landed)
        self._held: dict[int, type[Operation]] = {}
        """Requests that hold blocks before they are run, and what their operation was."""

    def _fitted(self, configuration: Configuration, steps: int, groups: Semantics) -> Configuration:
        return replace(
            super()._fitted(configuration, steps, groups),
            prefix_caching=True,
            host_blocks=configuration.host_blocks,
            host_eviction=configuration.host_eviction,
            disk_blocks=DISK_BLOCKS if self._kind == TIERED_NAME else 0,
            offload="prefix",
        )

    def _new_cache(self, groups: Semantics) -> ConnectorCache:
        cache = _CACHES[self._kind]
        return cache(self.configuration, self.scheduler, listener=self, groups=groups)

    @property
    def _idle(self) -> bool:
        return not self.jobs and not self.scheduler.has_requests()

    # -- what the cache below overhears ----------------------------------------------------------

    def asked(self, name: str) -> Arrive:
        return self.jobs_by_id[name].operation

    def overheard(self, operation: Operation, request: Request | None) -> None:
        if not (isinstance(operation, Admit | Resume) and self.cache.delayed):
            super().overheard(operation, request)
            return
        assert request is not None
        self._perform(operation)
        number = self.jobs_by_id[request.request_id].number
        self._held[number] = type(operation)
        self._emit(BlocksHeld(number, self.cache.by_id[request.request_id].number))

    def _forget(self, job: Job) -> None:
        super()._forget(job)
        self._held.pop(job.number, None)

    def _reset_cache(self, operation: Reset) -> bool:
        """Of the device: that of the connector would be ``reset_connector``.

        vLLM says that it cannot yet while requests wait for their KV.
        """
        try:
            return super()._reset_cache(operation)
        except RuntimeError as error:
            loads = [c for c in self.cache.copies.values() if c.event.kind == "promote"]
            if operation.running and _CANNOT_RESET in str(error) and (loads or self._held):
                return False
            raise

    # -- the engine core, and the worker ---------------------------------------------------------

    def _work(self, scheduled: SchedulerOutput) -> list[StepItem]:
        run = [self.jobs_by_id[name].number for name in scheduled.num_scheduled_tokens]
        for kind in (Admit, Resume):
            entered = {*self._noted[kind], *[n for n in run if self._held.get(n) is kind]}
            self._noted[kind] = [number for number in run if number in entered]
        for number in run:
            self._held.pop(number, None)
        for number in self._noted[Admit]:
            request = self.jobs[number].request
            live = self.cache.by_id[request.request_id]
            cached = min(live.computed, live.length - 1)
            self.cached_tokens[number] = cached
            self._hits += cached
            self._queries += request.num_prompt_tokens
        self._worker.begin(scheduled)
        if self._kind == TIERED_NAME:
            self.cache.late.next_iteration()
        return super()._work(scheduled)

    def _results(self, samples: Mapping[str, list[int]]) -> ModelRunnerOutput:
        self._worker.awaited = results = super()._results(samples)
        if not samples:  # nothing is run: it ends at once
            self._worker.finish()
        return results

    def _retire(self) -> Outcome:
        if self._flights and self._flights[0].results is self._worker.awaited:
            self._worker.finish()
        return super()._retire()

    # -- figures -----------------------------------------------------------------------------------

    def _take_figures(self, told: Mapping[int, Any]) -> None:
        """vLLM counts a hit when it is looked up: here it counts when its request is run."""

    def prefix_cache_figures(self) -> tuple[int, int]:
        return self._queries, self._hits
