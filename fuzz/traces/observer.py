"""Keeps the figures of a replay, from what the scheduler tells and from its state.

Python work is done per iteration, per admission and per finished request, never per token: what
takes a look at every running request is read rarely enough to cost the same as a few requests
each time (see ``FEW_REQUESTS``).  What grows with the iterations are flat arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvproof.engine.clock import NS_PER_S
from kvproof.engine.job import Job
from kvproof.engine.scheduler import Scheduler
from kvproof.fuzz.traces.figures import (
    NO_HOST_TIER,
    KvUse,
    PrefixCacheHits,
    RequestRecords,
    SchedulerFigures,
    batch_sizes,
)
from kvproof.fuzz.traces.formats import TraceRequest
from kvproof.fuzz.traces.gauges import Level
from kvproof.fuzz.traces.tiers import TierFigures, TierObserver
from kvproof.invariants.scheduling.vocabulary import Scheduled, SchedulerEvent

FEW_REQUESTS = 32
"""Fewer running requests than so many are looked at each time, more of them less often."""

SERIES_POINTS = 1000
"""Points at most in a series to be drawn."""


class Series(Struct, frozen=True):
    """KV use and batch size over virtual time, by iteration, or by groups of iterations.

    Each point stands for the iterations from its time to that of the next point.
    """

    seconds: Sequence[float]
    kv_use: Sequence[float]
    """Referenced blocks, of all blocks; the mean over the iterations."""
    sequences: Sequence[float]
    """Requests in the step; the mean over the iterations."""
    gained_tokens: Sequence[float] = ()
    """Effective capacity gained by the tiers below the device; nothing where there are none."""


class Observer:
    """Collects the figures of one replay over one scheduler."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self.records = _records_of(trace)
        self.finished = 0
        self.iterations = 0
        """Those that launched a step."""
        self._numbers = array("q")
        """By the scheduler's number of a request, its number in the trace."""
        self._looks_due = 0
        self._swapped: set[int] = set()
        self._resumed_hits = self._resumed_queries = 0
        self._times_ns, self._blocks = array("q"), array("Q")
        self._sequences, self._tokens = array("I"), array("Q")
        self._gained_tokens = array("Q")
        self._active, self._queued, self._live = Level(), Level(), Level()
        self._used, self._reserved, self._fragmentation = Level(), Level(), Level()

    def attach(self, scheduler: Scheduler) -> None:
        """Whom to observe; before its first operation."""
        self._scheduler = scheduler
        self._engine = scheduler.engine
        self._block_size = scheduler.configuration.block_size
        self._total_blocks = sum([pool.usable for pool in self._engine.pools])
        self._free = Level(self._total_blocks)
        self._tiers = TierObserver(scheduler)
        self._tiered = scheduler.configuration.host_blocks > 0

    # -- what happens --------------------------------------------------------------------------

    def accepted(self, number: int) -> None:
        """Request ``number`` of the trace was accepted as the scheduler's next one."""
        self._numbers.append(number)

    def hear(self, event: SchedulerEvent) -> None:
        """An event of the scheduler."""
        if event.__class__ is Scheduled:
            self._scheduled(event)
        elif self._tiered:
            self._tiers.hear(event)

    def _scheduled(self, event: Scheduled) -> None:
        if event.swapped:
            self._swapped.update(event.swapped)
        if event.resumed:
            self._count_resumed(event.resumed)

    def launched(self, tokens: int) -> None:
        """An iteration has launched a step of so many tokens."""
        self.iterations += 1
        self._times_ns.append(self._scheduler.clock.now_ns)
        self._blocks.append(self._total_blocks - self._free_blocks())
        self._sequences.append(self._engine.counters.batch_size)
        self._tokens.append(tokens)
        if self._tiered:
            self._gained_tokens.append(self._tiers.gained * self._block_size)

    def _count_resumed(self, resumed: Sequence[int]) -> None:
        """Prefix hits of those that are recomputed; swapped ones bring their tokens along."""
        for number in resumed:
            if number in self._swapped:
                self._swapped.discard(number)
                continue
            request = self._scheduler.jobs[number].cache
            assert request is not None, "a resumed request is known to the cache"
            self._resumed_hits += request.computed
            self._resumed_queries += len(request.tokens)

    def on_finished(self, job: Job) -> None:
        """A request has all its output; its blocks are still its own."""
        assert job.cache is not None, "a finished request is known to the cache"
        number, records = self._numbers[job.id], self.records
        records.scheduled_ns[number] = job.scheduled_ns
        records.first_token_ns[number] = job.first_token_ns
        records.finished_ns[number] = job.last_token_ns
        records.cached_tokens[number] = job.cache.cached_tokens
        records.allocated_blocks[number] = sum(map(len, job.cache.tables))
        records.preemptions[number] = job.preemptions
        self.finished += 1

    def before_time_passes(self) -> None:
        """All is done that happens now: these are the levels until the clock moves again."""
        scheduler, now_ns = self._scheduler, self._scheduler.clock.now_ns
        self._active.set(len(self._engine.running), now_ns)
        self._queued.set(len(scheduler.waiting) + len(scheduler.suspended), now_ns)
        self._free.set(self._free_blocks(), now_ns)
        if self._tiered:
            self._tiers.look(now_ns)
        self._looks_due -= 1
        if self._looks_due <= 0 or not self._engine.running:
            self._looks_due = 1 + len(self._engine.running) // FEW_REQUESTS
            self._look_at_running(now_ns)

    def _free_blocks(self) -> int:
        return sum([pool.free_count for pool in self._engine.pools])

    def _look_at_running(self, now_ns: int) -> None:
        """What the slots of the running requests are good for.

        Only a request's last blocks have slots without a token state, and nobody shares those.
        """
        jobs = self._scheduler.by_cache_id
        live = unused = never = 0
        for request in self._engine.running:
            job = jobs[request.id]
            slots = len(request.tables[0]) * self._block_size
            live += request.computed
            unused += slots - request.scheduled
            final = job.prompt_tokens + job.output - 1
            never += max(0, slots - max(final, request.scheduled))
        held = (self._total_blocks - self._free_blocks()) * self._block_size
        self._live.set(live, now_ns)
        self._used.set(held - unused, now_ns)
        self._reserved.set(unused - never, now_ns)
        self._fragmentation.set(never, now_ns)

    # -- the figures ---------------------------------------------------------------------------

    def scheduler_figures(self) -> SchedulerFigures:
        """The chapter's fourteen."""
        end_ns = self._scheduler.clock.now_ns
        exported = self._scheduler.metrics()
        free = self._free.gauge(end_ns)
        block_bytes = exported["kv_capacity_bytes"] // self._total_blocks
        tiered = self._scheduler.configuration.host_blocks > 0
        return SchedulerFigures(
            kv_capacity_bytes=exported["kv_capacity_bytes"],
            kv_bytes_used=free.below(self._total_blocks).times(block_bytes),
            kv_blocks_total=self._total_blocks,
            kv_blocks_free=free,
            live_cached_tokens=self._live.gauge(end_ns),
            active_sequences=self._active.gauge(end_ns),
            waiting_sequences=self._queued.gauge(end_ns),
            admissions=exported["admissions"],
            preemptions=exported["preemptions"],
            evictions=exported["evictions"],
            prefix_cache_hits=PrefixCacheHits(
                tokens=exported["prefix_cache_hits"],
                queries_tokens=exported["prefix_cache_queries"],
                resumed_tokens=self._resumed_hits,
                resumed_queries_tokens=self._resumed_queries,
            ),
            host_offload_bytes=exported["host_offload_bytes"] if tiered else NO_HOST_TIER,
            host_promotions=exported["host_promotions"] if tiered else NO_HOST_TIER,
            batch_size_by_iteration=batch_sizes(self._sequences, self._tokens),
            resumptions=exported["resumptions"],
        )

    def tier_figures(self) -> TierFigures:
        """Those of the memory hierarchy; all 0 without one."""
        return self._tiers.figures()

    def kv_use(self) -> KvUse:
        """What of the KV memory was put to use."""
        end_ns = self._scheduler.clock.now_ns
        slots = self._total_blocks * self._block_size
        referenced = self._free.gauge(end_ns).below(self._total_blocks)
        used = self._used.area_until(end_ns)
        wasted = self._reserved.area_until(end_ns) + self._fragmentation.area_until(end_ns)
        return KvUse(
            total_slots=slots,
            effective_fraction=self._used.gauge(end_ns).times(1 / slots),
            referenced_fraction=referenced.times(1 / self._total_blocks),
            reserved_slots=self._reserved.gauge(end_ns),
            fragmentation_slots=self._fragmentation.gauge(end_ns),
            used_of_held=used / (used + wasted) if used else 0.0,
        )

    def series(self) -> Series:
        """What can be drawn."""
        count = len(self._times_ns)
        if not count:
            return Series((), (), ())
        starts = np.arange(0, count, -(-count // SERIES_POINTS))
        lengths = np.diff(np.append(starts, count))

        def means(column: array[int]) -> list[float]:
            sums = np.add.reduceat(np.asarray(column, dtype=np.float64), starts)
            return [float(mean) for mean in sums / lengths]

        return Series(
            [float(time) for time in np.asarray(self._times_ns)[starts] / NS_PER_S],
            [blocks / self._total_blocks for blocks in means(self._blocks)],
            means(self._sequences),
            means(self._gained_tokens) if self._tiered else (),
        )


def _records_of(trace: Sequence[TraceRequest]) -> RequestRecords:
    records = RequestRecords(len(trace))
    for number, request in enumerate(trace):
        records.arrival_ns[number] = round(request.arrival_s * NS_PER_S)
        records.input_tokens[number] = request.prompt_tokens
        records.output_tokens[number] = request.output_tokens
    return records
