"""The scheduler's figures, by the names of the chapter, as far as they exist at this level.

Definitions where systems differ (survey section 1.K): *used* means referenced, *free* includes
cached-free blocks, totals exclude the null block; cached tokens count shared blocks once per
request; admissions count first admissions only; prefix hits are tokens, counted once per request,
at its first admission (bugs B158, B159); an eviction is a block whose content became unfindable;
offloaded bytes and promotions (in blocks) are those of swapped requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvproof.engine.engine import Engine
    from kvproof.engine.request import Request


class Counters:
    """What only ever goes up, and the size of the latest batch."""

    __slots__ = (
        "admissions",
        "batch_size",
        "blocks_offloaded",
        "blocks_promoted",
        "iterations",
        "preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
    )

    def __init__(self) -> None:
        self.admissions = 0
        self.preemptions = 0
        self.prefix_cache_hits = 0
        self.prefix_cache_queries = 0
        self.iterations = 0
        self.batch_size = 0
        self.blocks_offloaded = 0
        self.blocks_promoted = 0


def scheduler_metrics(engine: Engine) -> dict[str, int]:
    """All figures now; bytes, blocks, tokens and counts as the names say."""
    counters = engine.counters
    block_bytes = engine.configuration.block_size * engine.configuration.kv_bytes_per_token
    total = sum([pool.usable for pool in engine.pools])
    free = sum([pool.free_count for pool in engine.pools])
    return {
        "kv_capacity_bytes": total * block_bytes,
        "kv_bytes_used": (total - free) * block_bytes,
        "kv_blocks_total": total,
        "kv_blocks_free": free,
        "live_cached_tokens": sum([request.computed for request in engine.running]),
        "active_sequences": len(engine.running),
        "waiting_sequences": len(engine.preempted),
        "admissions": counters.admissions,
        "preemptions": counters.preemptions,
        "evictions": sum([pool.evictions for pool in engine.pools]),
        "prefix_cache_hits": counters.prefix_cache_hits,
        "prefix_cache_queries": counters.prefix_cache_queries,
        "host_offload_bytes": counters.blocks_offloaded * block_bytes,
        "host_promotions": counters.blocks_promoted,
        "iterations": counters.iterations,
        "batch_size_by_iteration": counters.batch_size,
    }


def request_metrics(request: Request) -> dict[str, int]:
    """One live request's figures."""
    return {
        "input_tokens": request.input_tokens,
        "cached_tokens": request.cached_tokens,
        "allocated_blocks": sum(map(len, request.tables)),
        "preemptions": request.epoch,
    }


SCHEDULER_METRICS = (
    "kv_capacity_bytes",
    "kv_bytes_used",
    "kv_blocks_total",
    "kv_blocks_free",
    "live_cached_tokens",
    "active_sequences",
    "waiting_sequences",
    "admissions",
    "preemptions",
    "evictions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "host_offload_bytes",
    "host_promotions",
    "iterations",
    "batch_size_by_iteration",
)
REQUEST_METRICS = ("input_tokens", "cached_tokens", "allocated_blocks", "preemptions")
