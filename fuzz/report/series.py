"""A campaign over time, as its journals tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from kvproof.fuzz.campaigns.records import Progress

POINTS_MAX = 60
"""Points of a series over time …"""
POINT_SECONDS_MIN = 2.0
"""… each of so many seconds at least: journals are not written more often."""


class Point(Struct, frozen=True):
    """The campaign as it stood when its shards had been running for so long."""

    at: float
    ops_per_second: float
    """Of all shards together, since the point before."""
    transitions: int
    """Distinct ones seen so far."""
    kept: int
    """Runs kept in the corpus so far."""


class Slice(Struct, frozen=True):
    """What one line of a journal tells, and since when it counts."""

    start: float
    line: Progress


def slices(lines: Iterable[Progress]) -> Iterator[Slice]:
    """Those of a journal; lines of several targets may end together."""
    start = end = 0.0
    for line in lines:
        if line.at > end:
            start, end = end, line.at
        yield Slice(start, line)


def seconds_of(journal: Iterable[Slice]) -> float:
    """How long its slices took."""
    return sum([end - start for start, end in {(one.start, one.line.at) for one in journal}])


def series_of(journals: Sequence[Sequence[Slice]]) -> Iterator[Point]:
    """Shards are added as if they had been started together."""
    end = max([one.line.at for journal in journals for one in journal], default=0.0)
    if not end:
        return
    count = max(1, min(POINTS_MAX, int(end / POINT_SECONDS_MIN)))
    width = end / count
    ops = [0.0] * count
    kept = [0] * count
    first_seen: dict[tuple[str, str], int] = {}
    for start, line in [(one.start, one.line) for journal in journals for one in journal]:
        index = _bin(line.at, width, count)
        kept[index] += line.novel
        for transition in line.transitions:
            key = (line.target, transition)
            first_seen[key] = min(index, first_seen.get(key, index))
        _spread(line.totals.ops, start, line.at, width, ops)
    new = Counter(first_seen.values())
    seen = kept_so_far = 0
    for index in range(count):
        seen += new[index]
        kept_so_far += kept[index]
        yield Point((index + 1) * width, ops[index] / width, seen, kept_so_far)


def _bin(at: float, width: float, count: int) -> int:
    return min(int(at / width), count - 1)


def _spread(ops: int, start: float, end: float, width: float, bins: list[float]) -> None:
    """Share the operations among the points whose time they took."""
    first, last = _bin(start, width, len(bins)), _bin(end, width, len(bins))
    for index in range(first, last + 1):
        covered = min(end, (index + 1) * width) - max(start, index * width)
        bins[index] += ops * covered / (end - start) if end > start else ops
