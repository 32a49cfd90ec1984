"""Requests of transformers as their clients know them, and the engine's state as it is.

See :mod:`kvproof.stateful_tests.subjects.transformers_scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvproof.invariants.operations import Arrive
from kvproof.invariants.prompts import sampled_token
from kvproof.invariants.scheduling.vocabulary import QueueState
from kvproof.stateful_tests.subjects.overheard_scheduler import CHOICES, NO_COPIES, NO_TIME, STOP

if TYPE_CHECKING:
    from kvproof.stateful_tests.subjects.transformers_scheduler import TransformersSubject


class Job:
    """A live request: what its client and its model know of it."""

    __slots__ = (
        "cached",
        "choice",
        "delivered",
        "displaced",
        "name",
        "number",
        "operation",
        "preemptions",
        "prompt",
        "ran",
        "sampled",
        "swapped",
    )

    def __init__(self, number: int, name: str, operation: Arrive, prompt: list[int]) -> None:
        self.number = number
        """Rank of arrival."""
        self.choice = number % CHOICES
        """What the model samples for it: not the same for all, or nobody could tell them apart."""
        self.name = name
        self.operation = operation
        self.prompt = prompt
        self.sampled: list[int] = []
        """The tokens that its model sampled …"""
        self.delivered = 0
        """… and how many of them its client has."""
        self.cached = 0
        """Tokens that were there when it was first run."""
        self.preemptions = 0
        self.ran = False
        self.displaced = False
        """Preempted, and not run since …"""
        self.swapped = False
        """… what was computed being on the host."""

    @property
    def max_tokens(self) -> int:
        return max(self.operation.output, self.operation.max_tokens)

    def sample(self) -> int:
        """The model's next token."""
        position = len(self.prompt) + len(self.sampled)
        stops = len(self.sampled) + 1 == self.operation.output < self.operation.max_tokens
        self.sampled.append(STOP if stops else sampled_token(self.choice, position))
        return self.sampled[-1]

    def receive(self, tokens: list[int]) -> int:
        """How many output tokens the client gets anew: each delivery has all of them."""
        new = max(0, len(tokens) - self.delivered)
        self.delivered += new
        return new

    def owns(self, prompt: list[int], tokens: list[int]) -> bool:
        """Whether that is its prompt, and what its model sampled first."""
        return prompt == self.prompt and tokens == self.sampled[: len(tokens)]


class TransformersView:
    """The engine's queues and figures; of what it does not count, the adapter's counts."""

    def __init__(self, subject: TransformersSubject) -> None:
        self._subject = subject
        self._scheduler = subject.scheduler

    def live(self) -> Sequence[int]:
        scheduler, jobs = self._scheduler, self._subject.jobs_by_name
        names = {*scheduler.active_requests, *scheduler.waiting_requests}
        return sorted([jobs[name].number for name in names])

    def standing(self, request: int) -> tuple[QueueState, int, int]:
        job = self._subject.jobs[request]
        scheduler = self._scheduler
        active = scheduler.active_requests.get(job.name)
        waiting = scheduler.waiting_requests.get(job.name)
        state = active or waiting
        nowhere: QueueState = "preempted" if job.swapped else "swapped"
        """Which it is not: stands for no queue, or more than one."""
        if state is None:
            return nowhere, 0, job.preemptions
        outputs = len(state.initial_tokens) + len(state.generated_tokens) - len(job.prompt)
        placed = scheduler.waiting_requests_order.count(job.name) == (waiting is not None)
        if (active is not None and waiting is not None) or not placed:
            return nowhere, outputs, job.preemptions
        return self._queue(job, active is not None), outputs, job.preemptions

    def _queue(self, job: Job, active: bool) -> QueueState:
        """As the checks understand it: active requests may hold blocks before they are run."""
        if not job.ran:
            return "waiting"
        if job.swapped:
            return "swapped"
        return "running" if active and not job.displaced else "preempted"

    def cache_request(self, request: int) -> int | None:
        live = self._subject.cache.by_name.get(self._subject.jobs[request].name)
        return live.number if live is not None else None

    def metrics(self) -> Mapping[str, int]:
        subject = self._subject
        cache, configuration = subject.cache, subject.configuration
        total = cache.cache.num_blocks * len(cache.cache.cache_allocators)
        free, withheld = cache.view().free_count(0), cache.withheld
        block_bytes = configuration.block_size * configuration.kv_bytes_per_token
        running = [job for job in subject.jobs.values() if self._runs(job)]
        return NO_COPIES | {
            "kv_capacity_bytes": total * block_bytes,
            "kv_bytes_used": (total - free - withheld) * block_bytes,
            "kv_blocks_total": total,
            "kv_blocks_free": free,
            "live_cached_tokens": sum([self._computed(job) for job in running]),
            "active_sequences": len(running),
            "waiting_sequences": len(subject.jobs) - len(running),
            "admissions": subject.admissions,
            "resumptions": subject.resumptions,
            "preemptions": subject.preemptions,
            "evictions": cache.evictions,
            "host_offload_bytes": subject.offloaded * block_bytes,
            "host_promotions": subject.restored,
            "prefix_cache_hits": subject.prefix_hits,
            "prefix_cache_queries": subject.prefix_queries,
            "iterations": subject.steps,
            "batch_size_by_iteration": subject.batch_size,
        }

    def _runs(self, job: Job) -> bool:
        return self.standing(job.number)[0] == "running"

    def _computed(self, job: Job) -> int:
        """Positions of which KV is there, less those of a step in flight."""
        position: int = self._scheduler.active_requests[job.name].position_offset
        return position - self._subject.in_flight.get(job.name, 0)

    def request_metrics(self, request: int) -> Mapping[str, int]:
        job = self._subject.jobs[request]
        return NO_TIME | {
            "input_tokens": len(job.prompt),
            "cached_tokens": job.cached,
            "allocated_blocks": len(self._subject.cache.allocator.block_table.get(job.name, ())),
            "preemptions": job.preemptions,
        }
