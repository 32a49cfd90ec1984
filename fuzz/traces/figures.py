"""The figures of a replay: the chapter's scheduler metrics, and percentiles over its requests.

Where systems define a figure differently, this is what is meant (survey sections 1.C, 1.K, 1.L):

* gauges are weighted by virtual time; *used* blocks are referenced ones, *free* ones include
  cached-free blocks, the null block is in neither;
* ``live_cached_tokens`` counts a shared token once for each request that holds it; *used* token
  states, of which the effective fraction is made, count it once;
* ``waiting_sequences`` are those that arrived and hold no blocks, preempted ones included;
* ``admissions`` and ``prefix_cache_hits`` are about first admissions, resumptions stand beside
  them; hits are tokens, and so are their queries;
* ``evictions`` are blocks whose content became unfindable, never requests;
* offloaded bytes and promotions (in blocks) are those of swapped requests, and of completed blocks
  where these are copied to lower tiers;
* *reserved* slots are held by a running request and will be used by it, but are not yet;
  *fragmentation* is held and never used, since the request ends before.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from kvproof.engine.clock import NS_PER_S, CostModel
from kvproof.fuzz.traces.gauges import Gauge, Percentiles, percentiles, rate
from kvproof.fuzz.traces.tiers import TierFigures

NO_HOST_TIER = "not applicable: no host tier"
SERIES_POINTS = 50
"""Points at most in a series over the iterations."""


class PrefixCacheHits(Struct, frozen=True):
    """Prefix hits, in tokens: of first admissions, and apart from them of resumptions."""

    tokens: int
    queries_tokens: int
    resumed_tokens: int
    resumed_queries_tokens: int


class BatchSizes(Struct, frozen=True):
    """Sequences and tokens by iteration.

    The series are means over ``iterations_per_point`` iterations each, the last over the rest.
    """

    sequences_mean: float
    sequences_maximum: int
    tokens_mean: float
    tokens_maximum: int
    iterations_per_point: int
    sequences_series: list[float]
    tokens_series: list[float]


class SchedulerFigures(Struct, frozen=True):
    """The chapter's fourteen, by its names, and the resumptions."""

    kv_capacity_bytes: int
    kv_bytes_used: Gauge
    kv_blocks_total: int
    kv_blocks_free: Gauge
    live_cached_tokens: Gauge
    active_sequences: Gauge
    waiting_sequences: Gauge
    admissions: int
    preemptions: int
    evictions: int
    prefix_cache_hits: PrefixCacheHits
    host_offload_bytes: int | str
    host_promotions: int | str
    batch_size_by_iteration: BatchSizes
    resumptions: int


class KvUse(Struct, frozen=True):
    """How much of the KV memory is put to use (survey C04 to C07); slots are of one token each."""

    total_slots: int
    effective_fraction: Gauge
    """Token states in use, of all slots; shared ones count once."""
    referenced_fraction: Gauge
    """Blocks that requests hold, of all blocks."""
    reserved_slots: Gauge
    """Held, and used later."""
    fragmentation_slots: Gauge
    """Held, and never used."""
    used_of_held: float
    """Token states in use, of the slots that requests hold; over all time."""


class Slo(Struct, frozen=True):
    """What a request must meet to be good; times in seconds."""

    ttft: float = 2.0
    tpot: float = 0.1
    """Of requests with two output tokens or more: one token has no time per further token."""


class Goodput(Struct, frozen=True):
    """Finished requests that met the objective."""

    slo: Slo
    met: int
    requests_per_second: float
    """… per second of virtual time."""
    fraction: float
    """… of all requests of the trace."""


class Throughput(Struct, frozen=True):
    """Per second of virtual time, over finished requests."""

    requests_per_second: float
    output_tokens_per_second: float
    tokens_per_second: float
    """Prompt tokens and output tokens."""


class TraceResult(Struct, frozen=True):
    """What a replay has to say; ready for ``msgspec.json.encode``."""

    requests: int
    finished: int
    rejected: int
    rejections: dict[str, int]
    """Rejected requests by reason."""
    stopped: str | None
    """Why the replay ended before the trace did: a subject that refuses what it must grant."""
    steps: int
    virtual_seconds: float
    metrics: SchedulerFigures
    percentiles: dict[str, Percentiles]
    """Over the finished requests, by the chapter's names; times in seconds."""
    goodput: Goodput
    throughput: Throughput
    kv_use: KvUse
    tiers: TierFigures
    attention_mode: str
    cache_dtype: str
    cost: CostModel
    """The assumption behind all times."""


class RequestRecords:
    """Per-request figures in flat arrays, indexed by the request's number in the trace.

    A time is -1 until it is known; all others but the arrival stay so if it does not finish.
    """

    def __init__(self, requests: int) -> None:
        unknown = array("q", [-1]) * requests
        zero = array("q", [0]) * requests
        self.arrival_ns = unknown[:]
        self.scheduled_ns = unknown[:]
        self.first_token_ns = unknown[:]
        self.finished_ns = unknown[:]
        self.input_tokens = zero[:]
        self.output_tokens = zero[:]
        self.cached_tokens = zero[:]
        self.allocated_blocks = zero[:]
        self.preemptions = zero[:]

    def percentiles(self) -> dict[str, Percentiles]:
        """Percentiles over the finished requests; none if there are none.

        ``queue_time`` ends with the first admission, ``prefill_time`` with the first token,
        ``decode_time`` and ``e2e`` with the last; preemptions are inside.  A request with one
        output token has no ``tpot``.
        """
        values = self._finished()
        if not values["finished_ns"].size:
            return {}
        decode_ns = values["finished_ns"] - values["first_token_ns"]
        later_tokens = values["output_tokens"] - 1
        several = later_tokens > 0
        times_ns: Mapping[str, np.ndarray] = {
            "queue_time": values["scheduled_ns"] - values["arrival_ns"],
            "prefill_time": values["first_token_ns"] - values["scheduled_ns"],
            "decode_time": decode_ns,
            "ttft": values["first_token_ns"] - values["arrival_ns"],
            "tpot": decode_ns[several] / later_tokens[several],
            "e2e": values["finished_ns"] - values["arrival_ns"],
        }
        counts = ("input_tokens", "cached_tokens", "allocated_blocks", "preemptions")
        columns = {name: values[name] for name in counts}
        columns |= {name: time / NS_PER_S for name, time in times_ns.items()}
        return {name: percentiles(column) for name, column in columns.items() if column.size}

    def goodput(self, slo: Slo, virtual_seconds: float) -> Goodput:
        """How many finished requests met ``slo``, and how many that is per second."""
        values = self._finished()
        ttft_ns = values["first_token_ns"] - values["arrival_ns"]
        decode_ns = values["finished_ns"] - values["first_token_ns"]
        most_ns = slo.tpot * NS_PER_S * (values["output_tokens"] - 1)
        good = (ttft_ns <= slo.ttft * NS_PER_S) & (decode_ns <= most_ns)
        met = int(np.count_nonzero(good))
        requests = len(self.arrival_ns)
        return Goodput(slo, met, rate(met, virtual_seconds), met / requests if requests else 0.0)

    def throughput(self, virtual_seconds: float) -> Throughput:
        """What the finished requests amount to, per second."""
        values = self._finished()
        output = int(values["output_tokens"].sum())
        return Throughput(
            rate(values["finished_ns"].size, virtual_seconds),
            rate(output, virtual_seconds),
            rate(output + int(values["input_tokens"].sum()), virtual_seconds),
        )

    def _finished(self) -> dict[str, np.ndarray]:
        """All columns, of the finished requests only."""
        finished = np.asarray(self.finished_ns) >= 0
        return {name: np.asarray(column)[finished] for name, column in vars(self).items()}


def batch_sizes(sequences: Sequence[int], tokens: Sequence[int]) -> BatchSizes:
    """Summary of two figures by iteration."""
    if not sequences:
        return BatchSizes(0.0, 0, 0.0, 0, 1, [], [])
    per_point = -(-len(sequences) // SERIES_POINTS)
    starts = np.arange(0, len(sequences), per_point)
    lengths = np.diff(np.append(starts, len(sequences)))

    def series(column: Sequence[int]) -> list[float]:
        means = np.add.reduceat(np.asarray(column, dtype=np.int64), starts) / lengths
        return [round(float(mean), 3) for mean in means]

    return BatchSizes(
        sequences_mean=float(np.mean(sequences)),
        sequences_maximum=max(sequences),
        tokens_mean=float(np.mean(tokens)),
        tokens_maximum=max(tokens),
        iterations_per_point=per_point,
        sequences_series=series(sequences),
        tokens_series=series(tokens),
    )
