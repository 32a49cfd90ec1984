"""A line over the time that a campaign's shards had been running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import floor, log10
from xml.etree.ElementTree import Element, SubElement

from kvproof.fuzz.report.svg import as_text, box, group, line, picture, words

_WIDTH, _HEIGHT = 340, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 34
_TICKS = 4

Points = Sequence[tuple[float, float]]
"""Seconds, and what was counted until then."""


def line_chart(points: Points, label: str) -> str:
    """The chart as SVG; each point tells its value when pointed at."""
    latest_at, latest = points[-1]
    root = picture(_WIDTH, _HEIGHT, f"{label}: {latest:,.0f} after {duration(latest_at)}", "chart")
    end, top = latest_at, _top(max([value for _, value in points]))

    def x(at: float) -> float:
        return _LEFT + at / end * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    for value in _ticks(top):
        line(root, _LEFT, y(value), _WIDTH - _RIGHT, y(value), "grid")
        words(root, f"{value:,.0f}", _LEFT - 6, y(value) + 4, "tick end")
    for at, anchor in ((0, "middle"), (end / 2, "middle"), (end, "end")):
        words(root, duration(at), x(at), _HEIGHT - _BOTTOM + 16, f"tick {anchor}")
    words(root, "time that the shards had been running", x(end / 2), _HEIGHT - 4, "tick middle")
    drawn = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    SubElement(root, "polyline", {"class": "series", "points": drawn})
    if len(points) == 1:
        box(root, x(end) - 3, y(latest) - 3, 6, 6, "dot")
    _titles(root, points, x)
    return as_text(root)


def _titles(root: Element, points: Points, x: Callable[[float], float]) -> None:
    """A strip for each point, to be pointed at."""
    for (before, _), (at, value) in pairwise(
        [(0.0, 0.0), *[point for point in points if point[0]]]
    ):
        strip = group(root, f"{value:,.0f} at {duration(at)}")
        box(strip, x(before), _TOP, x(at) - x(before), _HEIGHT - _TOP - _BOTTOM, "head")


def duration(seconds: float) -> str:
    """``45 s``, ``3 min``, ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _top(most: float) -> float:
    """Where the axis ends: 1, 2 or 5 times a power of ten, as often as it takes."""
    return _step(most) * -(-max(most, 1) // _step(most))


def _step(most: float) -> float:
    least = max(most, 1) / _TICKS
    power = 10.0 ** floor(log10(least))
    return max(1, next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least))


def _ticks(top: float) -> Iterator[float]:
    value, step = 0.0, _step(top)
    while value <= top:
        yield value
        value += step
