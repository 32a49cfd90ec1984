"""The figures of a replay as tables for a terminal."""

from __future__ import annotations

import msgspec
from rich.console import Group
from rich.table import Table

from kvproof.fuzz.traces.figures import (
    BatchSizes,
    Gauge,
    Percentiles,
    PrefixCacheHits,
    SchedulerFigures,
    TraceResult,
)

_TIMES = frozenset({"queue_time", "prefill_time", "decode_time", "ttft", "tpot"})
_GIB = 1 << 30


def result_tables(result: TraceResult) -> Group:
    """The scheduler's figures, and below them those of the requests."""
    return Group(scheduler_table(result), request_table(result))


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


def _cells(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Gauge):
        return tuple(_number(name, part) for part in (value.mean, value.minimum, value.maximum))
    if isinstance(value, PrefixCacheHits):
        share = value.tokens / value.queries_tokens if value.queries_tokens else 0.0
        return (f"{value.tokens:,} of {value.queries_tokens:,} tokens ({share:.1%})",)
    if isinstance(value, BatchSizes):
        return (f"{value.sequences_mean:.1f}", "", f"{value.sequences_maximum:,}")
    return (value if isinstance(value, str) else _number(name, value),)


def _number(name: str, value: object) -> str:
    assert isinstance(value, int | float)
    if "bytes" in name:
        return f"{value / _GIB:.2f} GiB"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
