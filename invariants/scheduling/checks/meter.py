"""METER: the scheduler's exported figures are the figures.

Verifies: in audits, every figure that the chapter wants of a scheduler and of a live request,
against the same figure recomputed from events; after each completed step, active and waiting
sequences; that none of the figures is missing.  Of each copy: its size, when it is due, that it is
delivered then and not before, one after another of its kind, and that none is lost.

Does not verify: figures of requests that have ended; attention_mode and cache_dtype, which are
words of the configuration; the clock itself; what a step or a byte costs, which is an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.invariants.events import Event
from kvproof.invariants.property import Claim, EventHandler
from kvproof.invariants.scheduling.books import service_ns
from kvproof.invariants.scheduling.property import SchedulingCheck
from kvproof.invariants.scheduling.request_books import LiveRequest
from kvproof.invariants.scheduling.vocabulary import (
    Completed,
    Deferred,
    TransferDelivered,
    TransferQueued,
)

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
    "stalls",
    "stall_time_ns",
    "promotions",
    "promotion_time_ns",
    "fetches",
    "fetch_time_ns",
    "store_busy_ns",
    "promote_busy_ns",
    "demote_busy_ns",
    "fetch_busy_ns",
)
"""Those of the chapter; of which it names no denominator and no resumptions, which are beside.
Then what waiting for KV, and copying it, takes."""

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
        Claim(
            "A copy takes its latency and its bytes' time from when its kind's channel is free, is "
            "delivered when all of it has come, and never lost; stalls and promotion times are "
            "what results.",
            "chapter, what the scheduler should expose; bugs B158, B161; survey M02, M05, E18",
        ),
    )
    positive_control = "queue-time-restarts-on-resume"

    def before_event(self) -> Mapping[type[Event], EventHandler]:
        return {
            TransferQueued: self._queued,
            TransferDelivered: self._delivered,
            Deferred: self._looked,
        }

    def after_event(self) -> Mapping[type[Event], EventHandler]:
        return {Completed: self._completed}

    def _completed(self, event: Completed) -> None:
        self._compare(self.view.metrics(), self._sequences())
        if self.books.copies:
            self._late(event.now_ns)
        self._lost()

    # -- copies ------------------------------------------------------------------------------------

    def _queued(self, event: TransferQueued) -> None:
        self.checked += 1
        books, number = self.books, event.transfer
        tiers = books.cache.tiers
        copy = None if tiers is None else tiers.in_flight.get(number)
        if copy is None or number in books.copies:
            why = "is not in flight" if copy is None else "is queued already"
            self.fail(f"transfer {number} is queued, but it {why}")
            return
        count = len(copy.sources)
        size = count * books.block_size * self.configuration.kv_bytes_per_token
        if (event.kind, event.blocks, event.bytes) != (copy.kind, count, size):
            self.fail(
                f"transfer {number} is queued as {event.kind} of {event.blocks} blocks, "
                f"{event.bytes} bytes, but it is a {copy.kind} of {count}, {size} bytes"
            )
        begins_ns = max(event.now_ns, books.channel_free_ns.get(event.kind, 0))
        due_ns = begins_ns + service_ns(event)
        if event.due_ns != due_ns:
            self.fail(
                f"transfer {number} ({event.kind}) is due at {event.due_ns} ns, but its channel is "
                f"free at {begins_ns} ns and it takes {service_ns(event)} ns: that is {due_ns} ns"
            )

    def _delivered(self, event: TransferDelivered) -> None:
        self.checked += 1
        books, number = self.books, event.transfer
        copy, tiers = books.copies.get(number), books.cache.tiers
        if copy is None:
            self.fail(f"transfer {number} is delivered, but was not queued, or delivered before")
            return
        if event.now_ns < copy.due_ns:
            self.fail(
                f"transfer {number} ({copy.kind}) is delivered at {event.now_ns} ns, but is due at "
                f"{copy.due_ns} ns"
            )
        first = next(other for other in books.copies.values() if other.kind == copy.kind)
        if first is not copy:
            self.fail(
                f"transfer {number} ({copy.kind}) is delivered before transfer {first.transfer}, "
                "which its channel serves first"
            )
        if tiers is not None and number in tiers.in_flight:
            self.fail(f"transfer {number} is delivered, but is still in flight")

    def _looked(self, event: Deferred) -> None:
        if self.books.copies:
            self._late(event.now_ns)

    def _late(self, now_ns: int) -> None:
        self.checked += 1
        for copy in self.books.copies.values():
            if copy.due_ns <= now_ns:
                self.fail(
                    f"transfer {copy.transfer} ({copy.kind}) was due at {copy.due_ns} ns, and is "
                    f"not delivered at {now_ns} ns"
                )
                return

    def _lost(self) -> None:
        tiers = self.books.cache.tiers
        if tiers is None or self.books.promises.copies_end_in is not None:
            return
        for number in tiers.in_flight:
            if number not in self.books.copies:
                self.fail(f"transfer {number} is in flight, but not queued: nobody will end it")
                return

    # -- figures -----------------------------------------------------------------------------------

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
        books, figures = self.books, self.books.figures
        groups = books.cache.groups[:: len(books.pooled)]
        block_bytes = books.block_size * self.configuration.kv_bytes_per_token
        total = sum([group.usable for group in groups])
        used = sum([group.referenced for group in groups])
        moved = self._moved()
        return {
            "kv_capacity_bytes": total * block_bytes,
            "kv_bytes_used": used * block_bytes,
            "kv_blocks_total": total,
            "kv_blocks_free": sum([group.free for group in groups]),
            "live_cached_tokens": sum([request.computed for request in books.running.values()]),
            **self._sequences(),
            "admissions": figures.admissions,
            "resumptions": figures.resumptions,
            "preemptions": figures.preemptions,
            "evictions": books.cache.figures.evictions,
            "prefix_cache_hits": figures.prefix_cache_hits,
            "prefix_cache_queries": figures.prefix_cache_queries,
            "host_offload_bytes": (figures.offloaded_blocks + moved["store"]) * block_bytes,
            "host_promotions": figures.promoted_blocks + moved["promote"],
            "iterations": figures.steps,
            "batch_size_by_iteration": figures.batch_size,
            "stalls": figures.stalls,
            "stall_time_ns": figures.stall_ns,
            "promotions": figures.copies["promote"],
            "promotion_time_ns": figures.copy_time_ns["promote"],
            "fetches": figures.copies["fetch"],
            "fetch_time_ns": figures.copy_time_ns["fetch"],
            **{
                f"{kind}_busy_ns": figures.copy_busy_ns[kind]
                for kind in ("store", "promote", "demote", "fetch")
            },
        }

    def _moved(self) -> Mapping[str, int]:
        """Blocks of completed copies of findable blocks, by kind."""
        tiers = self.books.cache.tiers
        return {"store": 0, "promote": 0} if tiers is None else tiers.figures.moved

    def _figures_of(self, request: LiveRequest) -> dict[str, int]:
        """One request's figures by the books."""
        books = self.books
        first_run, first_token = request.first_run_ns, request.first_token_ns
        return {
            "input_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "allocated_blocks": books.held_blocks(request)
            * (len(books.cache.groups) // len(books.pooled)),
            "preemptions": request.preemptions,
            "queue_time_ns": _between(request.arrival_ns, first_run),
            "prefill_time_ns": _between(first_run, first_token),
            "decode_time_ns": _between(first_token, request.last_token_ns),
        }


def _between(start: int | None, end: int | None) -> int:
    """The time between, 0 until both are known."""
    return 0 if start is None or end is None else end - start
