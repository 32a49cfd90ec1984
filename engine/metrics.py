"""The scheduler's figures, by the names of the chapter, as far as they exist at this level.

Definitions where systems differ (survey section 1.K): *used* means referenced, by transfers as
well, *free* includes cached-free blocks and excludes withheld ones, totals exclude the null block;
cached tokens count shared blocks once per request; admissions count first admissions only; prefix
hits are tokens, counted once per request, at its first admission (bugs B158, B159); an eviction is
a block whose content became unfindable.

Of the memory hierarchy: bytes are those of completed transfers, by direction and meaning;
``host_offload_bytes`` and ``host_promotions`` (in blocks) sum up both meanings of offload.  The
queries and hits of a tier are rows of first admissions (survey row M03), those of the device are
counted only with prefix offload.  Host and disk evict by pressure or on request.  A stall is an
operation that was refused because KV is on its way or a tier has not answered.  The effective
capacity gained (M06) is what host or disk can find and the device cannot, in tokens, also where
the blocks before it are gone; and the suspended sequences, whose KV only the host has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvproof.invariants.events import TransferKind
from kvproof.invariants.operations import Tier

if TYPE_CHECKING:
    from kvproof.engine.engine import Engine
    from kvproof.engine.request import Request

_TIERS: tuple[Tier, ...] = ("device", "host", "disk")
_BYTES: dict[TransferKind, str] = {
    "store": "prefix_store_bytes",
    "promote": "prefix_load_bytes",
    "swap_out": "suspend_out_bytes",
    "swap_in": "suspend_in_bytes",
    "demote": "disk_store_bytes",
    "fetch": "disk_load_bytes",
}
"""What each kind of transfer adds to."""


class Counters:
    """What only ever goes up, and the size of the latest batch."""

    __slots__ = (
        "admissions",
        "batch_size",
        "blocks_moved",
        "corrupt_blocks",
        "iterations",
        "preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "stalls",
        "suspensions",
        "tier_hits",
        "tier_queries",
        "transfers_failed",
    )

    def __init__(self) -> None:
        self.admissions = 0
        self.preemptions = 0
        self.prefix_cache_hits = 0
        self.prefix_cache_queries = 0
        self.iterations = 0
        self.batch_size = 0
        self.suspensions = 0
        """Of the preemptions: those that were swaps."""
        self.blocks_moved: dict[TransferKind, int] = dict.fromkeys(_BYTES, 0)
        """By completed transfers."""
        self.transfers_failed = 0
        self.corrupt_blocks = 0
        """Found to be damaged on disk, and dropped; entries of the index count as well."""
        self.stalls = 0
        self.tier_queries: dict[Tier, int] = dict.fromkeys(_TIERS, 0)
        self.tier_hits: dict[Tier, int] = dict.fromkeys(_TIERS, 0)


def scheduler_metrics(engine: Engine) -> dict[str, int]:
    """All figures now; bytes, blocks, tokens and counts as the names say."""
    counters = engine.counters
    block_bytes = engine.configuration.block_size * engine.configuration.kv_bytes_per_token
    total = sum([pool.usable for pool in engine.pools])
    free = sum([pool.free_count for pool in engine.pools])
    withheld = sum([pool.withheld for pool in engine.pools])
    moved = counters.blocks_moved
    return {
        "kv_capacity_bytes": total * block_bytes,
        "kv_bytes_used": (total - free - withheld) * block_bytes,
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
        "host_offload_bytes": (moved["store"] + moved["swap_out"]) * block_bytes,
        "host_promotions": moved["promote"] + moved["swap_in"],
        "iterations": counters.iterations,
        "batch_size_by_iteration": counters.batch_size,
        **{name: moved[kind] * block_bytes for kind, name in _BYTES.items()},
        **_tier_metrics(engine),
    }


def _tier_metrics(engine: Engine) -> dict[str, int]:
    """Of the memory hierarchy; all of them 0 if there is none."""
    counters, hierarchy = engine.counters, engine.hierarchy
    gained = hierarchy.census.gained if hierarchy is not None else 0
    host = hierarchy.host if hierarchy is not None else []
    disk = hierarchy.disk if hierarchy is not None else []
    return {
        **{f"{tier}_queries": count for tier, count in counters.tier_queries.items()},
        **{f"{tier}_hits": count for tier, count in counters.tier_hits.items()},
        "host_evictions": sum([pool.evictions for pool in host]),
        "disk_evictions": sum([pool.evictions for pool in disk]),
        "corrupt_blocks": counters.corrupt_blocks,
        "transfers_failed": counters.transfers_failed,
        "suspensions": counters.suspensions,
        "stalls": counters.stalls,
        "capacity_gained_tokens": gained * engine.configuration.block_size,
        "suspended_sequences": len([r for r in engine.requests.values() if _only_on_host(r)]),
    }


def _only_on_host(request: Request) -> bool:
    """Whether a suspended request's KV has left the device, and is not back yet."""
    return request.suspended > 0 and not (request.swapped and request.transfers)


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
    *_BYTES.values(),
    *[f"{tier}_{figure}" for figure in ("queries", "hits") for tier in _TIERS],
    "host_evictions",
    "disk_evictions",
    "corrupt_blocks",
    "transfers_failed",
    "suspensions",
    "stalls",
    "capacity_gained_tokens",
    "suspended_sequences",
)
REQUEST_METRICS = ("input_tokens", "cached_tokens", "allocated_blocks", "preemptions")
