"""The figures of a memory hierarchy in a replay.

What is meant (survey sections 1.J and 1.K):

* *effective capacity gained*: tokens findable on host or disk and not on the device (M06); findable
  blocks count by themselves, also if the prefix before them is gone;
* *suspended sequences*: live requests whose KV only the host holds (M06, of swaps);
* *stalls*: request-iterations in which a waiting request was held back for KV on its way (M05);
* *hits* of a tier are blocks of prompts of first admissions below the last token; the queries of a
  tier are what those above it did not hit (M03).  What was promoted before is a hit of the device;
* *promotion time*: from the decision until the blocks are findable on the device; from disk to host
  apart (M02);
* bytes are those of completed copies (E18); swaps are copied within a step, so that they have no
  busy time of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from msgspec import Struct

from kvproof.engine.clock import NS_PER_S
from kvproof.engine.scheduler import Scheduler
from kvproof.fuzz.traces.gauges import Gauge, Level, Percentiles, percentiles, rate
from kvproof.invariants.scheduling.vocabulary import (
    SchedulerEvent,
    TransferDelivered,
    TransferQueued,
)

TIERS = ("device", "host", "disk")
_BYTES = {
    "store": "prefix_store_bytes",
    "promote": "prefix_load_bytes",
    "demote": "disk_store_bytes",
    "fetch": "disk_load_bytes",
    "swap_out": "suspend_out_bytes",
    "swap_in": "suspend_in_bytes",
}
"""Kinds of copies, and what the scheduler exports as their bytes."""


class Hits(Struct, frozen=True):
    """Blocks of prompts that were looked up in a tier, and found there."""

    queries: int
    hits: int


class Moved(Struct, frozen=True):
    """Bytes copied in one direction, for one purpose."""

    bytes: int
    bytes_per_second: float
    """Of virtual time."""
    bytes_per_busy_second: float | None
    """… in which this channel was at work."""


class Took(Struct, frozen=True):
    """How long copies took; seconds, none if there were none."""

    copies: int
    mean: float | None
    percentiles: Percentiles | None


class TierFigures(Struct, frozen=True):
    """What the tiers below the device were good for."""

    tiered: bool
    """Whether completed blocks are copied to them."""
    effective_capacity_gained_tokens: Gauge
    effective_capacity_gained_bytes: Gauge
    suspended_sequences: Gauge
    stalls: int
    """Request-iterations."""
    stall_seconds: float
    hits: dict[str, Hits]
    """By tier."""
    moved: dict[str, Moved]
    """By kind of copy."""
    promotion_time: Took
    """From the host to the device."""
    fetch_time: Took
    """From the disk to the host."""
    evictions: dict[str, int]
    """Blocks, by tier."""
    admissions: int
    transfers_failed: int


class TierObserver:
    """Collects the figures of the tiers in one replay."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._configuration = scheduler.configuration
        self._gained, self._suspended = Level(), Level()
        self._queued_ns: dict[int, tuple[str, int]] = {}
        """By transfer in flight: its kind, and when it was decided on."""
        self._took_ns: dict[str, array[int]] = {"promote": array("q"), "fetch": array("q")}

    def hear(self, event: SchedulerEvent) -> None:
        """An event of the scheduler."""
        if event.__class__ is TransferQueued:
            self._queued_ns[event.transfer] = event.kind, event.now_ns
        elif event.__class__ is TransferDelivered:
            kind, since_ns = self._queued_ns.pop(event.transfer)
            if kind in self._took_ns:
                self._took_ns[kind].append(event.now_ns - since_ns)
            self.look(event.now_ns)

    @property
    def gained(self) -> int:
        """Blocks findable below the device and not on it."""
        hierarchy = self._scheduler.engine.hierarchy
        assert hierarchy is not None, "only what has tiers is looked at"
        return hierarchy.census.gained

    def look(self, now_ns: int) -> None:
        """These are the levels until the clock moves again, or a copy has come."""
        self._gained.set(self.gained, now_ns)
        jobs = self._scheduler.suspended.values()
        self._suspended.set(len([job for job in jobs if job.state == "swapped"]), now_ns)

    def figures(self) -> TierFigures:
        """All of them, up to now."""
        clock, exported = self._scheduler.clock, self._scheduler.metrics()
        size = self._configuration.block_size
        tokens = self._gained.gauge(clock.now_ns).times(size)
        return TierFigures(
            tiered=self._configuration.offloads_prefixes,
            effective_capacity_gained_tokens=tokens,
            effective_capacity_gained_bytes=tokens.times(self._configuration.kv_bytes_per_token),
            suspended_sequences=self._suspended.gauge(clock.now_ns),
            stalls=exported["stalls"],
            stall_seconds=exported["stall_time_ns"] / NS_PER_S,
            hits={
                tier: Hits(exported[f"{tier}_queries"], exported[f"{tier}_hits"]) for tier in TIERS
            },
            moved={kind: self._moved(kind, exported, clock.now_s) for kind in _BYTES},
            promotion_time=self._took("promote"),
            fetch_time=self._took("fetch"),
            evictions={
                "device": exported["evictions"],
                "host": exported["host_evictions"],
                "disk": exported["disk_evictions"],
            },
            admissions=exported["admissions"],
            transfers_failed=exported["transfers_failed"],
        )

    def _moved(self, kind: str, exported: Mapping[str, int], virtual_seconds: float) -> Moved:
        count = exported[_BYTES[kind]]
        busy_ns = exported.get(f"{kind}_busy_ns", 0)
        per_busy_second = rate(count, busy_ns / NS_PER_S) if busy_ns else None
        return Moved(count, rate(count, virtual_seconds), per_busy_second)

    def _took(self, kind: str) -> Took:
        took_ns = self._took_ns[kind]
        if not took_ns:
            return Took(0, None, None)
        mean = sum(took_ns) / len(took_ns) / NS_PER_S
        return Took(len(took_ns), mean, percentiles([ns / NS_PER_S for ns in took_ns]))
