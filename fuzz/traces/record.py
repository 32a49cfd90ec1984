"""The benchmark record: what has to be known about a result before it is compared with another.

All fields of the chapter's list ("Benchmark systems without attributing results to the wrong
layer"; survey N01 to N15) are there; what does not apply says so in words.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from kvproof.engine.clock import CostModel
from kvproof.fuzz.traces.checked import CheckedTrace, Setting
from kvproof.fuzz.traces.figures import Goodput, Throughput
from kvproof.fuzz.traces.formats import TraceRequest
from kvproof.fuzz.traces.gauges import Percentiles
from kvproof.invariants.events import TransferKind
from kvproof.invariants.scheduling.vocabulary import Limits, Promises
from kvproof.invariants.subject import Configuration

NO_MODEL = "none: tags instead of tensors, no model"
_VIRTUAL = "none: virtual time by the cost model, an assumption; no accelerator"
_ATTRIBUTION = (
    "a difference between two results may be put down to one of the allocator, the scheduler, "
    "reuse, offload and kernels only if these records are equal in all the others; no figure "
    "of another year, model or machine is a constant to multiply by"
)


class Lengths(Struct, frozen=True):
    """A distribution of token counts over the requests of a trace."""

    mean: float
    p50: float
    p90: float
    p99: float
    maximum: int


class Trace(Struct, frozen=True):
    """Which requests were replayed."""

    file: str
    sha256: str
    """Of the file's bytes."""
    requests: int


class Context(Struct, frozen=True):
    """The declared maximum, and what came."""

    max_model_tokens: int
    declared_output_tokens: str
    input_tokens: Lengths
    output_tokens: Lengths


class Load(Struct, frozen=True):
    """Arrivals, and what was running at once."""

    arrivals: str
    requests_per_second: float
    """Of virtual time, from the first arrival to the last; 0 if they are one."""
    max_sequences: int
    active_sequences_mean: float
    active_sequences_maximum: float


class BlockSize(Struct, frozen=True):
    """The unit of allocation, of prefix reuse, and of keys."""

    tokens: int
    bytes: int
    groups: int


class BatchingPolicy(Struct, frozen=True):
    """Who decides, and within which limits."""

    name: str
    about: str
    promises: Promises
    limits: Limits
    run_ahead: int
    """Steps in flight at most."""


class Latency(Struct, frozen=True):
    """Virtual seconds; None if no request has the figure."""

    ttft: Percentiles | None
    tpot: Percentiles | None


class BenchmarkRecord(Struct, frozen=True):
    """One result's record, in the order of the chapter's list."""

    trace: Trace
    model_and_revision: str
    weight_precision: str
    kv_cache_precision: str
    attention_architecture: str
    accelerator: str
    usable_kv_bytes: int
    context: Context
    load: Load
    block_size: BlockSize
    batching_policy: BatchingPolicy
    preemption_policy: str
    prefix_caching: str
    offloading: str
    chunked_prefill: str
    warm_up_and_repetitions: str
    latency: Latency
    goodput: Goodput
    throughput: Throughput
    attribution: str
    cost_model: CostModel
    """The assumption behind all times."""
    software: str


def benchmark_record(
    trace: Sequence[TraceRequest], source: Trace, setting: Setting, checked: CheckedTrace
) -> BenchmarkRecord:
    """The record of one policy's result on one trace."""
    configuration, result = setting.configuration, checked.result
    block_bytes = configuration.block_size * configuration.kv_bytes_per_token
    return BenchmarkRecord(
        trace=source,
        model_and_revision=NO_MODEL,
        weight_precision=NO_MODEL,
        kv_cache_precision=f"{setting.cache_dtype}, by name only: tags instead of tensors",
        attention_architecture=f"{result.attention_mode} attention, one KV cache group, "
        f"{configuration.kv_bytes_per_token} bytes of K and V a token",
        accelerator=_VIRTUAL,
        usable_kv_bytes=configuration.blocks * block_bytes,
        context=_context(trace, setting),
        load=_load(trace, configuration, checked),
        block_size=BlockSize(configuration.block_size, block_bytes, 1),
        batching_policy=BatchingPolicy(
            checked.policy,
            checked.about or "its author says nothing about it",
            checked.promises,
            configuration.scheduling,
            configuration.run_ahead,
        ),
        preemption_policy=_preemption(checked),
        prefix_caching=_prefix_caching(configuration),
        offloading=_offloading(configuration, block_bytes, setting.cost),
        chunked_prefill=_chunked_prefill(configuration.scheduling),
        warm_up_and_repetitions="no warm-up: the prefix cache is cold at the start; one run: "
        "another one gives the same figures",
        latency=Latency(result.percentiles.get("ttft"), result.percentiles.get("tpot")),
        goodput=result.goodput,
        throughput=result.throughput,
        attribution=_ATTRIBUTION,
        cost_model=setting.cost,
        software=f"kvproof {_version()}, Python {platform.python_version()}",
    )


def trace_source(path: Path, requests: int) -> Trace:
    """Which file a trace was read from."""
    return Trace(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), requests)


def write_records(records: Mapping[str, BenchmarkRecord], path: Path) -> None:
    """One JSON object: the records by the names of their results."""
    named = {name: msgspec.to_builtins(record) for name, record in records.items()}
    path.write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")


def _context(trace: Sequence[TraceRequest], setting: Setting) -> Context:
    declared = f"at least {setting.max_tokens}" if setting.max_tokens else "the real ones"
    return Context(
        setting.configuration.scheduling.max_model_tokens,
        declared,
        _lengths([request.prompt_tokens for request in trace]),
        _lengths([request.output_tokens for request in trace]),
    )


def _lengths(tokens: Sequence[int]) -> Lengths:
    p50, p90, p99 = (float(value) for value in np.percentile(tokens, (50, 90, 99)))
    return Lengths(float(np.mean(tokens)), p50, p90, p99, max(tokens))


def _load(
    trace: Sequence[TraceRequest], configuration: Configuration, checked: CheckedTrace
) -> Load:
    seconds = trace[-1].arrival_s
    active = checked.result.metrics.active_sequences
    return Load(
        "open loop: the trace's own arrival times",
        (len(trace) - 1) / seconds if seconds else 0.0,
        configuration.requests,
        active.mean,
        active.maximum,
    )


def _preemption(checked: CheckedTrace) -> str:
    if checked.promises.no_eviction:
        return "none: the policy promises that started requests are not preempted"
    metrics = checked.result.metrics
    swapped = checked.result.tiers.moved["swap_in"].bytes
    how = f"{swapped} bytes swapped in again" if swapped else "all by recomputation"
    seen = f"{metrics.preemptions} preemptions in this run, {how}"
    return f"as the policy decides ({checked.about or 'nothing is said'}); {seen}"


def _prefix_caching(configuration: Configuration) -> str:
    if not configuration.prefix_caching:
        return "off"
    return (
        f"on: chained keys of full blocks of {configuration.block_size} tokens, no salt, "
        "least recently used blocks are evicted first"
    )


def _offloading(configuration: Configuration, block_bytes: int, cost: CostModel) -> str:
    host_blocks, disk_blocks = configuration.host_blocks, configuration.disk_blocks
    if not host_blocks:
        return "off: no host tier, no further tiers"
    host = f"{host_blocks} blocks ({host_blocks * block_bytes} bytes) of host memory"
    swaps = "a swap is copied within its step, which takes longer by that"
    rates = f"assumed: {_rate(cost, 'store')} to and from the host"
    if not configuration.offloads_prefixes:
        return (
            f"suspended requests only: swap space of {host}, for policies that swap; {swaps} "
            f"({rates})"
        )
    if disk_blocks:
        host += f", {disk_blocks} blocks ({disk_blocks * block_bytes} bytes) of disk"
        rates += f", {_rate(cost, 'demote')} to and from the disk"
    evictions = f"{configuration.host_eviction} on the host"
    if disk_blocks:
        evictions += f", {configuration.disk_eviction} on disk"
    return (
        f"meanings: {', '.join(configuration.meanings)}; {host}; moved in units of "
        f"{configuration.block_size} tokens; written through: completed blocks are copied to each "
        "tier before the next iteration, and stay where they were; promoted for the first waiting "
        f"requests, which are held back meanwhile; evictions: {evictions}"
        f"{'; ' + swaps if configuration.suspends else ''} ({rates})"
    )


def _rate(cost: CostModel, kind: TransferKind) -> str:
    latency_ns, ps_per_byte = cost.copy_rate(kind)
    return f"{latency_ns / 1e3:g} µs and {ps_per_byte} ps a byte"


def _chunked_prefill(limits: Limits) -> str:
    if not limits.chunked_prefill:
        return "off: a prompt is computed in one iteration"
    return f"on: what an iteration's budget of {limits.token_budget} tokens leaves, no threshold"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvproof")
    except PackageNotFoundError:  # run from a checkout
        return "(not installed)"
