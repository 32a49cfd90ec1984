"""The export to Prometheus: the chapter's names, and values that agree with the scheduler's."""

from __future__ import annotations

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from kvproof.engine.clock import NS_PER_S  # noqa: E402
from kvproof.engine.job import Job, job_times  # noqa: E402
from kvproof.engine.policies import FirstComeFirstServed  # noqa: E402
from kvproof.engine.prometheus import (  # noqa: E402
    COUNTERS,
    DURATIONS,
    GAUGES,
    HISTOGRAMS,
    export,
)
from kvproof.invariants.operations import Arrive, Retire, Schedule, Segment  # noqa: E402
from kvproof.invariants.subject import Configuration  # noqa: E402
from kvproof.stateful_tests.subjects.scheduler import SchedulerSubject  # noqa: E402

CHAPTER = (
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
    "host_offload_bytes",
    "host_promotions",
    "batch_size_by_iteration",
)
PER_REQUEST = (
    "input_tokens",
    "cached_tokens",
    "allocated_blocks",
    "queue_time",
    "prefill_time",
    "decode_time",
    "preemptions",
)


def subject_with_work() -> SchedulerSubject:
    """Three requests with one prompt, of which two may run, in a pool too small for two."""
    configuration = Configuration(
        blocks=8, block_size=2, requests=2, run_ahead=1, host_blocks=16, offload="prefix"
    )
    subject = SchedulerSubject(configuration, policy=FirstComeFirstServed)
    for _ in range(3):
        subject.apply(Arrive((Segment(0, 4),), output=6))
    return subject


def step(subject: SchedulerSubject) -> None:
    subject.apply(Schedule())
    subject.apply(Retire())


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """Samples by name, with their labels where they have any."""
    text = generate_latest(registry).decode()
    return {
        sample.name + str(sample.labels or ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_all_figures_of_the_chapter_are_there() -> None:
    assert set(CHAPTER) <= set(GAUGES) | set(COUNTERS)
    assert not set(GAUGES) & set(COUNTERS)
    assert set(HISTOGRAMS) == set(PER_REQUEST)
    # attention_mode and cache_dtype, the other two per request, are the same for all of them.
    registry = CollectorRegistry()
    export(subject_with_work().scheduler, registry, cache_dtype="fp8")
    labels = {"attention_mode": "full", "cache_dtype": "fp8"}
    assert scraped(registry)[f"kvproof_cache_info{labels}"] == 1.0


def test_what_is_scraped_is_what_the_scheduler_says_now() -> None:
    subject, registry = subject_with_work(), CollectorRegistry()
    scheduler = subject.scheduler
    durations = {f"{name}_ns" for name in DURATIONS}
    assert set(scheduler.metrics()) == set(GAUGES) | set(COUNTERS) | durations
    export(scheduler, registry)
    while scheduler.jobs:
        figures, samples = scheduler.metrics(), scraped(registry)
        for name in GAUGES:
            assert samples[f"kvproof_{name}"] == figures[name], name
        for name in COUNTERS:
            assert samples[f"kvproof_{name}_total"] == figures[name], name
        for name in DURATIONS:
            seconds = samples[f"kvproof_{name}_seconds_total"]
            assert seconds == pytest.approx(figures[f"{name}_ns"] / NS_PER_S), name
        step(subject)
    assert scheduler.metrics()["preemptions"] > 0
    assert scheduler.metrics()["prefix_cache_hits"] > 0
    assert scheduler.metrics()["prefix_store_bytes"] > 0
    assert scheduler.metrics()["store_busy_ns"] > 0


def test_each_finished_request_is_observed_once() -> None:
    subject, registry = subject_with_work(), CollectorRegistry()
    finished: list[tuple[int, dict[str, int], int]] = []

    def keep(job: Job) -> None:
        assert job.cache is not None
        finished.append((job.preemptions, job_times(job), len(job.cache.tables[0])))

    subject.scheduler.on_finished = keep  # is still told
    export(subject.scheduler, registry)
    while subject.scheduler.jobs:
        step(subject)
    samples = scraped(registry)
    assert len(finished) == 3
    for name in PER_REQUEST:
        unit = "_seconds" if name.endswith("_time") else ""
        assert samples[f"kvproof_request_{name}{unit}_count"] == 3
    assert samples["kvproof_request_input_tokens_sum"] == 3 * 4
    assert samples["kvproof_request_preemptions_sum"] == sum(n for n, _, _ in finished)
    assert samples["kvproof_request_allocated_blocks_sum"] == sum(n for _, _, n in finished) == 15
    for name in ("queue_time", "prefill_time", "decode_time"):
        seconds = sum(times[f"{name}_ns"] for _, times, _ in finished) / NS_PER_S
        assert samples[f"kvproof_request_{name}_seconds_sum"] == pytest.approx(seconds)
        assert seconds > 0


def test_names_are_taken_once_and_given_back() -> None:
    registry = CollectorRegistry()
    collector = export(subject_with_work().scheduler, registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        export(subject_with_work().scheduler, registry)
    registry.unregister(collector)
    export(subject_with_work().scheduler, registry)
