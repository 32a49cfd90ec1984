"""The chapter's figures for Prometheus: ``export(scheduler)``, and they are there to be scraped.

The scheduler's figures are read when they are scraped, so that exporting costs the
scheduler nothing; figures of requests are observed once each, when the request finishes.  Names
are the chapter's, with the prefix ``kvproof_``; counters end in ``_total`` and histograms of times
are in seconds, as Prometheus wants it.  What the figures mean is said in
:mod:`kvproof.engine.metrics`.

Needs the package prometheus_client: ``pip install 'kvproof[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvproof.engine.clock import NS_PER_S
from kvproof.engine.job import Job, job_times
from kvproof.engine.scheduler import Scheduler

PREFIX = "kvproof_"

GAUGES = {
    "kv_capacity_bytes": "Size of the KV cache.",
    "kv_bytes_used": "KV bytes in blocks that requests hold.",
    "kv_blocks_total": "Usable blocks; the null block is not counted.",
    "kv_blocks_free": "Blocks that an allocation may take, cached-free ones included.",
    "live_cached_tokens": "Computed tokens of running requests; shared ones once per request.",
    "active_sequences": "Running requests.",
    "waiting_sequences": "Requests that wait: new, preempted and swapped out ones.",
    "batch_size_by_iteration": "Requests in the latest step.",
    "capacity_gained_tokens": "Tokens findable on host or disk, but not on the device.",
    "suspended_sequences": "Live requests whose KV only the host holds.",
}
COUNTERS = {
    "admissions": "First admissions.",
    "resumptions": "Preempted and swapped requests that came back.",
    "preemptions": "Requests that lost their blocks, by recomputation or swap.",
    "evictions": "Blocks whose cached content became unfindable.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache at first admissions.",
    "prefix_cache_queries": "Prompt tokens looked up at first admissions.",
    "host_offload_bytes": "Bytes copied from the device to the host.",
    "host_promotions": "Blocks copied from the host back to the device.",
    "iterations": "Steps launched.",
    "prefix_store_bytes": "Bytes of completed blocks copied from the device to the host.",
    "prefix_load_bytes": "Bytes of completed blocks copied from the host to the device.",
    "suspend_out_bytes": "Bytes of preempted requests copied from the device to the host.",
    "suspend_in_bytes": "Bytes of preempted requests copied from the host to the device.",
    "disk_store_bytes": "Bytes copied from the host to the disk.",
    "disk_load_bytes": "Bytes copied from the disk to the host.",
    "device_queries": "Blocks of prompts looked up at first admissions with prefix offload.",
    "device_hits": "Of these, blocks that the device had.",
    "host_queries": "Blocks of prompts that the device did not have.",
    "host_hits": "Of these, blocks that the host had.",
    "disk_queries": "Blocks of prompts that neither device nor host had.",
    "disk_hits": "Of these, blocks that the disk had.",
    "host_evictions": "Host blocks whose content became unfindable.",
    "disk_evictions": "Disk blocks whose content became unfindable.",
    "corrupt_blocks": "Disk blocks that were found to be damaged.",
    "transfers_failed": "Copies that ended without all their bytes.",
    "suspensions": "Requests that were swapped out.",
    "stalls": "Request-iterations held back for KV on its way to the device.",
    "promotions": "Copies from the host to the device that arrived.",
    "fetches": "Copies from the disk to the host that arrived.",
}
DURATIONS = {
    "stall_time": "Time that requests were held back for KV on its way to the device.",
    "promotion_time": "From the start of copies from the host to the device to their arrival.",
    "fetch_time": "From the start of copies from the disk to the host to their arrival.",
    "store_busy": "Time in which blocks were copied from the device to the host.",
    "promote_busy": "Time in which blocks were copied from the host to the device.",
    "demote_busy": "Time in which blocks were copied from the host to the disk.",
    "fetch_busy": "Time in which blocks were copied from the disk to the host.",
}
"""Counters of time, which the scheduler has in nanoseconds."""

TIMES_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of buckets of times."""
TOKENS = (1, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
COUNTS = (0, 1, 2, 4, 8, 16, 32)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "input_tokens": ("Prompt tokens.", TOKENS),
    "cached_tokens": ("Prompt tokens that were not computed at first admission.", TOKENS),
    "allocated_blocks": ("Blocks held at the end, shared ones included.", TOKENS),
    "queue_time": ("From arrival to the first step.", TIMES_S),
    "prefill_time": ("From the first step to the first output token.", TIMES_S),
    "decode_time": ("From the first output token to the last.", TIMES_S),
    "preemptions": ("Times that the request was preempted.", COUNTS),
}
"""Figures of a finished request, what they mean, and upper bounds of their buckets."""


def export(
    scheduler: Scheduler,
    registry: CollectorRegistry = REGISTRY,
    *,
    attention_mode: str = "full",
    cache_dtype: str = "bfloat16",
) -> SchedulerCollector:
    """Register the figures of one scheduler; what is returned can be unregistered again.

    A second scheduler needs a registry of its own: names are taken but once.
    """
    collector = SchedulerCollector(scheduler, attention_mode, cache_dtype)
    registry.register(collector)
    collector.listen()
    return collector


class SchedulerCollector(Collector):
    """Reads a scheduler's figures when it is scraped, and hears of finished requests."""

    def __init__(self, scheduler: Scheduler, attention_mode: str, cache_dtype: str) -> None:
        self._scheduler = scheduler
        self._info = {"attention_mode": attention_mode, "cache_dtype": cache_dtype}
        self._histograms = {
            name: _histogram(name, meaning, buckets)
            for name, (meaning, buckets) in HISTOGRAMS.items()
        }

    def listen(self) -> None:
        """Observe each request that finishes from now on."""
        before = self._scheduler.on_finished

        def both(job: Job) -> None:
            before(job)
            self.observe(job)

        self._scheduler.on_finished = both

    def observe(self, job: Job) -> None:
        """A request has finished; it still holds its blocks."""
        assert job.cache is not None, "a finished request is known to the cache"
        times = job_times(job)
        values: dict[str, float] = {
            "input_tokens": job.prompt_tokens,
            "cached_tokens": job.cache.cached_tokens,
            "allocated_blocks": sum(map(len, job.cache.tables)),
            "preemptions": job.preemptions,
            "queue_time": times["queue_time_ns"] / NS_PER_S,
            "prefill_time": times["prefill_time_ns"] / NS_PER_S,
            "decode_time": times["decode_time_ns"] / NS_PER_S,
        }
        for name, value in values.items():
            self._histograms[name].observe(value)

    def describe(self) -> Iterator[Metric]:
        """By the names a registry finds out that they are taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """All figures as they are now."""
        figures = self._scheduler.metrics()
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, meaning, value=figures[name])
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, meaning, value=figures[name])
        for name, meaning in DURATIONS.items():
            seconds = figures[f"{name}_ns"] / NS_PER_S
            yield CounterMetricFamily(f"{PREFIX}{name}_seconds", meaning, value=seconds)
        yield InfoMetricFamily(PREFIX + "cache", "What the cache holds.", value=self._info)
        for histogram in self._histograms.values():
            yield from histogram.collect()


def _histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
    unit = "_seconds" if name.endswith("_time") else ""
    full_name = f"{PREFIX}request_{name}{unit}"
    return Histogram(full_name, f"Of finished requests. {meaning}", buckets=buckets, registry=None)
