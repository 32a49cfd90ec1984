"""What of vLLM's scheduler is shown: its queues and figures.

See :mod:`kvproof.stateful_tests.subjects.vllm_scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvproof.invariants.scheduling.vocabulary import QueueState
from kvproof.stateful_tests.subjects.overheard_scheduler import NO_COPIES, NO_TIME
from kvproof.stateful_tests.subjects.vllm_scheduling import PREFIX

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvproof.stateful_tests.subjects.vllm_scheduler import VllmSchedulerSubject


class VllmSchedulerView:
    """vLLM's queues and figures as they are; of what it does not count, the adapter's counts."""

    def __init__(self, subject: VllmSchedulerSubject) -> None:
        self._subject = subject
        self._scheduler = subject.scheduler

    def live(self) -> Sequence[int]:
        return sorted([int(name.removeprefix(PREFIX)) for name in self._scheduler.requests])

    def standing(self, request: int) -> tuple[QueueState, int, int]:
        found: Request = self._subject.jobs[request].request
        return self._queue(found), found.num_output_tokens, found.num_preemptions

    def _queue(self, request: Request) -> QueueState:
        """The queue in which it really is: "swapped" stands for none, or more than one."""
        scheduler = self._scheduler
        queues = [queue for queue in (scheduler.running, scheduler.waiting) if request in queue]
        if len(queues) != 1:
            return "swapped"
        if queues[0] is scheduler.running:
            return "running"
        preempted = request.status == self._subject.vllm.manager.status.PREEMPTED
        return "preempted" if preempted else "waiting"

    def cache_request(self, request: int) -> int | None:
        live = self._subject.cache.by_id.get(self._subject.jobs[request].request.request_id)
        return live.number if live is not None else None

    def metrics(self) -> Mapping[str, int]:
        subject, scheduler = self._subject, self._scheduler
        pool, configuration = scheduler.kv_cache_manager.block_pool, subject.configuration
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        block_bytes = configuration.block_size * configuration.kv_bytes_per_token
        running, waiting = scheduler.get_request_counts()
        queries, hits = subject.prefix_cache_figures()
        return NO_COPIES | {
            "kv_capacity_bytes": total * block_bytes,
            "kv_bytes_used": (total - free) * block_bytes,
            "kv_blocks_total": total,
            "kv_blocks_free": free,
            "live_cached_tokens": sum(
                [
                    r.num_computed_tokens - r.num_in_flight_tokens + r.num_stale_output_tokens
                    for r in scheduler.running
                ]
            ),
            "active_sequences": running,
            "waiting_sequences": waiting,
            "admissions": subject.admissions,
            "resumptions": subject.resumptions,
            "preemptions": subject.preemptions,
            "evictions": subject.cache.evictions,
            "prefix_cache_hits": hits,
            "prefix_cache_queries": queries,
            "iterations": scheduler.num_executed_steps,
            "batch_size_by_iteration": subject.batch_size,
        }

    def request_metrics(self, request: int) -> Mapping[str, int]:
        job = self._subject.jobs[request]
        manager = self._scheduler.kv_cache_manager
        return NO_TIME | {
            "input_tokens": job.request.num_prompt_tokens,
            "cached_tokens": self._subject.cached_tokens.get(request, 0),
            "allocated_blocks": sum(map(len, manager.get_block_ids(job.request.request_id))),
            "preemptions": job.request.num_preemptions,
        }
