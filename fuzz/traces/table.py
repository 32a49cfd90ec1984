"""The figures of a replay as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from rich.console import Group
from rich.table import Table

from kvproof.fuzz.traces.figures import (
    BatchSizes,
    PrefixCacheHits,
    SchedulerFigures,
    TraceResult,
)
from kvproof.fuzz.traces.gauges import Gauge, Percentiles
from kvproof.fuzz.traces.tiers import Took

_TIMES = frozenset({"queue_time", "prefill_time", "decode_time", "ttft", "tpot", "e2e"})
_GIB = 1 << 30


def result_tables(name: str, result: TraceResult) -> Group:
    """Three tables: figures of the scheduler, of the requests, and the others of a comparison."""
    rows = [(label, figure) for label, figure in _rows([result]) if label not in _TOLD_ABOVE]
    labels = [label for label, _ in rows]
    rest = _comparison(labels, {name: [figure(result) for _, figure in rows]})
    rest.caption = _goodput(result)
    return Group(scheduler_table(result), request_table(result), rest)


def scheduler_table(result: TraceResult) -> Table:
    """One row for each scheduler figure."""
    table = Table(
        title=f"{result.finished} of {result.requests} requests finished, "
        f"{result.rejected} rejected, {result.steps} steps, "
        f"{result.virtual_seconds:.1f} s of virtual time",
        title_justify="left",
    )
    table.add_column("scheduler figure")
    table.add_column("mean over time, or total", justify="right")
    table.add_column("minimum", justify="right")
    table.add_column("maximum", justify="right")
    for name in SchedulerFigures.__struct_fields__:
        table.add_row(name, *_cells(name, getattr(result.metrics, name)))
    return table


def request_table(result: TraceResult) -> Table:
    """One row for each per-request figure."""
    table = Table()
    table.add_column("request figure")
    for name in Percentiles.__struct_fields__:
        table.add_column(name, justify="right")
    for name, percentiles in result.percentiles.items():
        unit = " s" if name in _TIMES else ""
        digits = ".4f" if name in _TIMES else ",.0f"
        values = msgspec.structs.astuple(percentiles)
        table.add_row(name, *(f"{value:{digits}}{unit}" for value in values))
    table.add_row("attention_mode", result.attention_mode)
    table.add_row("cache_dtype", result.cache_dtype)
    return table


def comparison_tables(results: Mapping[str, TraceResult], width: int) -> Group:
    """One column for each policy, or each policy and memory hierarchy.

    Several tables, one below the other, where the columns do not fit ``width`` characters.
    """
    rows = _rows(results.values())
    columns = {name: [figure(result) for _, figure in rows] for name, result in results.items()}
    labels = [label for label, _ in rows]
    tables = [_comparison(labels, part) for part in _that_fit(columns, labels, width)]
    tables[0].title = "Policies compared"
    tables[-1].caption = _goodput(next(iter(results.values())))
    return Group(*tables)


def _rows(results: Iterable[TraceResult]) -> tuple[Row, ...]:
    """Those of tiers only where there are any."""
    tiered = any(result.tiers.tiered for result in results)
    return (*_ROWS, *(_TIER_ROWS if tiered else ()))


def _goodput(result: TraceResult) -> str:
    slo = result.goodput.slo
    return (
        f"Good: ttft ≤ {slo.ttft:g} s, and tpot ≤ {slo.tpot:g} s if there is more than one output "
        "token."
    )


def _comparison(labels: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title_justify="left", caption_justify="left")
    table.add_column("figure", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for label, *cells in zip(labels, *columns.values(), strict=True):
        table.add_row(label, *cells)
    return table


def _that_fit(
    columns: Mapping[str, Sequence[str]], labels: Sequence[str], width: int
) -> list[dict[str, Sequence[str]]]:
    """As many columns beside the labels as there is room for, and then the others."""
    room = width - max(map(len, labels)) - 4
    parts: list[dict[str, Sequence[str]]] = []
    left = 0
    for name, cells in columns.items():
        needed = 3 + max(map(len, [*cells, *name.split()]))
        if not parts or needed > left:
            parts.append({})
            left = room
        parts[-1][name] = cells
        left -= needed
    return parts


Figure = Callable[[TraceResult], str]
Row = tuple[str, Figure]


def _percentile(name: str, which: str) -> Figure:
    def cell(result: TraceResult) -> str:
        found = result.percentiles.get(name)
        return _seconds(getattr(found, which)) if found else "–"

    return cell


def _seconds(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:,.2f}"


def _batch_cell(result: TraceResult) -> str:
    sizes = result.metrics.batch_size_by_iteration
    return f"{sizes.sequences_mean:.1f} / {sizes.sequences_maximum:,}"


def _range(gauge: Gauge) -> str:
    return f"{gauge.mean:.1%} / {gauge.maximum:.1%}"


def _hit_rate(hits: PrefixCacheHits) -> str:
    return f"{hits.tokens / hits.queries_tokens:.1%}" if hits.queries_tokens else "–"


_ROWS: tuple[Row, ...] = (
    ("finished", lambda r: f"{r.finished:,} of {r.requests:,}"),
    *(
        (f"{name} {which}, s", _percentile(name, which))
        for name in ("ttft", "tpot", "queue_time")
        for which in Percentiles.__struct_fields__
    ),
    ("good requests", lambda r: f"{r.goodput.fraction:.0%}"),
    ("goodput, requests/s", lambda r: f"{r.goodput.requests_per_second:.3g}"),
    ("throughput, requests/s", lambda r: f"{r.throughput.requests_per_second:.3g}"),
    ("output tokens/s", lambda r: f"{r.throughput.output_tokens_per_second:,.0f}"),
    ("virtual time, s", lambda r: f"{r.virtual_seconds:,.1f}"),
    ("batch size, mean / most", _batch_cell),
    ("preemptions", lambda r: f"{r.metrics.preemptions:,}"),
    ("copied back from the host, blocks", lambda r: _count(r.metrics.host_promotions)),
    ("evictions, blocks", lambda r: f"{r.metrics.evictions:,}"),
    ("prefix hits, of prompt tokens", lambda r: _hit_rate(r.metrics.prefix_cache_hits)),
    ("KV blocks held, mean / most", lambda r: _range(r.kv_use.referenced_fraction)),
    ("KV slots with a token, mean / most", lambda r: _range(r.kv_use.effective_fraction)),
    ("… of the slots held", lambda r: f"{r.kv_use.used_of_held:.1%}"),
    ("slots held for later, mean", lambda r: f"{r.kv_use.reserved_slots.mean:,.0f}"),
    ("slots held and never used, mean", lambda r: f"{r.kv_use.fragmentation_slots.mean:,.0f}"),
)
"""What is compared, and what stands in a cell."""
_TOLD_ABOVE = frozenset(
    (
        *("finished", "virtual time, s", "batch size, mean / most", "preemptions"),
        *("copied back from the host, blocks", "evictions, blocks"),
        "prefix hits, of prompt tokens",
        *(label for label, _ in _ROWS if label.partition(" ")[0] in _TIMES),
    )
)
"""Of these, what the figures of a replay alone have as well."""


def _tokens(gauge: Gauge) -> str:
    return f"{gauge.mean:,.0f} / {gauge.maximum:,.0f}"


def _gib_range(gauge: Gauge) -> str:
    return f"{gauge.mean / _GIB:,.1f} / {gauge.maximum / _GIB:,.1f}"


def _tier_hits(tier: str) -> Figure:
    def cell(result: TraceResult) -> str:
        found = result.tiers.hits[tier]
        return f"{found.hits / found.queries:.1%}" if found.queries else "–"

    return cell


def _gib(result: TraceResult, kind: str) -> str:
    return f"{result.tiers.moved[kind].bytes / _GIB:,.1f}"


def _moved(kind: str) -> Figure:
    def cell(result: TraceResult) -> str:
        moved = result.tiers.moved[kind]
        return f"{moved.bytes_per_second / _GIB:,.2f}" if moved.bytes else "–"

    return cell


def _took(took: Took) -> str:
    found = took.percentiles
    return f"{_seconds(found.p50)} / {_seconds(found.p90)}" if found else "–"


_TIER_ROWS: tuple[Row, ...] = (
    (
        "capacity gained, tokens, mean / most",
        lambda r: _tokens(r.tiers.effective_capacity_gained_tokens),
    ),
    (
        "… in GiB, mean / most",
        lambda r: _gib_range(r.tiers.effective_capacity_gained_bytes),
    ),
    (
        "sequences on the host, mean / most",
        lambda r: (
            f"{r.tiers.suspended_sequences.mean:.1f} / {r.tiers.suspended_sequences.maximum:,.0f}"
        ),
    ),
    ("stalls, request-iterations", lambda r: f"{r.tiers.stalls:,}"),
    ("stalls, s", lambda r: _seconds(r.tiers.stall_seconds)),
    ("promoted for the waiting, GiB", lambda r: _gib(r, "promote")),
    ("… and first fetched from disk, GiB", lambda r: _gib(r, "fetch")),
    ("device hits at admission", _tier_hits("device")),
    ("host hits, of the others", _tier_hits("host")),
    ("disk hits, of the others", _tier_hits("disk")),
    ("device to host, GiB/s of virtual time", _moved("store")),
    ("host to device, GiB/s of virtual time", _moved("promote")),
    ("host to disk, GiB/s of virtual time", _moved("demote")),
    ("disk to host, GiB/s of virtual time", _moved("fetch")),
    ("swapped out, GiB/s of virtual time", _moved("swap_out")),
    ("promotion p50 / p90, s", lambda r: _took(r.tiers.promotion_time)),
    ("… from disk to host, s", lambda r: _took(r.tiers.fetch_time)),
    ("host evictions, blocks", lambda r: f"{r.tiers.evictions['host']:,}"),
    ("disk evictions, blocks", lambda r: f"{r.tiers.evictions['disk']:,}"),
    (
        "admissions, first / again",
        lambda r: f"{r.metrics.admissions:,} / {r.metrics.resumptions:,}",
    ),
)
"""What is compared beside, where there is a memory hierarchy."""


def _count(value: int | str) -> str:
    return "–" if isinstance(value, str) else f"{value:,}"


def _cells(name: str, value: object) -> Sequence[str]:
    if isinstance(value, Gauge):
        return [_number(name, part) for part in (value.mean, value.minimum, value.maximum)]
    if isinstance(value, PrefixCacheHits):
        return [f"{value.tokens:,} of {value.queries_tokens:,} tokens ({_hit_rate(value)})"]
    if isinstance(value, BatchSizes):
        return [f"{value.sequences_mean:.1f}", "", f"{value.sequences_maximum:,}"]
    return [value if isinstance(value, str) else _number(name, value)]


def _number(name: str, value: object) -> str:
    assert isinstance(value, int | float)
    if "bytes" in name:
        return f"{value / _GIB:.2f} GiB"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
