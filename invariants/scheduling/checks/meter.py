"""METER: the scheduler's exported figures are the figures.

Verifies: in audits, every figure that the chapter wants of a scheduler and of a live request,
against the same figure recomputed from events; after each completed step, active and waiting
sequences; that none of the figures is missing.

Does not verify: figures of requests that have ended; attention_mode and cache_dtype, which are
words of the configuration; the clock itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import LiveRequest
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.vocabulary import Completed

SCHEDULER_FIGURES = (
    "kv_capacity_bytes",
    "kv_bytes_used",
    "kv_blocks_total",
    "kv_blocks_free",
    "live_cached_tokens",
    "active_sequences",
    "waiting_sequences",
    "admissions",
    "resumptions",
    "preemptions",
    "evictions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "host_offload_bytes",
    "host_promotions",
    "iterations",
    "batch_size_by_iteration",
)
"""Those of the chapter; of which it names no denominator and no resumptions, which are beside."""

REQUEST_FIGURES = (
    "input_tokens",
    "cached_tokens",
    "allocated_blocks",
    "preemptions",
    "queue_time_ns",
    "prefill_time_ns",
    "decode_time_ns",
)


class Meter(SchedulingCheck):
    """Metrics."""

    claims = (
        Claim(
            "Bytes, blocks and sequences are those that there are; waiting are all that are live "
            "and do not run.",
            "chapter, what the scheduler should expose; bugs B160, B161; survey X01 to X07",
        ),
        Claim(
            "Admissions, preemptions, offloads and batch sizes are those that happened; prefix "
            "hits count once per request.",
            "chapter, what the scheduler should expose; bugs B158, B159; survey X08 to X14",
        ),
        Claim(
            "A request queues until it is first run, prefills until its first token, and decodes "
            "until its latest.",
            "chapter, what the scheduler should expose; survey Y01 to Y03, Y06 to Y09, K22",
        ),
    )
    positive_control = "queue-time-restarts-on-resume"

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {Completed: self._completed}

    def _completed(self, event: Completed) -> None:
        self._compare(self.view.metrics(), self._sequences())

    def _sequences(self) -> dict[str, int]:
        books = self.books
        return {
            "active_sequences": len(books.running),
            "waiting_sequences": len(books.waiting) + len(books.displaced),
        }

    def audit(self) -> None:
        self._compare(self.view.metrics(), self._figures())
        for request in self.books.live.values():
            exported = self.view.request_metrics(request.id)
            self._compare(exported, self._figures_of(request), request.id)

    def _compare(
        self, exported: Mapping[str, int], expected: Mapping[str, int], request: int | None = None
    ) -> None:
        self.checked += 1
        whose = "" if request is None else f" of request {request}"
        for name, figure in expected.items():
            if name not in exported:
                self.fail(f"{name}{whose} is not exported", request=request)
                return
            if exported[name] != figure:
                self.fail(
                    f"{name}{whose} is exported as {exported[name]}, but it is {figure}",
                    request=request,
                )
                return

    def _figures(self) -> dict[str, int]:
        """The scheduler's figures by the books."""
        books, figures, groups = self.books, self.books.figures, self.books.cache.groups
        block_bytes = books.block_size * self.configuration.kv_bytes_per_token
        total = sum([group.usable for group in groups])
        used = sum([group.referenced for group in groups])
        return {
            "kv_capacity_bytes": total * block_bytes,
            "kv_bytes_used": used * block_bytes,
            "kv_blocks_total": total,
            "kv_blocks_free": total - used,
            "live_cached_tokens": sum([request.computed for request in books.running.values()]),
            **self._sequences(),
            "admissions": figures.admissions,
            "resumptions": figures.resumptions,
            "preemptions": figures.preemptions,
            "evictions": books.cache.figures.evictions,
            "prefix_cache_hits": figures.prefix_cache_hits,
            "prefix_cache_queries": figures.prefix_cache_queries,
            "host_offload_bytes": figures.offloaded_blocks * block_bytes,
            "host_promotions": figures.promoted_blocks,
            "iterations": figures.steps,
            "batch_size_by_iteration": figures.batch_size,
        }

    def _figures_of(self, request: LiveRequest) -> dict[str, int]:
        """One request's figures by the books."""
        books = self.books
        first_run, first_token = request.first_run_ns, request.first_token_ns
        return {
            "input_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "allocated_blocks": books.held_blocks(request) * len(books.cache.groups),
            "preemptions": request.preemptions,
            "queue_time_ns": _between(request.arrival_ns, first_run),
            "prefill_time_ns": _between(first_run, first_token),
            "decode_time_ns": _between(first_token, request.last_token_ns),
        }


def _between(start: int | None, end: int | None) -> int:
    """The time between, 0 until both are known."""
    return 0 if start is None or end is None else end - start
